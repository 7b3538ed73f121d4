"""What a row of docs/figures.md is: what was asked of a figure, and how the figure is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bound:
    """One figure of a row and what is asked of it."""

    name: str
    limit: float | None
    """None where nothing is asked; the figure is shown all the same."""
    show: Callable[[float], str]
    at_least: bool = False

    def holds(self, value: float) -> bool:
        if self.limit is None:
            return True
        return value >= self.limit if self.at_least else value <= self.limit

    def text(self, value: float, sign: str = "") -> str:
        return f"{self.name} {sign}{self.show(value)}".strip()

    @property
    def asked(self) -> str:
        return "" if self.limit is None else self.text(self.limit, "≥ " if self.at_least else "≤ ")


@dataclass(frozen=True)
class Row:
    """One line of a table: what was asked and where what was reached is read."""

    what: str
    kind: str
    """Of run folder: ``cpu-default`` for ``benchmarks/results/<date>-cpu-default``."""
    bounds: tuple[Bound, ...]
    read: Callable[[Path], tuple[float, ...]]
    """The folder's value for each bound."""
    kernel: str = ""
    """The CUDA kernel that the run must have been held to, where the choice among them would take another."""
    among: Callable[[Path], bool] = lambda folder: True
    """Which folders of the kind have what is read, where it is measured in parts."""


# ---------------------------------------------------------------- what was asked


def ratio(value: float) -> str:
    return f"{value:.2f}×"


def share(value: float) -> str:
    return f"{value * 100:.3g} %"


def thousandths(value: float) -> str:
    return f"{value:.3f}×"


def unit(name: str) -> Callable[[float], str]:
    return lambda value: f"{0.0 if abs(value) < 1e-9 else value:.3g} {name}".strip()


def mean(limit: float | None = None) -> Bound:
    return Bound("geometric mean", limit, ratio, at_least=True)


def least(limit: float | None = None) -> Bound:
    return Bound("least", limit, ratio, at_least=True)
