"""Timing this project's kernels without a part of their work, against the whole, in one process."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from cudadent42.decisions.statistics import estimate_ratio
from cudadent42.model.cases import Case
from cudadent42.model.implementations import Call
from cudadent42.operations import definition
from cudadent42.operations.interface import WHOLE, Inputs
from cudadent42.profiles.records import Ablation
from cudadent42.timing.quiet import Patience, QuietReadings, quiet_readings
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
    """What each part costs that can be left out, and why some or all are not there.

    Sound as far as it goes: a part that is hidden behind another costs nothing here, and leaving it out shifts power
    and clocks; so a saving is what is exposed, at most.
    """
    try:
        parts = definition(case.operation).without(case, inputs)
    except BuildError as error:
        return (), f"a kernel with a part left out does not build: {error}"
    if not parts.calls:
        return (), parts.why_not
    calls, note = _built(parts.calls)
    if WHOLE not in calls:
        return (), note
    blocks = _blocks(calls, timer, seed, quiet=inputs.result_like.is_cpu)
    if len(blocks.readings) < _FEWEST_BLOCKS:
        return (), f"the kernel without parts of its work is not timed: {blocks.reason('blocks')}"
    times = {part: [block[part] for block in blocks.readings] for part in calls}
    return tuple(_ablation(part, times[WHOLE], times[part], seed) for part in calls if part != WHOLE), note


def _built(calls: Mapping[str, Call]) -> tuple[dict[str, Call], str]:
    """Those whose kernels build, called a few times, and why others do not: without a part, a compiler may spill what
    it does not spill of the whole.
    """
    built, reasons = {}, []
    for part, call in calls.items():
        try:
            for _ in range(_WARM_UPS):
                call()
            built[part] = call
        except BuildError as error:
            lacks = "the kernel" if part == WHOLE else f"the kernel without {part}"
            reasons.append(f"{lacks} does not build: {str(error).splitlines()[0]}")
    return built, "; ".join(reasons)


def _blocks(
    calls: Mapping[str, Call], timer: Timer, seed: int, *, quiet: bool
) -> QuietReadings[dict[str, float]]:
    """Milliseconds per call, by block; in every block each variant once, in random order, all by as many calls. With
    ``quiet``, blocks in which a thread waited for a processor do not count."""
    generator = random.Random(seed)
    first = timer.calibrate([calls[WHOLE]])()
    read = {part: timer.calibrate([call], first.inner) for part, call in calls.items()}
    block_s = first.latency_ms * 1e-3 * first.inner * len(calls)
    wanted = max(_FEWEST_BLOCKS, min(BLOCKS, int(_MOST_S / max(block_s, 1e-9))))

    def block() -> dict[str, float]:
        return {part: read[part]().latency_ms for part in generator.sample(list(calls), len(calls))}

    if not quiet:
        return QuietReadings(tuple(block() for _ in range(wanted)), wanted)
    return quiet_readings(block, wanted, Patience(_MOST_FOR_ONE, _MOST_S, fewest=wanted))


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
