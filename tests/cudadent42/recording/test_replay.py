"""A prediction held against the script itself, by a clock of the tests' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cudadent42.base.errors import LabError, UsageError
from cudadent42.decisions.compare import compare
from cudadent42.model.records import MachineReport, Plan, Sample
from cudadent42.model.script import CallTimes, OtherSuite, Prediction, Script
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention_backward.case import AttentionTrainingStepCase
from cudadent42.recording.launch import WITH, WITHOUT, Ended
from cudadent42.recording.records import Recording
from cudadent42.recording.replay import prediction_of, replay
from cudadent42.runs.run_folder import Manifest, RunFolder, RunStatus
from cudadent42.version import __version__

COMMAND = ("train.py", "--steps", "3")


def folder(path: str, case: AttentionCase, seconds: float, speedup: float, **changes: object) -> RunFolder:
    """A run of one case that is so many times as fast, of a script of 10 s."""
    script = Script("abc", COMMAND, "cpu", (10.0,), (CallTimes(case.id, 5, (seconds,)),))
    script = replace(script, elsewhere=(OtherSuite("other.toml", 5, (1.0,)),), **changes)  # type: ignore[arg-type]
    plan = Plan("s", "cpu", (case,), "pytorch", ("pytorch", "ours"), 10, 1, seed=3, control=False)
    plan = replace(plan, script=script)
    samples = tuple(
        Sample(case.id, name, block, position, latency, 1, 0.1, 0.0)
        for block in range(10)
        for position, (name, latency) in enumerate({"pytorch": speedup, "ours": 1.0}.items())
    )
    manifest = Manifest(
        1, __version__, RunStatus.FINISHED, "", (), "", "", plan, MachineReport((), "", {}), None, None, {}
    )
    return RunFolder(Path(path), manifest, samples, None, compare(plan, samples, {}, {}))


FORWARD = folder("forward", AttentionCase("a", "fp32", 1, 1, 1, 8, 8, 16), 2.0, 2.0)
STEP = folder("step", AttentionTrainingStepCase("a", "fp32", 1, 1, 1, 8, 8, 16), 4.0, 4.0)


def test_runs_of_all_suites_of_a_recording_predict_together() -> None:
    alone = prediction_of([FORWARD], COMMAND)
    assert alone.predicted_seconds == pytest.approx(9.0)
    both = prediction_of([FORWARD, STEP], ("some/folder/train.py", "--steps", "3"))
    assert both.predicted_seconds == pytest.approx(10 - 2 + 1 - 4 + 1)
    assert both.share == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("folders", "command", "message"),
    [
        ([FORWARD], ("train.py", "--steps", "4"), "expected the same command to replay"),
        ([FORWARD], ("test.py", "--steps", "3"), "expected the same command to replay"),
        (
            [FORWARD, folder("x", AttentionCase("b", "fp32", 1, 1, 1, 8, 8, 16), 1.0, 2.0, recording="def")],
            COMMAND,
            "of different recordings",
        ),
        (
            [replace(FORWARD, manifest=replace(FORWARD.manifest, plan=replace(FORWARD.plan, script=None)))],
            COMMAND,
            "no run of a suite that `cudadent42 capture` wrote",
        ),
        ([replace(FORWARD, results=None)], COMMAND, "predicts nothing"),
    ],
)
def test_runs_that_say_nothing_of_a_script(
    folders: list[RunFolder], command: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        prediction_of(folders, command)


def scripted(without_s: float, with_s: float, noise: float, order: list[str]) -> Callable[[str], Ended]:
    """A script whose runs take so long by turns; the first of each way takes an hour more."""
    random = np.random.default_rng(5)
    drift = iter(np.linspace(1.0, 1.5, 1000))

    def run(mode: str) -> Ended:
        first = mode not in order
        order.append(mode)
        seconds = (
            {WITHOUT: without_s, WITH: with_s}[mode] * next(drift) * float(np.exp(random.normal(0, noise)))
        )
        return Ended(0, Recording(seconds + 3600 * first, ()))

    return run


def test_pairs_are_interleaved_and_the_first_does_not_count() -> None:
    order: list[str] = []
    told: list[str] = []
    outcome = replay(prediction(1.25), scripted(10.0, 8.0, 0.001, order), 12, tell=told.append)
    assert len(order) == 26
    pairs = [tuple(order[number : number + 2]) for number in range(0, 26, 2)]
    assert set(pairs) == {(WITHOUT, WITH), (WITH, WITHOUT)}
    assert len(outcome.seconds) == len(outcome.seconds_with_kernels) == 12
    assert max(outcome.seconds) < 20
    # The machine got slower by the end; the ratio did not.
    assert outcome.speedup == pytest.approx(1.25, rel=0.005)
    assert outcome.ci_low <= outcome.speedup <= outcome.ci_high
    assert abs(outcome.error) < 0.005
    assert outcome.inside
    assert told[0].startswith("warm-up: 36")
    assert told[-1].startswith("pair 12 of 12")


def test_a_wrong_prediction_is_said_to_be_off() -> None:
    outcome = replay(prediction(2.0), scripted(10.0, 8.0, 0.001, []), 5, tell=lambda text: None)
    # Predicted to take half of its time, and it takes four fifths.
    assert outcome.error == pytest.approx(-0.3, abs=0.005)
    assert not outcome.inside


@pytest.mark.parametrize("ended", [Ended(3, Recording(1.0, ())), Ended(0, None)])
def test_a_script_that_fails_has_no_replay(ended: Ended) -> None:
    with pytest.raises(LabError, match="exit code"):
        replay(prediction(2.0), lambda mode: ended, 5, tell=lambda text: None)


def prediction(speedup: float) -> Prediction:
    return Prediction(10.0, 10 / speedup, speedup, speedup - 0.02, speedup + 0.02, 0.5, 0.5, 0.5, 2.0, 0.0)
