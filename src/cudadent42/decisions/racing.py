"""Which arm of a race leaves: pure functions of what was measured.

The resource is blocks, and what promotes an arm is a paired test (F-race: Birattari et al., 2002; the resource as in
successive halving: Jamieson and Talwalkar, 2016). Every block holds the default, so an arm's row is the logarithm of
the default's latency over its own. Two arms are compared on the blocks that both have; arms of different jobs, by way
of the default, as independent samples.

A latency has rare spikes upwards. So centres are means trimmed by a fifth, with the winsorised variance (Tukey and
McLaughlin, 1963; of two samples: Yuen, 1974). Below ``_TRIM_FROM`` blocks nothing is trimmed: a spike then widens the
interval, which keeps an arm. Who leads, and whom the cap sends away, goes by the median there, which a spike in one of
four blocks hardly moves.

A race is over as soon as its leader is certainly better than the default by the margin, and certainly no more than
``Rules.near`` of the margin behind any other arm (successive elimination up to a difference that does not matter:
Even-Dar, Mannor and Mansour, 2006; the rule of LUCB: Kalyanakrishnan et al., 2012). Arms that near each other would
share the blocks of all further rungs, for a difference that nobody asked for.

Every test of a race shares one chance of a mistake, by Bonferroni: the best arm is lost by a test with a probability
of at most ``Rules.miss``, whatever the other arms are. What the cap (`Rules.share`) sends away is said to be so.
tests/cudadent42/decisions/test_racing.py and benchmarks/tuning_simulated.py have simulations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from cudadent42.decisions.margin import upper
from cudadent42.decisions.student import quantile

Row = Mapping[str, float]
"""By block, the logarithm of the default's latency over the arm's: above 0 the arm is faster."""

TRIMMED = 0.2
_TRIM_FROM = 10
_CONFIRMING_TAIL = 0.025
"""Of a confirmation's interval, which is one of 95 %."""
_LEAST = 3
"""Blocks without which there is no interval."""


@dataclass(frozen=True)
class Rules:
    """Of a race."""

    rungs: tuple[int, ...] = (4, 12, 24, 54)
    """Blocks that an arm has after each rung: whole pairs of an order and its mirror image."""
    miss: float = 0.02
    """Probability that a test sends away the best arm of a case."""
    share: float = 1 / 3
    """Of the arms, that stay after a rung at most,"""
    least: int = 3
    """but never fewer than these."""
    margin: float = 0.01
    """An arm that cannot be faster than the default by more than this is of no use."""
    near: float = 0.5
    """Of the margin: by how much less the leader may be than the best, where the race ends before its last rung."""


BETWEEN_MACHINES = 0.005
"""Standard deviation that is allowed for between machines of one kind in how well an arm suits them, as a logarithm:
of arms that were raced by a fleet, before several machines have confirmed one."""


class Cause(str, Enum):
    """Why an arm left."""

    SLOWER = "slower than the leader"
    NO_GAIN = "not faster than the default by the margin"
    CAP = "behind the share that stays"


@dataclass(frozen=True)
class Difference:
    """Of two arms, as the logarithm of a ratio."""

    centre: float
    half_width: float
    """Infinite where too little is measured."""
    paired: bool = True

    @property
    def low(self) -> float:
        return self.centre - self.half_width

    @property
    def high(self) -> float:
        return self.centre + self.half_width


@dataclass(frozen=True)
class Leaving:
    """An arm that is raced no longer."""

    arm: str
    cause: Cause
    ratio: float
    """To what it lost to, above 1 where it was faster."""
    low: float
    high: float
    """The interval, at the level of the race's tests."""
    than: str
    """The leader, or the default."""


def difference(row: Row, other: Row, tail: float, between: float = 0.0) -> Difference:
    """How much faster the first is, between bounds that each are passed with probability ``tail``.

    ``between``: standard deviation of either's suiting a machine, where a result is to hold on others too.
    """
    more = 2 * between**2  # variance that is not seen in the blocks
    common = row.keys() & other.keys()
    if len(common) >= _LEAST:
        centre, variance, degrees = _centre(tuple(row[block] - other[block] for block in common))
        return Difference(centre, _half_width(variance + more, degrees, tail))
    if min(len(row), len(other)) < _LEAST:
        return Difference(_mean(row) - _mean(other), math.inf, paired=False)
    first, second = (_centre(tuple(each.values())) for each in (row, other))
    variance = first[1] + second[1]
    spread = sum(part[1] ** 2 / part[2] for part in (first, second))
    degrees = variance**2 / spread if spread > 0 else first[2] + second[2]
    return Difference(first[0] - second[0], _half_width(variance + more, degrees, tail), paired=False)


def gain(row: Row, tail: float, between: float = 0.0) -> Difference:
    """How much faster than the default, which suits every machine by definition."""
    if len(row) < _LEAST:
        return Difference(_mean(row), math.inf, paired=False)
    centre, variance, degrees = _centre(tuple(row.values()))
    return Difference(centre, _half_width(variance + between**2, degrees, tail))


def tail_of(rules: Rules, arms: int) -> float:
    """Of one test, where a race begins with so many arms beside the default: its share of ``Rules.miss``."""
    return min(0.5, rules.miss / (len(rules.rungs) * max(1, arms)))


def leader_of(rows: Mapping[str, Row], default: str) -> str:
    """The arm with the highest centre; the default where none is above it."""
    centres = {
        arm: 0.0 if arm == default else middle(row) for arm, row in rows.items() if row or arm == default
    }
    return max(centres, key=lambda arm: (centres[arm], arm == default))


