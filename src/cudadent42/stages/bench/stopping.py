"""When to stop measuring: on precision, on time or at the planned number of blocks, never on a result.

A rule that looks at whether a difference has become significant finds one in the end. The width of an interval says
nothing about where it lies, so stopping at a width does not favour any verdict.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from cudadent42.decisions.margin import smallest_called, upper
from cudadent42.decisions.schedule import control_name
from cudadent42.decisions.statistics import blocks_for, detectable_effect, half_width, spread_of
from cudadent42.decisions.verdicts import MIN_BLOCKS
from cudadent42.model.records import Plan

MIN_PRECISION_BLOCKS = 24
"""Blocks before a width is believed: with fewer, one that is narrow by luck would end the measurement."""

MIN_BUDGET_BLOCKS = 12
"""Blocks that every case gets however little time there is: enough for a verdict, even if some do not count."""

PILOT_BLOCKS = 24
"""Of warm-up, over all cases, that the forecast rests on: the spread is then known to a fifth."""

PILOT_SKIPPED = 2
"""First blocks of each case that the forecast does not look at: code is paged in, clocks rise."""

PILOT_SHARE = 0.25
"""Of the planned blocks of a case, that warming up for the forecast may add at most."""


def pilot_blocks(plan: Plan) -> int:
    """Warm-up blocks of each case: the planned ones, and as many more as the forecast needs."""
    wanted = math.ceil(PILOT_BLOCKS / len(plan.cases)) + PILOT_SKIPPED
    return max(plan.warmup, min(wanted, int(PILOT_SHARE * plan.repeats))) if plan.warmup else 0


class Pace:
    """What has been measured, as far as it matters for how long to go on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pilot: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._pilot_s: list[float] = []
        self._warm_blocks: Counter[str] = Counter()
        self._counted: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def warmed_up(self, case: str, latencies: Mapping[str, float], duration_s: float) -> None:
        """A block that does not count, of a case (``Case.id``)."""
        self._pilot_s.append(duration_s)
        self._warm_blocks[case] += 1
        if self._warm_blocks[case] > PILOT_SKIPPED:
            _append(self._pilot[case], latencies)

    def measured(self, case: str, latencies: Mapping[str, float]) -> None:
        """A block that counts."""
        _append(self._counted[case], latencies)

    def precise(self, case: str) -> bool:
        """Whether every comparison of the case is as precise as the plan asks for."""
        rows = self._counted[case]
        target = self._plan.precision
        if target is None or len(rows[self._plan.baseline]) < MIN_PRECISION_BLOCKS:
            return False
        return all(half_width(*pair) <= target for pair in self._pairs(rows))

    def forecast(self) -> str:
        """What the planned blocks will be able to show, from the warm-up; empty where that was too short."""
        spreads = [
            spread_of(*pair)
            for rows in self._pilot.values()
            for pair in self._pairs(rows)
            if len(pair[0]) >= 3
        ]
        pilot_blocks = sum(len(rows[self._plan.baseline]) for rows in self._pilot.values())
        if not spreads or pilot_blocks < PILOT_BLOCKS // 2:
            return ""
        spread = float(np.median(spreads))
        block_s = float(np.median(self._pilot_s)) * len(self._plan.cases)
        margin = self._plan.margin
        line = ""
        if margin > 0:
            target = (
                2 * margin
            )  # what lies on the margin is never called; what exceeds it by as much again has room
            needed = max(1, blocks_for(upper(target) / upper(margin) - 1.0, spread))
            line = (
                f"a typical case needs {needed} blocks ({_time(needed * block_s)}) "
                f"to call a difference of {target:.1%} faster or slower; "
            )
        if self._plan.precision is not None:
            return line + self._until(block_s)
        blocks = self._plan.repeats
        if blocks < MIN_BLOCKS:
            return f"{line}the {blocks} planned take {_time(blocks * block_s)} and allow no verdict"
        called = smallest_called(detectable_effect(spread, blocks), margin)
        line += f"the {blocks} planned take {_time(blocks * block_s)} and call one of {called:.1%}"
        return line if self._plan.budget_s is None else f"{line}, within {_time(self._plan.budget_s)}"

    def _until(self, block_s: float) -> str:
        limit_s = min(self._plan.budget_s or math.inf, self._plan.repeats * block_s)
        return f"measuring until intervals of ±{self._plan.precision:.2%}, {_time(limit_s)} at most"

    def _pairs(self, rows: Mapping[str, Sequence[float]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The baseline beside each other implementation; beside its control if it is alone."""
        control = control_name(self._plan.baseline)
        others = [name for name in rows if name not in (self._plan.baseline, control)]
        base = rows[self._plan.baseline]
        names = others or [name for name in rows if name == control]
        return [(np.array(base), np.array(rows[name])) for name in names if len(rows[name]) == len(base)]


def _append(rows: dict[str, list[float]], latencies: Mapping[str, float]) -> None:
    for name, latency_ms in latencies.items():
        rows[name].append(latency_ms)


def _time(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 120 else f"about {seconds / 60:.0f} min"
