"""Ledgers that are damaged, newer, foreign or not there."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_files import MakeRun, dump

from cudadent42 import ledger
from cudadent42.ledger import queries
from cudadent42.ledger.database import DamagedLedgerError, LedgerError, connect


@pytest.mark.parametrize(
    ("damage", "is_file_damaged"),
    [
        (lambda file: file.write_bytes(b"this was a ledger" * 500), True),
        (lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]), True),
        (lambda file: _sql(file, "drop table comparisons"), False),
        (lambda file: _sql(file, "alter table timings drop column flagged"), False),
        (lambda file: _sql(file, "update ledger_meta set value = '0' where key = 'schema_version'"), False),
        (lambda file: _sql(file, "delete from ledger_meta"), False),
        (lambda file: _sql(file, "alter table ledger_meta drop column value"), False),
    ],
    ids=["text", "half", "table missing", "column missing", "older", "no version", "no value"],
)
def test_a_damaged_ledger_says_so_and_a_rebuild_mends_it(
    make_run: MakeRun, tmp_path: Path, file: Path, damage: Callable[[Path], None], is_file_damaged: bool
) -> None:
    folder = make_run(tmp_path / "runs" / "a")
    ledger.record(folder, str(file))
    expected = dump(file)
    damage(file)
    trouble = ledger.record(folder, str(file))
    if trouble is None:  # half of it was enough for this run; the check finds it
        with pytest.raises(DamagedLedgerError, match="ledger rebuild"):
            connect(file).check()
    else:
        assert "nothing that was measured is lost" in trouble
        assert "cudadent42 ledger rebuild" in trouble
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert (done.runs, done.kept_tables, done.rebuild_on) == (1, (), ())
    assert (done.moved_aside is not None and done.moved_aside.exists()) == is_file_damaged
    connect(file).check()
    assert dump(file) == expected


def test_a_renewal_that_is_cut_short_changes_nothing(
    make_run: MakeRun, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "runs" / "a")
    ledger.record(folder, str(file))
    _sql(file, "alter table comparisons drop column revision")
    _sql(file, "update ledger_meta set value = '1' where key = 'schema_version'")
    before = dump(file)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cudadent42.ledger.renewal.note_renewed", die)
        with pytest.raises(KeyboardInterrupt):
            ledger.rebuild(str(file), [tmp_path / "runs"])
    assert dump(file) == before
    assert ledger.rebuild(str(file), [tmp_path / "runs"]).runs == 1
    connect(file).check()


def _sql(file: Path, statement: str) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute(statement)


def test_a_ledger_of_a_newer_version_is_refused_and_left_alone(
    make_run: MakeRun, tmp_path: Path, file: Path
) -> None:
    folder = make_run(tmp_path / "runs" / "a")
    ledger.record(folder, str(file))
    _sql(file, "update ledger_meta set value = '99' where key = 'schema_version'")
    before = dump(file)
    assert "newer cudadent42 (schema 99" in str(ledger.record(folder, str(file)))
    with pytest.raises(LedgerError, match="upgrade it"):
        ledger.rebuild(str(file), [tmp_path / "runs"])
    assert dump(file) == before


def test_another_programs_database_is_left_alone(make_run: MakeRun, tmp_path: Path) -> None:
    file = tmp_path / "theirs.sqlite"
    _sql(file, "create table runs (distance_km real)")
    _sql(file, "insert into runs values (42.195)")
    before = dump(file)
    folder = make_run(tmp_path / "runs" / "a")
    assert "its table 'runs' is in the way" in str(ledger.record(folder, str(file)))
    with pytest.raises(LedgerError, match="is no ledger"):
        ledger.rebuild(str(file), [tmp_path / "runs"])
    assert dump(file) == before


def test_a_reminder_that_cannot_be_read_is_dropped(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    ledger.record(make_run(tmp_path / "runs" / "a"), str(file))
    _sql(file, "insert into ledger_meta values ('rebuild_on', '3]')")
    assert connect(file).read(queries.contents).rebuild_on == ()
    assert ledger.rebuild(str(file), [tmp_path / "runs"]).runs == 1


def test_a_folder_where_the_file_should_be(make_run: MakeRun, tmp_path: Path) -> None:
    assert "Is a directory" in str(ledger.record(make_run(tmp_path / "run"), str(tmp_path)))
