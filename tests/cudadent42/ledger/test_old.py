"""A ledger, a run and a session that an old revision wrote: see ``old/README.md``."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
from ledger_files import rows

from cudadent42 import ledger
from cudadent42.ledger import queries
from cudadent42.ledger.database import LedgerError, connect
from cudadent42.ledger.reading import read_run
from cudadent42.ledger.sessions import read_session

OLD = Path(__file__).parent / "old"
SESSIONS = Path(__file__).parents[1] / "session" / "old"
ITS_HOST = "vm"
"""The machine on which the ledger was written."""
HELD = {
    "runs": 3,
    "cases": 3,
    "comparisons": 6,
    "timings": 9,
    "sessions": 1,
    "checkpoints": 3,
    "machine_starts": 0,
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as it was, in which the ledger's paths lead to the runs and to the session."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    for session in SESSIONS.glob("*-trial"):
        shutil.copytree(session, tmp_path / "sessions" / session.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_says_how_it_is_brought_to_the_present_form(project: Path) -> None:
    with pytest.raises(LedgerError, match=r"schema 1; .*`cudadent42 ledger rebuild`"):
        ledger.open_for_reading("ledger.sqlite")


@pytest.mark.parametrize("host", [ITS_HOST, "another"])
def test_a_rebuild_knows_every_run_and_session_again(
    project: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """By the identities that the old revision gave them, so that nothing is there twice."""
    monkeypatch.setattr(platform, "node", lambda: host)
    done = ledger.rebuild("ledger.sqlite")
    assert (done.runs, done.samples, done.sessions) == (3, 279, 1)
    assert (done.problems, done.moved_aside, done.kept_tables, done.rebuild_on) == ((), None, (), ())
    assert rows(project / "ledger.sqlite") == HELD


def test_where_its_folders_are_not_its_rows_stay(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are another machine's: the present form has a value for each of their columns."""
    monkeypatch.setattr(platform, "node", lambda: "another")
    for name in ("runs", "sessions"):
        shutil.rmtree(project / name)
    done = ledger.rebuild("ledger.sqlite")
    assert (done.runs, done.forgotten, done.kept_tables, done.rebuild_on) == (0, 0, (), ())
    assert rows(project / "ledger.sqlite") == HELD
    opened = connect(project / "ledger.sqlite")
    lines = opened.read(lambda connection: queries.list_runs(connection, 10))
    assert [(line.suite, line.verdict, line.samples) for line in lines] == [
        ("mini", "undecided", 240),
        ("mini", "slower", 24),
        ("mini", "undecided", 15),
    ]
    assert len(opened.read(lambda connection: queries.history(connection, "tiny", None, None))) == 3
    (session,) = opened.read(queries.session_lines)
    assert (session.name, session.status) == ("20261129T145819Z-trial", "finished")


def test_its_folders_are_rows() -> None:
    (folder,) = (OLD / "runs").iterdir()
    run = read_run(folder, None).run
    assert (run["status"], run["verdict"], run["samples"], run["verified"]) == (
        "finished",
        "undecided",
        15,
        True,
    )
    (folder,) = SESSIONS.glob("*-trial")
    session = read_session(folder)
    assert (session.session["status"], session.session["seconds"]) == ("finished", pytest.approx(55.141))
    assert [row["outcome"] for row in session.checkpoints] == ["passed"] * 3
