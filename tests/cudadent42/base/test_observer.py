from __future__ import annotations

from cudadent42.base.observer import Forwarding, Observer, Quiet


class Written(Quiet):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def stage(self, name: str) -> None:
        self.told.append(("stage", name))

    def advance(self, fraction: float, what: str) -> None:
        self.told.append(("advance", fraction, what))

    def note(self, text: str) -> None:
        self.told.append(("note", text))

    def detail(self, text: str) -> None:
        self.told.append(("detail", text))


class Louder(Forwarding):
    def detail(self, text: str) -> None:
        self.observer.note(text)


def tell(observer: Observer) -> None:
    observer.stage("bench")
    observer.advance(0.5, "a case")
    observer.note("a note")
    observer.detail("a detail")


def test_everything_is_passed_on_but_what_is_overridden() -> None:
    direct, through, changed = Written(), Written(), Written()
    tell(direct)
    tell(Forwarding(through))
    tell(Louder(changed))
    assert (
        through.told
        == direct.told
        == [
            ("stage", "bench"),
            ("advance", 0.5, "a case"),
            ("note", "a note"),
            ("detail", "a detail"),
        ]
    )
    assert changed.told == [*direct.told[:3], ("note", "a detail")]
