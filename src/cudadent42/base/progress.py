"""Showing how far a run is: a bar with the time left on a terminal, plain lines in a log."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from cudadent42.base.shown import message

_LINE_INTERVAL_S = 10.0
_TERMINAL_INTERVAL_S = 0.5


class Lines:
    """Plain lines, for logs."""

    def __init__(self, console: Console, verbose: bool) -> None:
        self._console = console
        self._verbose = verbose
        self._interval_s = 0.0 if verbose else _LINE_INTERVAL_S
        self._clock = _Clock()
        self._stage = ""
        self._shown = 0.0

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def stage(self, name: str) -> None:
        self._stage = name
        self._clock = _Clock()
        self._shown = time.monotonic()
        self._print(f"{name}: started")

    def advance(self, fraction: float, what: str) -> None:
        now = time.monotonic()
        if now - self._shown >= self._interval_s:
            self._shown = now
            self._print(message(f"{self._stage}: {fraction:.0%}, {what}{self._clock.left(fraction)}"))

    def note(self, text: str) -> None:
        self._print(message(text))

    def detail(self, text: str) -> None:
        if self._verbose:
            self._print(message(text))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bar:
    """One line on a terminal that is redrawn, with what was noted above it.

    Redrawn only when there is news and at most twice a second: a refresh thread would take time from the
    cores that are being measured.
    """

    def __init__(self, console: Console) -> None:
        self._clock = _Clock()
        self._drawn = 0.0
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(width=9)),
            BarColumn(bar_width=20, table_column=Column(width=20)),
            TextColumn("{task.percentage:3.0f} %", table_column=Column(width=5)),
            TextColumn(
                "{task.fields[what]}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            console=console,
            expand=True,
            auto_refresh=False,
            transient=True,
        )

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, name: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._clock = _Clock()
        self._drawn = -math.inf
        self._task = self._progress.add_task(name, total=1.0, what="")
        self._progress.refresh()

    def advance(self, fraction: float, what: str) -> None:
        now = time.monotonic()
        if self._task is not None and now - self._drawn >= _TERMINAL_INTERVAL_S:
            self._drawn = now
            self._progress.update(
                self._task, completed=fraction, what=message(what) + self._clock.left(fraction)
            )
            self._progress.refresh()

    def detail(self, text: str) -> None:
        return

    def note(self, text: str) -> None:
        self._progress.console.print(message(text), markup=False, highlight=False, soft_wrap=True)


def observer(console: Console, verbose: bool) -> Bar | Lines:
    """What suits where the output goes."""
    return Bar(console) if console.is_terminal and not verbose else Lines(console, verbose)


class _Clock:
    """Time since the stage began, and from that the time left."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def left(self, fraction: float) -> str:
        """``, 40 s left``; nothing while there is too little to go by."""
        passed = time.monotonic() - self._start
        if fraction < 0.02 or passed < 1:
            return ""
        seconds = round(passed / fraction * (1 - fraction))
        return f", {seconds // 60} min {seconds % 60:02d} s left" if seconds >= 60 else f", {seconds} s left"
