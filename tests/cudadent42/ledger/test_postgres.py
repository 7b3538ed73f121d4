"""The ledger on a PostgreSQL server of the test's own, on the loopback interface."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection

from cudadent42 import ledger
from cudadent42.ledger import queries
from cudadent42.ledger.database import WRITERS_LOCK, LedgerError, connect

MakeRun = Callable[..., Path]


def _program(name: str) -> str | None:
    path = shutil.which(name)
    if path is not None:
        return path
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(installed[-1]) if installed else None


def _as_somebody() -> dict[str, str]:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": name}
    pytest.skip("this is root, and there is no other user to run PostgreSQL as")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a fresh server's database."""
    pytest.importorskip("psycopg")
    initdb, pg_ctl = _program("initdb"), _program("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("no PostgreSQL here (initdb and pg_ctl): apt-get install postgresql")
    user = _as_somebody()
    with tempfile.TemporaryDirectory(prefix="cudadent42-pg-") as name:
        folder = Path(name)
        if user:
            shutil.chown(folder, user["user"])
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        data = folder / "data"
        common = {"check": True, "capture_output": True, "text": True, "cwd": folder, **user}
        subprocess.run([initdb, "-D", data, "-U", "lab", "--auth=trust", "--no-sync"], **common)  # type: ignore[call-overload]
        options = (
            f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder} -c fsync=off"
        )
        start = [pg_ctl, "-D", data, "-o", options, "-l", folder / "log", "-w", "start"]
        subprocess.run(start, **common | {"capture_output": False, "stdout": subprocess.DEVNULL})  # type: ignore[call-overload]
        try:
            yield f"postgresql://lab:secret@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([pg_ctl, "-D", data, "-m", "immediate", "stop"], **common)  # type: ignore[call-overload]


@pytest.fixture
def url(server: str) -> Iterator[str]:
    yield server
    connect(server).write(lambda c: c.exec_driver_sql("drop schema public cascade; create schema public"))


def test_recording_and_listing(make_run: MakeRun, tmp_path: Path, url: str) -> None:
    folder = make_run(tmp_path / "runs" / "a")
    for _ in range(2):
        assert ledger.record(folder, url) is None
    opened = connect(url)
    assert "secret" not in opened.name
    opened.check()
    (line,) = opened.read(lambda connection: queries.list_runs(connection, 5))
    assert (line.suite, line.samples, line.verified, line.speedup) == ("unit", 20, True, 2.0)
    points = opened.read(lambda connection: queries.history(connection, "tiny", None, None))
    assert [point.dtype for point in points] == ["bf16", "fp16"]
    (cost,) = opened.read(queries.runs_outside_sessions)
    assert (cost.results, cost.decided, cost.undecided) == (1, 1, 1)


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of folders is kept there, and the server is one for all of these tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_rebuilding(make_run: MakeRun, tmp_path: Path, url: str) -> None:
    for i in range(3):
        make_run(tmp_path / "runs" / str(i), seed=i)
    for _ in range(2):
        done = ledger.rebuild(url, [tmp_path / "runs"])
        assert (done.runs, done.samples, done.moved_aside) == (3, 60, None)
    shutil.rmtree(tmp_path / "runs" / "1")
    assert ledger.rebuild(url, [tmp_path / "runs"]).forgotten == 1
    assert connect(url).read(queries.contents).rows["runs"] == 2


