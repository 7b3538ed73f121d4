"""From the winners of single cases to closed regions of problems: a pure function.

Neighbouring cases with one winner are joined along the fields that the space names. Nothing is claimed outside of what
was raced: a region ends at the outermost cases that it holds, and holds no case with another outcome.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashmoe_science.tuned.table import Region, Value


@dataclass(frozen=True)
class Cell:
    """One raced case."""

    case: str
    """``Case.id``."""
    fields: Mapping[str, Value]
    winner: str
    """An arm; the default's name where that stays."""


@dataclass(frozen=True)
class Area:
    """Cases that share a winner, and the closed region around them."""

    winner: str
    region: Region
    cases: tuple[str, ...]


def areas(cells: Sequence[Cell], along: Sequence[str], default: str) -> list[Area]:
    """The regions of all winners but the default's. Those of different winners never meet: cases of the same problem
    that came to different outcomes have none.
    """
    made = [_single(cell, along) for cell in cells]
    merged = True
    while merged:
        merged = False
        for first, second in sorted(itertools.combinations(made, 2), key=lambda pair: _reach(_union(*pair))):
            if first.winner == second.winner and first.region.same == second.region.same:
                union = _union(first, second)
                others = [area for area in made if area not in (first, second)]
                if not any(
                    area.winner != union.winner and _meet(area.region, union.region) for area in others
                ):
                    made = [*others, union]
                    merged = True
                    break
    order = {cell.case: number for number, cell in enumerate(cells)}
    kept = [area for area in made if area.winner != default and not _is_disputed(area, made)]
    return sorted(kept, key=lambda area: min(order[case] for case in area.cases))


def _is_disputed(area: Area, areas: Sequence[Area]) -> bool:
    return any(each.winner != area.winner and _meet(each.region, area.region) for each in areas)


def _single(cell: Cell, along: Sequence[str]) -> Area:
    same = {name: value for name, value in cell.fields.items() if name not in along}
    between = {
        name: (int(cell.fields[name]), int(cell.fields[name])) for name in along if name in cell.fields
    }
    return Area(cell.winner, Region(same, between), (cell.case,))


def _union(first: Area, second: Area) -> Area:
    between = {
        name: (min(low, second.region.between[name][0]), max(high, second.region.between[name][1]))
        for name, (low, high) in first.region.between.items()
    }
    return Area(first.winner, Region(first.region.same, between), (*first.cases, *second.cases))


def _reach(area: Area) -> float:
    """How far a region reaches, so that what lies nearest is joined first."""
    return sum((high - low) / max(1, abs(high)) for low, high in area.region.between.values())


def _meet(first: Region, second: Region) -> bool:
    return first.same == second.same and all(
        low <= second.between[name][1] and second.between[name][0] <= high
        for name, (low, high) in first.between.items()
    )
