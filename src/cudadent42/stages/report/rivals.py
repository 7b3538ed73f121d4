"""The candidate against the fastest of all others, which need not be the baseline, cell by cell."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from cudadent42.model.implementations import are_forms_of_one
from cudadent42.model.records import Comparison, Results


@dataclass(frozen=True)
class Rival:
    """One cell's fastest other implementation."""

    cell: str
    """``Case.id``."""
    implementation: str
    ratio: float
    """Its median latency over the candidate's."""


@dataclass(frozen=True)
class Rivals:
    geomean: float
    closest: Rival
    """Where the ratio is smallest."""
    cells: tuple[Rival, ...]


@dataclass(frozen=True)
class Standing:
    """One implementation over all cells that it was timed on."""

    implementation: str
    cells: int
    speedup: float
    """Geometric mean over the baseline; NaN where a cell has none."""
    ratio: float
    """Geometric mean of its median latency over the candidate's; NaN where they share no cell."""


def standings(results: Results) -> tuple[Standing, ...]:
    """The candidate first, then the others in the order in which they were timed."""
    own = {(c.name, c.dtype): c.latency_ms for c in results.cases}
    timed: dict[str, list[Comparison]] = {results.candidate: list(results.cases)}
    for other in results.others:
        timed.setdefault(other.implementation, []).append(other)
    return tuple(
        Standing(
            implementation=name,
            cells=len(comparisons),
            speedup=_mean([c.speedup for c in comparisons]),
            ratio=_mean(
                [
                    c.latency_ms / own[c.name, c.dtype]
                    for c in comparisons
                    if own.get((c.name, c.dtype), 0) > 0
                ]
            ),
        )
        for name, comparisons in timed.items()
    )


def _mean(values: list[float]) -> float:
    """Geometric; NaN of none and of what has none."""
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        return math.nan
    return statistics.geometric_mean(values)


def rivals(results: Results) -> Rivals | None:
    """The candidate's own variants are no rivals of it, unless one is the baseline.

    None where the baseline is the only rival, so that its speed-ups say the same.
    """
    others = [each for each in results.others if not are_forms_of_one(each.implementation, results.candidate)]
    if not results.cases or not others:
        return None
    cells = tuple(_rival(own, results.baseline, others) for own in results.cases)
    if any(rival.ratio <= 0 for rival in cells):
        return None
    geomean = statistics.geometric_mean(rival.ratio for rival in cells)
    return Rivals(geomean, min(cells, key=lambda rival: rival.ratio), cells)


def _rival(own: Comparison, baseline: str, others: list[Comparison]) -> Rival:
    latencies = [(own.baseline_latency_ms, baseline)]
    latencies += [
        (other.latency_ms, other.implementation) for other in others if other.case_id == own.case_id
    ]
    latency_ms, name = min(latencies)
    return Rival(own.case_id, name, latency_ms / own.latency_ms)
