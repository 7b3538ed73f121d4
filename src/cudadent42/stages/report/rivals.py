"""The candidate against the fastest of all others, which need not be the baseline, cell by cell."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

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


def rivals(results: Results) -> Rivals | None:
    """None where the baseline is the only other implementation, so that its speed-ups say the same."""
    if not results.cases or not results.others:
        return None
    cells = tuple(_rival(own, results) for own in results.cases)
    if any(rival.ratio <= 0 for rival in cells):
        return None
    geomean = statistics.geometric_mean(rival.ratio for rival in cells)
    return Rivals(geomean, min(cells, key=lambda rival: rival.ratio), cells)


def _rival(own: Comparison, results: Results) -> Rival:
    found = [(own.baseline_latency_ms, results.baseline)]
    found += [
        (other.latency_ms, other.implementation)
        for other in results.others
        if (other.name, other.dtype) == (own.name, own.dtype)
    ]
    latency_ms, name = min(found)
    return Rival(f"{own.name}/{own.dtype}", name, latency_ms / own.latency_ms)
