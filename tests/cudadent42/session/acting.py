"""What the tests of sessions do with one."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import quick

from cudadent42.session import steps
from cudadent42.session.desk import at_work
from cudadent42.session.events import Settings
from cudadent42.session.folder import load
from cudadent42.session.watch import Watched

SETTINGS = Settings(suite="unit", race_suite="race")


def begin(project: Path, workshop: Any, clock: Any, **settings: Any) -> Path:
    chosen = replace(SETTINGS, **settings)
    return steps.start(project, "trial", "default", chosen, workshop, clock).path


@contextmanager
def desk(path: Path, workshop: Any, clock: Any) -> Any:
    observer = Watched(quick.Quiet())
    with at_work(load(path), workshop, observer, clock) as at_desk:
        observer.check = at_desk.check_budget
        at_desk.said = observer.observer.said
        yield at_desk


def work(
    path: Path, workshop: Any, clock: Any, choice: steps.Choice | None = None, ask: bool | None = None
) -> steps.Step:
    with desk(path, workshop, clock) as at_desk:
        return steps.work(at_desk, choice or steps.Choice(), lambda question: ask)


def advance(path: Path, workshop: Any, clock: Any, override: str = "") -> steps.Step:
    with desk(path, workshop, clock) as at_desk:
        return steps.advance(at_desk, steps.Choice(override))


def change(project: Path, repeats: int) -> None:
    file = project / "kernel.py"
    file.write_text(f"REPEATS = {repeats}\n" + file.read_text().partition("\n")[2])


def to_fix(project: Path, workshop: Any, clock: Any, **settings: Any) -> Path:
    path = begin(project, workshop, clock, **settings)
    for _ in range(2):
        work(path, workshop, clock)
        advance(path, workshop, clock)
    return path
