"""Who is told how a run goes on. What shows it on a terminal or in a log is in `progress`."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Who is told how a run goes on."""

    def stage(self, name: str) -> None:
        """A stage begins; the one before it has ended."""

    def advance(self, fraction: float, what: str) -> None:
        """The stage has come this far (0 to 1), and this is being done."""

    def note(self, text: str) -> None:
        """Something that the user should see and that stays on the screen."""

    def detail(self, text: str) -> None:
        """Something that only a user who asked for more should see."""


class Quiet:
    """Tells nobody."""

    def stage(self, name: str) -> None:
        return

    def advance(self, fraction: float, what: str) -> None:
        return

    def note(self, text: str) -> None:
        return

    def detail(self, text: str) -> None:
        return


class Forwarding:
    """Passes everything on to another observer. Those who do more, or less, override what they change."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def stage(self, name: str) -> None:
        self.observer.stage(name)

    def advance(self, fraction: float, what: str) -> None:
        self.observer.advance(fraction, what)

    def note(self, text: str) -> None:
        self.observer.note(text)

    def detail(self, text: str) -> None:
        self.observer.detail(text)
