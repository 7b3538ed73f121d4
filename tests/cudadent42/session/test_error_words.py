"""What a session says when it refuses, word by word; ``./test.sh --update-snapshots`` writes it again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import acting
import pytest
from quick import QuickWorkshop, ToyClock

from cudadent42.base.errors import LabError
from cudadent42.runs.sessions import EVENTS
from cudadent42.session import steps
from cudadent42.session.folder import load
from cudadent42.session.unpack import unpack

Scene = tuple[Path, QuickWorkshop, ToyClock]
"""A project under git, a workshop and a clock."""


def another_is_open(scene: Scene) -> object:
    acting.begin(*scene)
    return acting.begin(*scene)


def somebody_works_on_it(scene: Scene) -> object:
    _project, workshop, clock = scene
    path = acting.begin(*scene)
    with acting.desk(path, workshop, clock):
        return acting.work(path, workshop, clock)


def it_has_ended(scene: Scene) -> object:
    _project, workshop, clock = scene
    path = acting.begin(*scene)
    for _ in range(2):
        with acting.desk(path, workshop, clock) as desk:
            steps.abort(desk, "enough")
    return path


def no_work_after_the_end(scene: Scene) -> object:
    _project, workshop, clock = scene
    path = acting.begin(*scene)
    with acting.desk(path, workshop, clock) as desk:
        steps.abort(desk, "enough")
    return acting.work(path, workshop, clock)


def nothing_measured_yet(scene: Scene) -> object:
    _project, workshop, clock = scene
    return acting.advance(acting.begin(*scene), workshop, clock)


def a_gate_fails(scene: Scene) -> object:
    _project, workshop, clock = scene
    workshop.speedup = -1.0
    path = acting.begin(*scene)
    acting.work(path, workshop, clock)
    return acting.advance(path, workshop, clock)


def nothing_changed(scene: Scene) -> object:
    _project, workshop, clock = scene
    return acting.work(acting.to_fix(*scene), workshop, clock)


def not_profiled(scene: Scene) -> object:
    project, workshop, clock = scene
    workshop.speedup = 0.125
    path = acting.begin(*scene)
    acting.work(path, workshop, clock)
    acting.advance(path, workshop, clock)
    with acting.desk(path, workshop, clock) as desk:
        steps.advance(desk, steps.Choice(override="no profiler here"))
    acting.change(project, 2)
    return acting.work(path, workshop, clock)


def a_failed_attempt_in_the_source(scene: Scene) -> object:
    project, workshop, clock = scene
    path = acting.to_fix(*scene)
    acting.change(project, 4)
    acting.work(path, workshop, clock)
    return acting.work(path, workshop, clock)


def changed_since_the_attempt(scene: Scene) -> object:
    project, workshop, clock = scene
    path = acting.to_fix(*scene)
    acting.change(project, 4)
    acting.work(path, workshop, clock)
    acting.change(project, 5)
    return acting.work(path, workshop, clock, steps.Choice(revert=True))


def the_minutes_are_spent(scene: Scene) -> object:
    _project, workshop, clock = scene
    path = acting.begin(*scene, budget_minutes=10.0)
    clock.pass_s(700)
    return acting.work(path, workshop, clock)


def the_money_is_spent(scene: Scene) -> object:
    _project, workshop, clock = scene
    path = acting.begin(*scene, rate="dear", budget_usd=2.0)
    clock.pass_s(150)
    return acting.work(path, workshop, clock)


def an_empty_note(scene: Scene) -> object:
    _project, workshop, clock = scene
    with acting.desk(acting.begin(*scene), workshop, clock) as desk:
        return steps.note(desk, " ")


def outside_of_git(scene: Scene) -> object:
    project, workshop, clock = scene
    shutil.rmtree(project / ".git")
    return acting.work(acting.to_fix(*scene), workshop, clock)


def an_unknown_protocol(scene: Scene) -> object:
    project, workshop, clock = scene
    return steps.start(project, "trial", "defualt", acting.SETTINGS, workshop, clock)


def no_session_folder(scene: Scene) -> object:
    return load(scene[0])


def a_damaged_log(scene: Scene) -> object:
    log = acting.begin(*scene) / EVENTS
    log.write_bytes(log.read_bytes() + b"{}\n")
    return load(log.parent)


def a_log_of_a_newer_version(scene: Scene) -> object:
    log = acting.begin(*scene) / EVENTS
    log.write_text(log.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    return load(log.parent)


def unpacked_without_its_source(scene: Scene) -> object:
    path = acting.begin(*scene)
    (path / "source.bundle").unlink()
    return unpack(load(path), scene[0].parent / "elsewhere")


REFUSED: tuple[Callable[[Scene], object], ...] = (
    another_is_open,
    somebody_works_on_it,
    it_has_ended,
    no_work_after_the_end,
    nothing_measured_yet,
    a_gate_fails,
    nothing_changed,
    not_profiled,
    a_failed_attempt_in_the_source,
    changed_since_the_attempt,
    the_minutes_are_spent,
    the_money_is_spent,
    an_empty_note,
    outside_of_git,
    an_unknown_protocol,
    no_session_folder,
    a_damaged_log,
    a_log_of_a_newer_version,
    unpacked_without_its_source,
)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda each: each.__name__)
def test_words(
    refused: Callable[[Scene], object],
    project: Path,
    workshop: Any,
    clock: Any,
    snapshot: Callable[[str, str], None],
) -> None:
    with pytest.raises(LabError) as error:
        refused((project, workshop, clock))
    told = re.sub(r"\S*/project\b", "<project>", str(error.value))
    told = re.sub(r"\d{8}T\d{6}Z", "<time>", told)
    told = re.sub(
        r"process \d+ on \S+, since \S+(?=\. )", "process <number> on <machine>, since <time>", told
    )
    name = refused.__name__.replace("_", "-")
    snapshot(f"session/{name}", f"{told}\nexit code {error.value.exit_code.value}\n")
