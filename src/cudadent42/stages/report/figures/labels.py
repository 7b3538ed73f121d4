"""Names beside marks, where there is room for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LETTER = 5.6
"""Mean width of one at 10 pixels; the page's own font is not known here."""
_HEIGHT = 11.0
_AWAY = 8.0
"""From the middle of a mark to its name."""


@dataclass(frozen=True)
class Box:
    """In pixels, y upwards."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top

    def within(self, other: Box) -> bool:
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.bottom <= self.bottom
            and self.top <= other.top
        )


@dataclass(frozen=True)
class Label:
    """A name and where it goes, as an offset from its mark in pixels."""

    dx: float
    dy: float
    align: str
    box: Box


def around(x: float, y: float, radius: float) -> Box:
    """The square that a mark takes."""
    return Box(x - radius, y - radius, x + radius, y + radius)


def text_box(x: float, y: float, words: str, align: str) -> Box:
    """What a line of words takes that is anchored at its left, its right or its middle."""
    width = LETTER * len(words)
    left = {"left": x, "right": x - width, "center": x - width / 2}[align]
    return Box(left, y - _HEIGHT / 2, left + width, y + _HEIGHT / 2)


def place(marks: Sequence[tuple[float, float, str]], taken: Iterable[Box], bounds: Box) -> list[Label | None]:
    """A place for the name of each (x, y, name) that overlaps neither ``taken`` nor another name, in that order.

    None where all sides of a mark are taken.
    """
    obstacles = list(taken)
    labels = []
    for x, y, name in marks:
        label = next(
            (each for each in _sides(x, y, name) if _free(each.box, obstacles) and each.box.within(bounds)),
            None,
        )
        if label is not None:
            obstacles.append(label.box)
        labels.append(label)
    return labels


def _sides(x: float, y: float, name: str) -> Iterable[Label]:
    for dx, dy, align in (
        (_AWAY, 0.0, "left"),
        (-_AWAY, 0.0, "right"),
        (0.0, _AWAY + 3, "center"),
        (0.0, -_AWAY - 3, "center"),
        (_AWAY - 2, _AWAY, "left"),
        (_AWAY - 2, -_AWAY, "left"),
        (2 - _AWAY, _AWAY, "right"),
        (2 - _AWAY, -_AWAY, "right"),
    ):
        yield Label(dx, dy, align, text_box(x + dx, y + dy, name, align))


def _free(box: Box, obstacles: Iterable[Box]) -> bool:
    return not any(box.overlaps(other) for other in obstacles)
