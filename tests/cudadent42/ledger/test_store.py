"""The ledger on real run folders and real SQLite files."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sqlite3
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from ledger_files import MakeRun, rows

from cudadent42 import ledger
from cudadent42.ledger import queries, remembered
from cudadent42.ledger.database import connect
from cudadent42.ledger.reading import read_run
from cudadent42.runs import run_folder

# ---------------------------------------------------------------- recording


def test_what_a_run_leaves_in_the_ledger(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert ledger.record(folder, str(file)) is None
    (line,) = connect(file).read(lambda connection: queries.list_runs(connection, 10))
    assert (line.suite, line.device, line.machine, line.revision) == ("unit", "cpu", "CPU A", "01234567")
    assert (line.status, line.verdict, line.verified, line.samples) == ("finished", "faster", True, 20)
    assert (line.speedup, line.ci_low, line.ci_high) == (2.0, 1.9, 2.1)
    assert line.path == str(folder)
    assert rows(file) | {"runs": 1, "cases": 2, "comparisons": 3, "timings": 4} == rows(file)
    with sqlite3.connect(file) as connection:
        timing = connection.execute(
            "select samples, flagged, min_ms, median_ms, max_ms, memory_mb from timings "
            "where dtype = 'fp16' and implementation = 'cudadent42'"
        ).fetchone()
    assert timing == (5, 1, 0.5, 1.5, 2.5, None)


def test_recording_again_replaces(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    folder = make_run(tmp_path / "run")
    for _ in range(3):
        assert ledger.record(folder, str(file)) is None
    assert rows(file)["runs"] == 1
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert ledger.record(copy, str(file)) is None
    (line,) = connect(file).read(lambda connection: queries.list_runs(connection, 10))
    assert line.path == str(copy)


def test_a_folder_that_is_used_again_holds_the_new_run_only(
    make_run: MakeRun, tmp_path: Path, file: Path
) -> None:
    folder = make_run(tmp_path / "run", seed=1)
    ledger.record(folder, str(file))
    shutil.rmtree(folder)
    ledger.record(make_run(folder, seed=2), str(file))
    assert rows(file) | {"runs": 1, "timings": 4, "comparisons": 3} == rows(file)


def test_a_run_that_was_killed_is_recorded_as_far_as_it_came(
    make_run: MakeRun, tmp_path: Path, file: Path
) -> None:
    folder = make_run(tmp_path / "run")
    manifest = json.loads((folder / run_folder.MANIFEST).read_text())
    manifest |= {"status": "running", "ended": None, "started": "2026-01-01T00:00:00.000+00:00"}
    (folder / run_folder.MANIFEST).write_text(json.dumps(manifest))
    (folder / run_folder.LOG).write_text(
        '{"time": "2026-01-01T00:01:30.000+00:00", "event": "x"}\n{"time": "2026'
    )
    (folder / run_folder.RESULTS).unlink()
    with (folder / run_folder.SAMPLES).open("a") as samples:
        samples.write("pytorch,fp16,2,32")
    assert ledger.record(folder, str(file)) is None
    (line,) = connect(file).read(lambda connection: queries.list_runs(connection, 10))
    assert (line.status, line.seconds, line.samples, line.verdict) == ("running", 90.0, 20, None)


def test_only_this_user_can_read_it(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    ledger.record(make_run(tmp_path / "run"), str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert sqlite3.connect(file).execute("pragma journal_mode").fetchone() == ("wal",)


def test_none_keeps_no_ledger(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDADENT42_LEDGER", "none")
    assert ledger.record(make_run(tmp_path / "run")) is None
    assert not (tmp_path / "state").exists()
    with pytest.raises(Exception, match="no ledger is kept"):
        ledger.rebuild()


# ---------------------------------------------------------------- several writers


def _record_all(folders: list[str], file: str) -> list[str | None]:
    return [ledger.record(Path(folder), file) for folder in folders]


def test_several_processes_write_at_once(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    """Every writer records every run, so that all keys collide."""
    folders = [str(make_run(tmp_path / "runs" / str(i), seed=i)) for i in range(6)]
    with ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
        troubles = list(
            pool.map(
                _record_all, [folders, folders[::-1], folders[3:] + folders[:3], folders], [str(file)] * 4
            )
        )
    assert troubles == [[None] * 6] * 4
    assert rows(file) | {"runs": 6, "timings": 24, "comparisons": 18, "cases": 12} == rows(file)
    connect(file).check()


def test_readers_do_not_wait_for_a_writer(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    ledger.record(make_run(tmp_path / "run"), str(file))
    writer = sqlite3.connect(file, isolation_level=None)
    writer.execute("begin immediate")
    try:
        assert rows(file)["runs"] == 1  # one that waited would end with an error, for the writer does not end
    finally:
        writer.execute("rollback")


def test_a_ledger_that_stays_locked_costs_a_line_and_no_run(
    make_run: MakeRun, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cudadent42.ledger.database.BUSY_TIMEOUT_S", 0.05)
    folder = make_run(tmp_path / "run")
    ledger.record(folder, str(file))
    writer = sqlite3.connect(file, isolation_level=None)
    writer.execute("begin immediate")
    try:
        assert "held by another process" in str(ledger.record(folder, str(file)))
    finally:
        writer.execute("rollback")
    assert ledger.record(folder, str(file)) is None


# ---------------------------------------------------------------- what it was told of, outside of the database


@pytest.mark.parametrize("loss", ["text", "gone"])
def test_a_rebuild_of_a_lost_ledger_finds_the_runs_of_every_project(
    make_run: MakeRun, tmp_path: Path, file: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make_run(tmp_path / "here" / "runs" / "a")
    there = make_run(tmp_path / "there" / "anywhere", seed=1)
    far = make_run(tmp_path / "far" / "b", seed=2)
    for folder in (here, there):
        assert ledger.record(folder, str(file)) is None
    assert ledger.rebuild(str(file), [tmp_path / "far"]).runs == 3
    if loss == "text":
        file.write_bytes(b"this was a ledger" * 500)
    else:
        for path in tmp_path.glob(f"{file.name}*"):
            if path.suffix != ".folders":
                path.unlink()
    monkeypatch.chdir(tmp_path / "here")
    shutil.rmtree(far)
    done = ledger.rebuild(str(file))
    assert (done.runs, done.problems) == (2, ())
    assert rows(file)["runs"] == 2


def test_what_a_damaged_ledger_did_not_take_is_remembered(
    make_run: MakeRun, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.record(make_run(tmp_path / "one" / "a"), str(file))
    file.write_bytes(b"this was a ledger" * 500)
    assert ledger.record(make_run(tmp_path / "two" / "b", seed=1), str(file)) is not None
    monkeypatch.chdir(tmp_path)
    assert ledger.rebuild(str(file)).runs == 2


def test_the_list_of_folders_survives_torn_lines_and_has_each_once(tmp_path: Path, file: Path) -> None:
    remembered.remember(file, [tmp_path / "a", tmp_path / "a"])
    listed = remembered.file_of(file)
    listed.write_text(listed.read_text() + '{"host": "elsewhere", "path": "/x"}\n{"host": "')
    remembered.remember(file, [tmp_path / "b\nc", tmp_path / "a"])
    assert remembered.recall(file) == (tmp_path / "a", tmp_path / "b\nc")
    assert listed.stat().st_mode & 0o077 == 0


def test_a_server_has_its_list_in_the_users_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    urls = ["postgresql://me:old@db/lab", "postgresql://me:new@db/lab", "postgresql://me@db/other", "x://:y/"]
    files = [remembered.file_of(url) for url in urls]
    assert files[0] == files[1]
    assert len(set(files)) == 3
    assert files[0].parent == tmp_path / "cudadent42"


def test_rows_of_a_case_stay_comparable_with_those_from_before_operations_were_named(
    make_run: MakeRun, tmp_path: Path
) -> None:
    row = read_run(make_run(tmp_path / "run"), None).cases[0]
    assert row["shape"] == (
        '{"name": "tiny", "dtype": "fp16", "batch": 2, "num_heads": 4, "num_kv_heads": 2, "seqlen_q": 32, '
        '"seqlen_k": 48, "head_dim": 64, "causal": false}'
    )