def middle(row: Row) -> float:
    """By which arms are ranked."""
    if len(row) < _TRIM_FROM:
        return median(row.values()) if row else 0.0
    return _centre(tuple(row.values()))[0]


def leaving(
    rows: Mapping[str, Row], default: str, arms: int, rules: Rules, between: float = 0.0
) -> list[Leaving]:
    """Who leaves after a rung. ``between``: as of `difference`.

    ``rows`` are those of the arms that are still raced, the default's among them, which never leaves; ``arms`` counts
    those that the race began with beside it.
    """
    tail = tail_of(rules, arms)
    leader = leader_of(rows, default)
    least_gain = math.log(upper(rules.margin))
    gone: dict[str, Leaving] = {}
    centres: dict[str, float] = {}
    for arm, row in rows.items():
        if arm == default:
            continue
        own = gain(row, tail, between)
        centres[arm] = middle(row)
        if own.high < least_gain:
            gone[arm] = _left(arm, Cause.NO_GAIN, own, default)
        elif leader not in (arm, default):
            against = difference(row, rows[leader], tail, between)
            if against.high < 0.0:
                gone[arm] = _left(arm, Cause.SLOWER, against, leader)
    stay = max(rules.least, math.ceil(rules.share * len(centres)))
    ranked = sorted((arm for arm in centres if arm not in gone), key=lambda arm: -centres[arm])
    for arm in ranked[stay:]:
        gone[arm] = _left(arm, Cause.CAP, difference(rows[arm], rows[leader], tail, between), leader)
    return [gone[arm] for arm in rows if arm in gone]


def is_decided(rows: Mapping[str, Row], default: str, arms: int, rules: Rules, between: float = 0.0) -> bool:
    """Whether the leader is certainly better than the default by the margin, and no other arm than the leader by as
    much as matters: what is still to be said, its confirmation says. Arguments as of `leaving`."""
    leader = leader_of(rows, default)
    if leader == default:
        return False
    tail = tail_of(rules, arms)
    if gain(rows[leader], tail, between).low <= math.log(upper(rules.margin)):
        return False
    near = math.log(upper(rules.near * rules.margin))
    others = (row for arm, row in rows.items() if arm not in (leader, default))
    return all(difference(row, rows[leader], tail, between).high < near for row in others)


def gains_too_little(row: Row, rules: Rules, between: float = 0.0) -> bool:
    """Whether a winner is not better than the default by the margin, of which its own race makes as sure as its
    confirmation would: then that would say nothing new. ``between``: as of `difference`."""
    return gain(row, _CONFIRMING_TAIL, between).high <= math.log(upper(rules.margin))


def unseparated(
    rows: Mapping[str, Row], leader: str, default: str, arms: int, rules: Rules, between: float = 0.0
) -> list[str]:
    """The arms that may be as fast as the leader."""
    tail = tail_of(rules, arms)
    others = [arm for arm in rows if arm not in (leader, default)]
    return [arm for arm in others if difference(rows[arm], rows[leader], tail, between).high >= 0.0]


def centre_of(row: Row) -> tuple[float, float, float] | None:
    """A row's centre, its variance and degrees of freedom; None where it is too short for an interval."""
    return _centre(tuple(row.values())) if len(row) >= _LEAST else None


def _left(arm: str, cause: Cause, lost: Difference, than: str) -> Leaving:
    return Leaving(arm, cause, math.exp(lost.centre), _ratio(lost.low), _ratio(lost.high), than)


def _ratio(logarithm: float) -> float:
    return math.exp(logarithm) if math.isfinite(logarithm) else (math.inf if logarithm > 0 else 0.0)


def _mean(row: Row) -> float:
    return math.fsum(row.values()) / len(row) if row else 0.0


def _half_width(variance: float, degrees: float, tail: float) -> float:
    """Of Student's t, whose quantile is kept for a tenth of a degree of freedom: that below, which is the wider."""
    if tail >= 0.5:
        return 0.0
    kept = degrees if degrees < 1 else math.floor(10 * degrees + 1e-6) / 10
    return quantile(round(tail, 12), round(kept, 3)) * math.sqrt(variance)


@functools.lru_cache(maxsize=1024)
def _centre(values: tuple[float, ...]) -> tuple[float, float, float]:
    """Trimmed mean, its variance, and its degrees of freedom."""
    ordered = sorted(values)
    count = len(ordered)
    cut = int(TRIMMED * count) if count >= _TRIM_FROM else 0
    kept = ordered[cut : count - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    mean = math.fsum(winsorised) / count
    squares = math.fsum((value - mean) ** 2 for value in winsorised)
    return math.fsum(kept) / len(kept), squares / (len(kept) * (len(kept) - 1)), len(kept) - 1.0


def blocks_of(rules: Rules, rung: int) -> int:
    """Blocks that are measured in a rung, beyond those of the rung before."""
    return rules.rungs[rung] - (rules.rungs[rung - 1] if rung else 0)


def exhaustive(arms: int, rules: Rules) -> int:
    """Blocks of arms that a sweep at the last rung's precision would take."""
    return arms * rules.rungs[-1]


def chunks(arms: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """Arms that share a job, evenly, so that no job has one arm alone where others have many."""
    if not arms:
        return []
    jobs = math.ceil(len(arms) / most)
    size, rest = divmod(len(arms), jobs)
    parts: list[tuple[str, ...]] = []
    at = 0
    for job in range(jobs):
        width = size + (1 if job < rest else 0)
        parts.append(tuple(arms[at : at + width]))
        at += width
    return parts
