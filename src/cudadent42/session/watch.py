"""An observer that stops the work when the session's time or money is spent."""

from __future__ import annotations

from collections.abc import Callable

from cudadent42.base.progress import Observer


def _nothing() -> None:
    return


class Watched:
    """Passes everything on, and calls ``check``, which may raise, whenever the work reports that it is alive."""

    def __init__(self, observer: Observer, check: Callable[[], None] = _nothing) -> None:
        self._observer = observer
        self.check = check

    def stage(self, name: str) -> None:
        self.check()
        self._observer.stage(name)

    def advance(self, fraction: float, what: str) -> None:
        self.check()
        self._observer.advance(fraction, what)

    def note(self, text: str) -> None:
        self._observer.note(text)

    def detail(self, text: str) -> None:
        self._observer.detail(text)