def test_what_other_machines_recorded_stays(
    make_run: MakeRun, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("platform.node", lambda: "another-machine")
        assert ledger.record(make_run(tmp_path / "far" / "a", seed=1), url) is None
    shutil.rmtree(tmp_path / "far")
    make_run(tmp_path / "runs" / "b", seed=2)
    assert ledger.rebuild(url, [tmp_path / "runs"]).forgotten == 0
    lines = connect(url).read(lambda connection: queries.list_runs(connection, 5))
    assert {line.host for line in lines} > {"another-machine"}


def _record_all(folders: list[str], url: str) -> list[str | None]:
    return [ledger.record(Path(folder), url) for folder in folders]


def test_several_processes_write_at_once(make_run: MakeRun, tmp_path: Path, url: str) -> None:
    """From no tables at all, and every writer every run, so that all keys collide."""
    folders = [str(make_run(tmp_path / "runs" / str(i), seed=i)) for i in range(4)]
    with ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
        orders = [folders, folders[::-1], folders[2:] + folders[:2], folders]
        troubles = list(pool.map(_record_all, orders, [url] * 4))
    assert troubles == [[None] * 4] * 4
    counts = connect(url).read(queries.contents).rows
    assert counts | {"runs": 4, "timings": 16, "comparisons": 12, "cases": 8} == counts


def _sql(url: str, statement: str) -> list[tuple[object, ...]]:
    """What a statement answers, if anything."""

    def work(connection: Connection) -> list[tuple[object, ...]]:
        done = connection.exec_driver_sql(statement)
        return [tuple(row) for row in done] if done.returns_rows else []

    return connect(url).write(work)


@pytest.fixture
def elsewhere(
    make_run: MakeRun, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Runs of this machine and of another one are in the ledger; a call is a rebuild on the other."""
    ledger.record(make_run(tmp_path / "runs" / "here", seed=1), url)

    def there(work: Callable[[], object]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("platform.node", lambda: "another-machine")
            work()

    folder = make_run(tmp_path / "far" / "there", seed=2, revision="fedcba9876543210")
    there(lambda: ledger.record(folder, url))
    return lambda: there(lambda: ledger.rebuild(url, [tmp_path / "far"]))


TABLES = ("runs", "cases", "comparisons", "timings")
OLDER = """
alter table comparisons drop column revision;
update ledger_meta set value = '1' where key = 'schema_version'
"""


def _rows(url: str) -> dict[str, list[tuple[object, ...]]]:
    return {table: sorted(_sql(url, f"select * from {table}"), key=str) for table in TABLES}


def test_an_older_form_is_renewed_with_the_rows_of_every_machine(
    tmp_path: Path, url: str, elsewhere: Callable[[], None]
) -> None:
    before = _rows(url)
    _sql(url, OLDER)
    assert "cudadent42 ledger rebuild" in str(ledger.record(tmp_path / "runs" / "here", url))
    done = ledger.rebuild(url, [tmp_path / "runs"])
    assert (done.runs, done.kept_tables, done.rebuild_on) == (1, (), ())
    connect(url).check()
    assert _rows(url) == before
    assert ("fedcba98",) in _sql(url, "select distinct revision from comparisons")


@pytest.mark.parametrize(
    ("damage", "is_kept"),
    [
        ("alter table timings drop column flagged", True),
        ("alter table timings alter column flagged drop not null; update timings set flagged = null", True),
        ("drop table timings", False),
    ],
    ids=["no column", "no values", "no table"],
)
def test_rows_that_cannot_be_taken_over_stay_until_their_machine_has_rebuilt(
    tmp_path: Path, url: str, elsewhere: Callable[[], None], damage: str, is_kept: bool
) -> None:
    before = _rows(url)
    _sql(url, damage + "; update ledger_meta set value = '1'")
    done = ledger.rebuild(url, [tmp_path / "runs"])
    assert done.rebuild_on == ("another-machine",)
    assert len(done.kept_tables) == is_kept
    for table in done.kept_tables:
        assert _sql(url, f"select count(*) from {table}") == [(len(before["timings"]),)]
    contents = connect(url).read(queries.contents)
    assert (contents.rebuild_on, contents.unfinished_rebuild) == (("another-machine",), None)
    after = _rows(url)
    assert all(after[table] == before[table] for table in ("runs", "cases", "comparisons"))
    assert set(after["timings"]) < set(before["timings"])
    elsewhere()
    assert _rows(url) == before
    assert connect(url).read(queries.contents).rebuild_on == ()


def test_a_machine_that_still_has_to_rebuild_is_known_after_another_renewal(
    tmp_path: Path, url: str, elsewhere: Callable[[], None]
) -> None:
    _sql(url, "alter table timings drop column flagged")
    ledger.rebuild(url, [tmp_path / "runs"])
    _sql(url, OLDER)
    ledger.rebuild(url, [tmp_path / "runs"])
    assert connect(url).read(queries.contents).rebuild_on == ("another-machine",)


def _rebuild(root: str, url: str) -> int:
    return ledger.rebuild(url, [Path(root)]).runs


def test_several_rebuilds_of_an_older_form_at_once(
    make_run: MakeRun, tmp_path: Path, url: str, elsewhere: Callable[[], None]
) -> None:
    _sql(url, OLDER)
    with ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(_rebuild, [str(tmp_path / "runs")] * 4, [url] * 4)) == [1] * 4
    connect(url).check()
    assert connect(url).read(queries.contents).rows["runs"] == 2


# ---------------------------------------------------------------- other writers


def test_writers_come_one_at_a_time(url: str) -> None:
    psycopg = pytest.importorskip("psycopg")

    def is_free(_: object) -> bool:
        with psycopg.connect(url) as other:
            return bool(other.execute(f"select pg_try_advisory_xact_lock({WRITERS_LOCK})").fetchone()[0])

    assert not connect(url).write(is_free)
    assert connect(url).read(is_free)


def test_a_ledger_that_stays_locked_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    psycopg = pytest.importorskip("psycopg")
    monkeypatch.setattr("cudadent42.ledger.database.BUSY_TIMEOUT_S", 0.05)
    with psycopg.connect(url) as other:
        other.execute(f"select pg_advisory_xact_lock({WRITERS_LOCK})")
        with pytest.raises(LedgerError, match="held by another process"):
            connect(url).create_tables()


@pytest.mark.parametrize("state", ["40P01", "40001"])
@pytest.mark.parametrize("is_writing", [True, False])
def test_a_transaction_that_had_to_give_way_is_made_again(
    url: str, monkeypatch: pytest.MonkeyPatch, state: str, is_writing: bool
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    attempts = 0
    patience = 3

    def work(connection: Connection) -> int:
        nonlocal attempts
        attempts += 1
        if attempts < patience:
            raised = f"do $$ begin raise exception 'after you' using errcode = '{state}'; end $$"
            connection.exec_driver_sql(raised)
        return connection.exec_driver_sql("select 7").scalar_one()  # type: ignore[no-any-return]

    opened = connect(url)
    transact = opened.write if is_writing else opened.read
    assert transact(work) == 7
    assert (attempts, len(pauses)) == (3, 2)
    attempts, patience = 0, 1000
    with pytest.raises(LedgerError, match="attempts had to give way, the last with: after you"):
        transact(work)
    assert attempts > 3


def test_a_real_deadlock_with_a_program_that_does_not_take_the_lock(url: str) -> None:
    """It locks the row that this one wants next, and wants the row that this one has; the server ends this one."""
    psycopg = pytest.importorskip("psycopg")
    _sql(url, "create table pair (name text primary key); insert into pair values ('a'), ('b')")
    lock = "select name from pair where name = '{}' for update"
    waiting = "select count(*) from pg_locks where not granted"
    attempts = 0
    with psycopg.connect(url) as other, ThreadPoolExecutor(1) as pool:
        other.execute("set deadlock_timeout = '1h'")  # whoever looks is ended

        def work(connection: Connection) -> None:
            nonlocal attempts
            attempts += 1
            connection.exec_driver_sql("set local deadlock_timeout = '10ms'")
            if attempts == 1:
                other.execute(lock.format("b"))
                connection.exec_driver_sql(lock.format("a"))
                pool.submit(lambda: (other.execute(lock.format("a")), other.rollback()))
                while not connection.exec_driver_sql(waiting).scalar_one():
                    time.sleep(0.01)
            connection.exec_driver_sql(lock.format("b"))

        connect(url).write(work)
    assert attempts == 2


def test_a_newer_one_is_refused(make_run: MakeRun, tmp_path: Path, url: str) -> None:
    folder = make_run(tmp_path / "runs" / "a")
    ledger.record(folder, url)
    connect(url).write(lambda c: c.exec_driver_sql("update ledger_meta set value = '99'"))
    with pytest.raises(LedgerError, match="upgrade it"):
        ledger.rebuild(url, [tmp_path / "runs"])
