"""An observer that stops the work when the session's time or money is spent."""

from __future__ import annotations

from collections.abc import Callable

from cudadent42.base.observer import Forwarding, Observer


def _nothing() -> None:
    return


class Watched(Forwarding):
    """Calls ``check``, which may raise, whenever the work reports that it is alive."""

    def __init__(self, observer: Observer, check: Callable[[], None] = _nothing) -> None:
        super().__init__(observer)
        self.check = check

    def stage(self, name: str) -> None:
        self.check()
        super().stage(name)

    def advance(self, fraction: float, what: str) -> None:
        self.check()
        super().advance(fraction, what)
