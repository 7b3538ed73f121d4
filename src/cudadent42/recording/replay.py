"""A prediction held against the script itself: run with this project's kernels and without, in fresh processes.

A pair of runs is a block, and its two runs stand in random order: what the machine does over time falls on both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.seeds import derived_seed
from cudadent42.decisions.compare import candidate_ratios
from cudadent42.decisions.prediction import predict
from cudadent42.decisions.statistics import RatioEstimate, estimate_ratio
from cudadent42.model.script import Prediction, Replay, Script
from cudadent42.recording.launch import WITH, WITHOUT, Ended
from cudadent42.runs.run_folder import RunFolder

Run = Callable[[str], Ended]
"""One run of the script in a mode of ``launch``."""


def prediction_of(folders: Sequence[RunFolder], command: Sequence[str]) -> Prediction:
    """What the runs of all suites of one recording say of the script together.

    Raises UsageError for folders that are not of recorded suites, of several recordings, or of another script.
    """
    ratios: dict[str, RatioEstimate] = {}
    reasons: dict[str, str] = {}
    whole: Script | None = None
    for number, folder in enumerate(folders):
        script = _script_of(folder, command)
        if whole is not None and whole.recording != script.recording:
            raise UsageError(
                f"{folder.path} and {folders[0].path} are of different recordings; "
                "expected runs of suites that one `cudadent42 capture` wrote"
            )
        results = folder.results
        assert results is not None
        own, why = candidate_ratios(folder.plan, folder.samples, results.skipped, results.peaks)
        # Two suites may give cases of different operations the same name.
        calls = tuple(replace(times, case=f"{number}/{times.case}") for times in script.calls)
        ratios |= {f"{number}/{case}": ratio for case, ratio in own.items()}
        reasons |= {f"{number}/{case}": reason for case, reason in why.items()}
        whole = (
            replace(script, calls=calls) if whole is None else replace(whole, calls=(*whole.calls, *calls))
        )
    assert whole is not None
    return predict(whole, ratios, left_out=reasons, seed=derived_seed(folders[0].plan.seed, "prediction"))


def _script_of(folder: RunFolder, command: Sequence[str]) -> Script:
    script = folder.plan.script
    if script is None:
        raise UsageError(f"{folder.path} is no run of a suite that `cudadent42 capture` wrote")
    if folder.results is None or folder.results.prediction is None:
        raise UsageError(f"{folder.path} predicts nothing, as its report says; expected a finished run")
    if _named(script.command) != _named(command):
        raise UsageError(
            f"{folder.path} was recorded from {' '.join(script.command) or 'a block'!r}; "
            f"expected the same command to replay, not {' '.join(command)!r}"
        )
    return script


def _named(command: Sequence[str]) -> tuple[str, ...]:
    """The command, whatever folder the script is named from."""
    return (Path(command[0]).name, *command[1:]) if command else ()


def replay(
    prediction: Prediction, run: Run, pairs: int, *, seed: int = 0, tell: Callable[[str], None] = print
) -> Replay:
    """The script's own answer. One pair of runs that does not count comes first: it compiles kernels.

    Raises LabError where the script does not end with exit code 0.
    """
    chance = random.Random(seed)
    seconds: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    for pair in range(pairs + 1):
        order = chance.sample((WITHOUT, WITH), 2)
        took = {mode: _seconds(mode, run(mode)) for mode in order}
        words = "warm-up" if pair == 0 else f"pair {pair} of {pairs}"
        tell(f"{words}: {took[WITHOUT]:.4g} s without the kernels, {took[WITH]:.4g} s with them")
        if pair:
            for mode, each in took.items():
                seconds[mode].append(each)
    ratio = estimate_ratio(
        np.asarray(seconds[WITHOUT], dtype=np.float64), np.asarray(seconds[WITH], dtype=np.float64), seed
    )
    low, high = ratio.interval()
    return Replay(tuple(seconds[WITHOUT]), tuple(seconds[WITH]), ratio.ratio, low, high, prediction)


def _seconds(mode: str, ended: Ended) -> float:
    if ended.exit_code != 0 or ended.recording is None:
        raise LabError(
            f"the script ended with exit code {ended.exit_code} {mode} the kernels; a replay needs it to end with 0"
        )
    return ended.recording.seconds
