"""A session that an old revision recorded: see ``old/README.md``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import acting
import pytest

from cudadent42.runs import run_folder
from cudadent42.runs.sessions import EVENTS
from cudadent42.session import log, report, steps
from cudadent42.session.events import Decision, Passed, WorkEnded, to_line
from cudadent42.session.folder import Session, all_sessions, find, load
from cudadent42.session.state import AttemptOutcome
from cudadent42.session.words import status_document, status_lines

OLD = Path(__file__).parent / "old"
(FOLDER,) = OLD.glob("*-trial")


@pytest.fixture
def session(project: Path) -> Session:
    path = project / "sessions" / FOLDER.name
    shutil.copytree(FOLDER, path)
    return load(path)


def test_its_log_says_what_was_done(session: Session) -> None:
    state = session.state
    assert state.end is not None
    assert [checkpoint.plan.name for checkpoint in state.checkpoints] == ["baseline", "fix", "document"]
    (attempt,) = state.attempts
    assert (attempt.number, attempt.outcome) == (1, AttemptOutcome.PASSED)
    assert state.seconds == pytest.approx(55.141)
    assert [run.run for run in state.runs] == ["runs/01-baseline", "runs/02-fix-1"]


def test_fields_that_came_later_have_the_values_of_sessions_without_them() -> None:
    entries = log.read(FOLDER / EVENTS)
    work = [entry.event for entry in entries if isinstance(entry.event, WorkEnded)]
    assert [event.control_excess for event in work] == [0.0, 0.0]
    for entry, line in zip(entries, (FOLDER / EVENTS).read_text(encoding="utf-8").splitlines(), strict=True):
        written, today = json.loads(line), json.loads(to_line(entry))
        assert written["event"] == today["event"]
        assert written["data"].keys() <= today["data"].keys()


def test_it_is_listed_shown_and_reported(session: Session) -> None:
    assert all_sessions(session.path.parent) == [session.path]
    assert find(session.path.parent, None).name == session.name
    lines = status_lines(session)
    assert lines[0] == "20261129T145819Z-trial: finished, 0.9 of 20 min"
    assert any("attempt 1: passed, 1.154x undecided" in line for line in lines)
    assert status_document(session)["status"] == "finished"
    page = report.write(session.path).markdown.read_text(encoding="utf-8")
    assert "finished; 1 of 1 change passed" in page


def test_its_runs_load(session: Session) -> None:
    for run in session.state.runs:
        assert run_folder.load_run(session.path / run.run).samples


def test_one_that_was_left_open_goes_on(session: Session, workshop: Any, clock: Any) -> None:
    """Cut off behind its first checkpoint, as a machine that was taken away leaves it."""
    path = session.path / EVENTS
    passed = next(entry.number for entry in session.entries if isinstance(entry.event, Passed))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: passed + 1]))
    left = load(session.path).state
    assert (left.end, left.current and left.current.plan.name) == (None, "fix")
    with acting.desk(session.path, workshop, clock) as desk:
        steps.note(desk, "taken up again")
        steps.abort(desk, "seen enough")
    ended = load(session.path)
    assert ended.state.end is not None
    assert ended.entries[: passed + 1] == session.entries[: passed + 1]
    assert Decision.PASSED in {run.decision for run in ended.state.runs}
