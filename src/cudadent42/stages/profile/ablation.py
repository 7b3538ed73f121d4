"""Timing this project's kernels without a part of their work, against the whole, in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

import numpy as np

from cudadent42.decisions.statistics import estimate_ratio
from cudadent42.model.cases import Case
from cudadent42.model.implementations import Call
from cudadent42.operations import definition
from cudadent42.operations.interface import WHOLE, Inputs
from cudadent42.profiles.records import Ablation
from cudadent42.timing.contention import WAIT_LIMIT, waited_s
from cudadent42.timing.timers import Timer
from flashmoe_science.errors import BuildError

BLOCKS = 15
_FEWEST_BLOCKS = 5
"""Of which an interval can be had."""
_MOST_S = 30.0
"""That the race may take where a call takes long."""
_MOST_FOR_ONE = 6
"""Blocks that are taken for each that is wanted, where others use the processors."""
_WARM_UPS = 3


def ablate(case: Case, inputs: Inputs, timer: Timer, seed: int) -> tuple[tuple[Ablation, ...], str]:
    """What each part costs that can be left out, and why not where there is none.

    Sound as far as it goes: a part that is hidden behind another costs nothing here, and leaving it out shifts power
    and clocks; so a saving is what is exposed, at most.
    """
    try:
        parts = definition(case.operation).without(case, inputs)
        calls = parts.calls
        for call in calls.values():
            for _ in range(_WARM_UPS):
                call()
    except BuildError as error:
        return (), f"a kernel with a part left out does not build: {error}"
    if not calls:
        return (), parts.why_not
    times, taken = _times(calls, timer, seed, quiet=inputs.result_like.is_cpu)
    counted = len(times[WHOLE])
    if counted < _FEWEST_BLOCKS:
        return (), (
            f"the kernel without parts of its work is not timed: other work took the processors away in "
            f"{taken - counted} of {taken} blocks; repeat on a quiet machine"
        )
    return tuple(_ablation(part, times[WHOLE], times[part], seed) for part in calls if part != WHOLE), ""


def _times(
    calls: Mapping[str, Call], timer: Timer, seed: int, *, quiet: bool
) -> tuple[dict[str, list[float]], int]:
    """Milliseconds per call, by block; in every block each variant once, in random order, all by as many calls. And how
    many blocks were taken: with ``quiet``, those in which a thread waited for a processor do not count."""
    generator = random.Random(seed)
    first = timer.calibrate([calls[WHOLE]])()
    read = {part: timer.calibrate([call], first.inner) for part, call in calls.items()}
    block_s = first.latency_ms * 1e-3 * first.inner * len(calls)
    blocks = max(_FEWEST_BLOCKS, min(BLOCKS, int(_MOST_S / max(block_s, 1e-9))))
    times: dict[str, list[float]] = {part: [] for part in calls}
    stop = time.perf_counter() + _MOST_S
    taken = 0
    while len(times[WHOLE]) < blocks and taken < _MOST_FOR_ONE * blocks:
        if taken >= blocks and time.perf_counter() > stop:
            break
        taken += 1
        began, waited = time.perf_counter(), waited_s()
        block = {part: read[part]().latency_ms for part in generator.sample(list(calls), len(calls))}
        if quiet and waited_s() - waited > WAIT_LIMIT * (time.perf_counter() - began):
            continue
        for part, latency_ms in block.items():
            times[part].append(latency_ms)
    return times, taken


def _ablation(part: str, whole: list[float], without: list[float], seed: int) -> Ablation:
    estimate = estimate_ratio(np.array(whole), np.array(without), seed)
    low, high = estimate.interval()
    return Ablation(
        part=part,
        latency_ms=float(np.median(without)),
        baseline_ms=float(np.median(whole)),
        saved=1 - 1 / estimate.ratio,
        saved_low=1 - 1 / low,
        saved_high=1 - 1 / high,
    )
