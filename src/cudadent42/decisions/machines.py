"""What several machines of one kind say together: machine as a random effect. Pure functions.

The logarithm of a ratio on machine ``m`` in block ``b`` is ``theta + u_m + e_mb``: how fast a machine is cancels in
the ratio, but a configuration may suit one machine better than another (``u_m``). Blocks of one machine share ``u_m``,
so blocks of all machines thrown together give an interval that is too narrow. Here a machine is one number, and

* with one machine, its own interval is given, and holds there,
* with two or three, all have to say the same, and the widest bounds are given,
* from `POOLED_FROM` on there is one interval for the kind: Student's t on the machines' centres, with one degree of
  freedom fewer than machines. It is exact where those are normal, so it is taken however many machines there are; a
  bootstrap over machines covers 82 to 98 % (benchmarks/results/2026-11-22-cpu-fleet).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low, stdev

from cudadent42.decisions.margin import lower, upper
from cudadent42.decisions.student import quantile
from cudadent42.decisions.verdicts import EQUALITY_LEVEL
from cudadent42.model.records import Verdict

POOLED_FROM = 4
"""Machines."""

CONFIDENCE = 0.95

FAR_OFF = 0.10
"""Share by which a machine's baseline may differ from the median of its kind."""

_LEAST_TO_COMPARE = 4
"""Machines without which nobody can say who of them is off."""


@dataclass(frozen=True)
class MachineRatio:
    """A case on one machine."""

    unit: str
    ratio: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True)
class Combined:
    ratio: float
    low: float
    high: float
    verdict: Verdict
    machines: int
    words: str
    """Where it holds: behind ``faster``."""


def combine(results: Sequence[MachineRatio], margin: float) -> Combined:
    """One answer of one or more machines, each of which is here once. Raises ValueError for none."""
    count = len(results)
    if count == 0:
        raise ValueError("expected the result of a machine")
    if count == 1:
        (only,) = results
        return Combined(only.ratio, only.low, only.high, only.verdict, 1, "on this device")
    centres = [math.log(each.ratio) for each in results]
    if count < POOLED_FROM:
        agreed = {each.verdict for each in results}
        verdict = agreed.pop() if len(agreed) == 1 else Verdict.UNDECIDED
        words = f"on each of {count} devices" if not agreed else f"not alike on {count} devices"
        low, high = min(each.low for each in results), max(each.high for each in results)
        return Combined(math.exp(fmean(centres)), low, high, verdict, count, words)
    centre, low, high = interval(centres, CONFIDENCE)
    verdict = Verdict.UNDECIDED
    if math.exp(low) > upper(margin):
        verdict = Verdict.FASTER
    elif math.exp(high) < lower(margin):
        verdict = Verdict.SLOWER
    else:
        _, inner_low, inner_high = interval(centres, 1 - 2 * EQUALITY_LEVEL)
        if lower(margin) < math.exp(inner_low) and math.exp(inner_high) < upper(margin):
            verdict = Verdict.EQUAL
    words = f"on this kind of device, by {count} of them"
    return Combined(math.exp(centre), math.exp(low), math.exp(high), verdict, count, words)


def interval(centres: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Mean and bounds of the centres' expectation, by Student's t."""
    count = len(centres)
    middle = fmean(centres)
    half = quantile((1 - confidence) / 2, count - 1) * stdev(centres) / math.sqrt(count)
    return middle, middle - half, middle + half


def deviation(latencies_ms: Mapping[str, float], unit: str) -> float | None:
    """How far a machine's baseline lies above the median of all, as a share; None where too few were measured.

    Of an even number it is the lower of the two in the middle, which is a machine's own: else, where half of them are
    slow, every machine would be far off.
    """
    if len(latencies_ms) < _LEAST_TO_COMPARE or unit not in latencies_ms:
        return None
    return latencies_ms[unit] / median_low(latencies_ms.values()) - 1


def usual_deviation(by_case: Sequence[Mapping[str, float]], unit: str) -> float | None:
    """The median of a machine's deviations over cases; None where none can be told."""
    deviations = [each for each in (deviation(case, unit) for case in by_case) if each is not None]
    return median(deviations) if deviations else None


def is_far_off(share: float | None) -> bool:
    """Whether a machine deviates so much that it is to be looked at, and not averaged."""
    return share is not None and abs(share) > FAR_OFF
