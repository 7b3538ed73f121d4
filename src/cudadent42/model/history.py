"""A case's speed-up over time and revisions, as the ledger tells it.

Only what can be compared is put into one track: the same shape, dtype, implementation, baseline, timer and cache state.
A ratio still belongs to its machine, on a CPU with its instructions, so a change of machine is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A case in one run.

    ``revision`` is that of the implementation's code; ``shape`` (the case as JSON), ``timer`` and ``cache`` say what
    the point may be compared with.
    """

    run: str
    started: str
    path: str
    revision: str
    machine: str
    summary: str
    timer: str
    cache: str
    shape: str
    name: str
    dtype: str
    implementation: str
    baseline: str
    speedup: float
    ci_low: float
    ci_high: float
    verdict: str
    latency_ms: float | None


@dataclass(frozen=True)
class Track:
    """Points that can be compared, in the order of time; there is at least one."""

    points: tuple[Point, ...]
    changes: tuple[int, ...]
    """Numbers of the points that another machine measured than the one before."""

    @property
    def title(self) -> str:
        first = self.points[0]
        cache = "" if first.cache == "warm" else f", {first.cache} cache"
        return (
            f"{first.name}/{first.dtype}: {_short(first.implementation)} against {_short(first.baseline)} "
            f"({first.timer} timer{cache})"
        )


def tracks(points: Sequence[Point]) -> list[Track]:
    """The points of a case by what can be compared, the longest track first."""
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        key = (point.shape, point.dtype, point.implementation, point.baseline, point.timer, point.cache)
        groups.setdefault(key, []).append(point)
    grouped = [_track(group) for group in groups.values()]
    return sorted(grouped, key=lambda track: -len(track.points))


def _track(points: Sequence[Point]) -> Track:
    ordered = sorted(points, key=lambda point: point.started)
    changes = [
        number for number in range(1, len(ordered)) if ordered[number].machine != ordered[number - 1].machine
    ]
    return Track(tuple(ordered), tuple(changes))


def _short(implementation: str) -> str:
    """A plug-in's name without the folders in front of its file."""
    return implementation.rpartition("/")[2] or implementation
