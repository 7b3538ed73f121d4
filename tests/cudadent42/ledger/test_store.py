"""The ledger on real run folders and real SQLite files."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from cudadent42 import ledger
from cudadent42.base.errors import UsageError
from cudadent42.ledger import queries, remembered, store
from cudadent42.ledger.database import BUSY_TIMEOUT_S, DamagedLedgerError, LedgerError, connect
from cudadent42.ledger.reading import read_run
from cudadent42.runs import run_folder

SOURCE = os.pathsep.join(sys.path)
MakeRun = Callable[..., Path]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.sqlite"


def rows(file: Path) -> dict[str, int]:
    return connect(file).read(queries.contents).rows


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


# ---------------------------------------------------------------- rebuilding


def test_a_rebuild_equals_recording(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    folders = [make_run(tmp_path / "runs" / name, seed=i) for i, name in enumerate("abc")]
    for folder in folders:
        ledger.record(folder, str(file))
    other = tmp_path / "other.sqlite"
    done = ledger.rebuild(str(other), [tmp_path / "runs"])
    assert (done.runs, done.samples, done.problems, done.forgotten) == (3, 60, (), 0)
    assert dump(file) == dump(other)


def dump(file: Path) -> list[str]:
    with sqlite3.connect(file) as connection:
        return sorted(line for line in connection.iterdump() if line.startswith("INSERT"))


def test_a_rebuild_forgets_what_is_gone_and_finds_what_moved(
    make_run: MakeRun, tmp_path: Path, file: Path
) -> None:
    kept, gone, moved = (make_run(tmp_path / "runs" / name, seed=i) for i, name in enumerate("abc"))
    outside = make_run(tmp_path / "elsewhere", seed=9)
    for folder in (kept, gone, moved, outside):
        ledger.record(folder, str(file))
    shutil.rmtree(gone)
    moved.rename(tmp_path / "runs" / "d")
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert (done.runs, done.forgotten) == (3, 1)
    lines = connect(file).read(lambda connection: queries.list_runs(connection, 10))
    assert {Path(line.path).name for line in lines} == {"a", "d", "elsewhere"}


def test_what_cannot_be_read_is_left_out_and_named(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    root = tmp_path / "runs"
    make_run(root / "good")
    newer, torn, wrong = (
        make_run(root / name, seed=i) for i, name in enumerate(("newer", "torn", "wrong"), 1)
    )
    manifest = json.loads((newer / run_folder.MANIFEST).read_text())
    (newer / run_folder.MANIFEST).write_text(json.dumps(manifest | {"schema_version": 99}))
    (torn / run_folder.MANIFEST).write_text('{"schema_version": 1, ')
    (wrong / run_folder.SAMPLES).write_text("a,b\n1,2\n")
    done = ledger.rebuild(str(file), [root])
    assert done.runs == 1
    assert len(done.problems) == 3
    assert any("newer cudadent42" in problem for problem in done.problems)
    assert any("lacks the column" in problem for problem in done.problems)


def test_a_folder_whose_name_is_no_text_is_left_out_and_named(
    make_run: MakeRun, tmp_path: Path, file: Path
) -> None:
    folder = make_run(tmp_path / "runs" / os.fsdecode(b"caf\xe9"))
    make_run(tmp_path / "runs" / "b", seed=1)
    assert "rename the folder" in str(ledger.record(folder, str(file)))
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert done.runs == 1
    assert "is no UTF-8" in done.problems[0]


def test_without_roots_the_usual_folders_are_read(
    make_run: MakeRun, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "sessions" / "s" / "runs" / "b", seed=1)
    make_run(tmp_path / "other" / "c", seed=2)
    assert ledger.rebuild(str(file)).runs == 2
    with pytest.raises(UsageError, match="is not a folder"):
        ledger.rebuild(str(file), [tmp_path / "nowhere"])


# ---------------------------------------------------------------- damage


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


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("oracel://nowhere/x", "no database is called 'oracel'"),
        ("mysql+pymysql://nowhere/x", "needs the Python package"),
        ("sqlite://", "names no file"),
        ("://", "cannot be read"),
        ("postgresql://me:secret@127.0.0.1:1/x", "cannot be used"),
        ("postgresql://127.0.0.1:1/x?user=me&password=secret&sslpassword=secret", "cannot be used"),
    ],
)
def test_urls_that_lead_nowhere(make_run: MakeRun, tmp_path: Path, url: str, message: str) -> None:
    trouble = str(ledger.record(make_run(tmp_path / "run"), url))
    assert message in trouble
    assert "secret" not in trouble


# ---------------------------------------------------------------- folders that somebody made


def nested(folder: Path) -> None:
    text = json.loads((folder / "manifest.json").read_text())
    text["machine"]["facts"]["deep"] = "HERE"
    deep = "[" * 100_000 + "]" * 100_000
    (folder / "manifest.json").write_text(json.dumps(text).replace('"HERE"', deep))


def nested_a_thousand_deep(folder: Path) -> None:
    text = json.loads((folder / "manifest.json").read_text())
    text["machine"]["facts"]["deep"] = "HERE"
    (folder / "manifest.json").write_text(json.dumps(text).replace('"HERE"', "[" * 900 + "]" * 900))


def huge_numbers(folder: Path) -> None:
    text = (folder / "results.json").read_text()
    (folder / "results.json").write_text(text.replace("1.9", "1e308"))


def huge_integer(folder: Path) -> None:
    text = (folder / "results.json").read_text()
    (folder / "results.json").write_text(text.replace('"blocks": 5', '"blocks": 1' + "0" * 400))


def huge_latency(folder: Path) -> None:
    text = (folder / "samples.csv").read_text()
    (folder / "samples.csv").write_text(text.replace("4.0", "1e300"))


def long_field(folder: Path) -> None:
    with (folder / "samples.csv").open("a") as file:
        file.write("x" * 200_000 + "\n")


def sparse(folder: Path) -> None:
    os.truncate(folder / "samples.csv", 200 << 30)


def pipe(folder: Path) -> None:
    (folder / "results.json").unlink()
    os.mkfifo(folder / "results.json")


def not_text(folder: Path) -> None:
    (folder / "verify.json").write_bytes(b"\xff\xfe" * 100)


@pytest.mark.parametrize(
    "damage",
    [
        *(nested, nested_a_thousand_deep, huge_numbers, huge_integer, huge_latency),
        *(long_field, sparse, pipe, not_text),
    ],
)
def test_one_bad_folder_is_skipped_with_a_line(
    make_run: MakeRun, tmp_path: Path, file: Path, damage: Callable[[Path], None]
) -> None:
    make_run(tmp_path / "runs" / "good", seed=1)
    bad = make_run(tmp_path / "runs" / "bad", seed=2)
    damage(bad)
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert done.runs == 1
    [problem] = done.problems
    assert str(bad) in problem


def test_a_session_of_impossible_times_is_skipped_with_a_line(
    make_run: MakeRun, tmp_path: Path, file: Path
) -> None:
    make_run(tmp_path / "runs" / "good")
    session = tmp_path / "runs" / "session"
    session.mkdir()
    first = {"number": 0, "time": "2026-01-01T00:00:00+00:00", "uptime_s": 1e300, "boot": "", "host": ""}
    started = {"protocol": {"checkpoints": []}, "settings": {"rate": "local"}}
    line = json.dumps({**first, "event": "Started", "data": started})
    (session / "events.jsonl").write_text(line + "\n" + "[" * 100_000 + "\n")
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert (done.runs, done.sessions, len(done.problems)) == (1, 0, 1)


def test_folders_1500_deep(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    make_run(tmp_path / "runs" / "good")
    before = Path.cwd()
    try:
        os.chdir(tmp_path / "runs")
        for _ in range(1500):  # longer than any path may be
            os.mkdir("deep")
            os.chdir("deep")
        assert ledger.rebuild(str(file), [tmp_path / "runs"]).runs == 1
    finally:
        os.chdir(before)
        subprocess.run(["rm", "-rf", str(tmp_path / "runs")], check=True)


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
        began = time.monotonic()
        assert rows(file)["runs"] == 1
        assert time.monotonic() - began < BUSY_TIMEOUT_S
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


# ---------------------------------------------------------------- killed, and a full disk

REBUILD = """
import sys
from pathlib import Path
from cudadent42 import ledger
ledger.rebuild(sys.argv[1], [Path(sys.argv[2])])
"""


def test_kill_at_any_moment_of_a_rebuild(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    """After each kill the ledger is whole, holds only whole runs, and is completed by the next rebuild."""
    count = 60
    for i in range(count):
        make_run(tmp_path / "runs" / str(i), seed=i, latencies=(1.0, 2.0))
    environment = os.environ | {"PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", REBUILD, str(file), str(tmp_path / "runs")]
    begun = time.monotonic()
    subprocess.run(command, env=environment, check=True)
    whole = time.monotonic() - begun
    expected = dump(file)
    for number in range(8):
        if number % 2:
            for side in ("", "-wal", "-shm"):
                file.with_name(file.name + side).unlink(missing_ok=True)
        process = subprocess.Popen(command, env=environment)
        time.sleep(whole * (0.3 + 0.09 * number))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if file.exists() and not connect(file).is_empty():
            opened = connect(file)
            opened.check()
            found = opened.read(queries.contents)
            assert found.rows["timings"] == 4 * found.rows["runs"]
            assert found.rows["comparisons"] == 3 * found.rows["runs"]
    done = ledger.rebuild(str(file), [tmp_path / "runs"])
    assert done.moved_aside is None
    assert connect(file).read(queries.contents).unfinished_rebuild is None
    assert [line for line in dump(file) if "rebuilding" not in line] == expected


def test_an_unfinished_rebuild_is_known(
    make_run: MakeRun, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs" / "a")

    def die(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.rebuild(file, [tmp_path / "runs"], die)
    assert connect(file).read(queries.contents).unfinished_rebuild is not None


def test_a_full_disk_is_told_and_harms_nothing(make_run: MakeRun, tmp_path: Path, file: Path) -> None:
    """A file-size limit stands for the full disk."""
    first, second = (make_run(tmp_path / name, seed=i) for i, name in enumerate("ab"))
    ledger.record(first, str(file))
    script = f"""
import resource, signal
from pathlib import Path
from cudadent42 import ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
print(ledger.record(Path({str(second)!r}), {str(file)!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "is not in the ledger" in done.stdout
    connect(file).check()
    assert rows(file)["runs"] == 1
    assert ledger.record(second, str(file)) is None
    assert rows(file)["runs"] == 2


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
