"""Writing the ledger: a run at a time as they end, or all of it again from the folders."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from sqlalchemy import Connection, Table, delete, insert, select

from cudadent42.base.errors import UsageError
from cudadent42.base.paths import real_path
from cudadent42.base.shown import message
from cudadent42.ledger.database import DamagedLedgerError, Ledger, connect
from cudadent42.ledger.reading import Row, RunRows, read_run
from cudadent42.ledger.remembered import host, recall, remember
from cudadent42.ledger.renewal import Renewal, note_rebuilt, renew, set_meta
from cudadent42.ledger.schema import REBUILDING_KEY, RUN_PARTS, checkpoints, machine_starts, meta, sessions
from cudadent42.ledger.schema import runs as runs_table
from cudadent42.ledger.sessions import SessionRows, read_session
from cudadent42.runs import run_folder as runs
from cudadent42.runs import starts
from cudadent42.runs.sessions import is_session, session_of

_BATCH = 50
"""Runs in one transaction of a rebuild: other writers come in between."""

DEFAULT_ROOTS = (Path("runs"), Path("sessions"))

_SKIPPED_FOLDERS = frozenset((".git", ".venv", "__pycache__", "node_modules"))

_MOST_LEVELS = 64
"""Of folders below a root. Paths that are longer than the system takes can be made, and lead nowhere."""

OnProgress = Callable[[int, int], None]
"""Told the number of folders that are read, of all."""


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild did."""

    ledger: str
    runs: int
    sessions: int
    samples: int
    forgotten: int
    """Runs and sessions whose folders are gone."""
    problems: tuple[str, ...]
    """Folders that could not be read, with the reason."""
    moved_aside: Path | None
    """Where a file that could not be used went."""
    kept_tables: tuple[str, ...]
    rebuild_on: tuple[str, ...]
    """As of `renewal.Renewal`."""
    roots: tuple[Path, ...]
    seconds: float


def record(location: Path | str, folder: Path) -> None:
    """Put one run, and the session that it belongs to, into the ledger; again for a run that is there already.

    Raises LedgerError for the ledger, UsageError for the folder.
    """
    owner = session_of(folder)
    rows = read_run(folder, None if owner is None else read_session(owner).session["id"])
    ledger = open_for_writing(location)

    def write(connection: Connection) -> None:
        _replace_runs(connection, [rows])
        if owner is not None:
            _replace_sessions(connection, [read_session(owner)])
        _replace_starts(connection)

    ledger.write(write)


def record_session(location: Path | str, folder: Path) -> None:
    """Put a session into the ledger, without its runs. Raises LedgerError, UsageError."""
    rows = read_session(folder)
    ledger = open_for_writing(location)

    def write(connection: Connection) -> None:
        _replace_sessions(connection, [rows])
        _replace_starts(connection)

    ledger.write(write)


def open_for_writing(location: Path | str) -> Ledger:
    """The ledger, made if it is missing. Raises LedgerError where it is damaged, or newer than this program."""
    ledger = connect(location)
    if ledger.is_empty():
        ledger.create_tables()
    ledger.require_version()
    return ledger


def rebuild(
    location: Path | str, roots: Sequence[Path] = (), on_progress: OnProgress = lambda done, total: None
) -> Rebuilt:
    """Make the ledger again from every run and session folder below ``roots``.

    Without roots: below ``runs`` and ``sessions`` of the current folder. Runs that the ledger knows, or was ever told
    of (`remembered`), are read wherever they are, also where the ledger itself is lost. A damaged file is moved aside;
    tables of an older form are brought to the present one (`renewal`). What this machine recorded and whose folder is
    gone is forgotten; what other machines recorded stays.

    Raises UsageError for a root that is not a folder, LedgerError where the ledger is of a newer program or cannot be
    written.
    """
    began_s = time.monotonic()
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"{root} is not a folder; expected a folder that holds run folders")
    ledger, moved_aside, renewal = _open_anew(location)
    previous = ledger.read(_known_folders)
    searched = _unique(roots or [path for path in DEFAULT_ROOTS if path.is_dir()])
    ledger.write(lambda connection: set_meta(connection, REBUILDING_KEY, _now()))
    run_folders, session_folders = _find(_unique((*searched, *previous, *recall(location))))
    with suppress(UsageError):  # the rebuild itself does not depend on it
        remember(location, (*run_folders, *session_folders))
    problems: list[str] = []
    read = _read_sessions(session_folders, problems)
    ledger.write(lambda connection: _replace_sessions(connection, read))
    owners = {Path(rows.session["path"]): rows.session["id"] for rows in read}
    seen_runs = seen_samples = 0
    for batch in _read_runs(run_folders, owners, problems, on_progress):
        ledger.write(lambda connection, batch=batch: _replace_runs(connection, batch))  # type: ignore[misc]
        seen_runs += len(batch)
        seen_samples += sum(rows.run["samples"] for rows in batch)

    def finish(connection: Connection) -> int:
        _replace_starts(connection)
        forgotten = _forget_missing(connection)
        connection.execute(delete(meta).where(meta.c.key == REBUILDING_KEY))
        note_rebuilt(connection)
        return forgotten

    forgotten = ledger.write(finish)
    return Rebuilt(
        ledger=ledger.name,
        runs=seen_runs,
        sessions=len(read),
        samples=seen_samples,
        forgotten=forgotten,
        problems=tuple(problems),
        moved_aside=moved_aside,
        kept_tables=renewal.kept_tables,
        rebuild_on=renewal.rebuild_on,
        roots=searched,
        seconds=time.monotonic() - began_s,
    )


def _read_sessions(folders: Sequence[Path], problems: list[str]) -> list[SessionRows]:
    """What cannot be read is added to the ``problems``."""
    read = []
    for folder in folders:
        try:
            read.append(read_session(folder))
        except UsageError as error:
            problems.append(message(str(error)))
    return read


def _read_runs(
    folders: Sequence[Path], owners: Mapping[Path, str], problems: list[str], on_progress: OnProgress
) -> Iterator[list[RunRows]]:
    """In batches; ``owners``: the identity of a session by its folder. Progress is told once a batch is taken."""
    batch: list[RunRows] = []
    for done, folder in enumerate(folders, 1):
        owner = session_of(folder)
        try:
            batch.append(read_run(folder, owners.get(owner.absolute()) if owner else None))
        except UsageError as error:
            problems.append(message(str(error)))
        if len(batch) == _BATCH or done == len(folders):
            yield batch
            batch = []
            on_progress(done, len(folders))


# ---------------------------------------------------------------- finding folders


def _find(roots: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Run folders and session folders below the roots, each once."""
    run_folders: dict[Path, None] = {}
    session_folders: dict[Path, None] = {}
    for root in roots:
        waiting = [(root.absolute(), 0)]
        while waiting:
            path, level = waiting.pop()
            folders, files = _entries(path)
            if runs.MANIFEST in files and runs.LOG in files:
                run_folders[path] = None
                continue
            if is_session(path):
                session_folders[path] = None
            if level < _MOST_LEVELS:
                waiting += [(path / name, level + 1) for name in sorted(folders, reverse=True)]
    return list(run_folders), list(session_folders)


def _entries(folder: Path) -> tuple[list[str], set[str]]:
    """The names of its folders that may hold runs, and of its files; none where it cannot be read."""
    folders, files = [], set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    files.add(entry.name)
                elif entry.name not in _SKIPPED_FOLDERS:
                    folders.append(entry.name)
    except OSError:
        return [], set()
    return folders, files


def _open_anew(location: Path | str) -> tuple[Ledger, Path | None, Renewal]:
    """A usable ledger, where the old file went if it was damaged, and what an older form could not take along."""
    ledger = connect(location)
    try:
        ledger.check_file()
        return ledger, None, renew(ledger)
    except DamagedLedgerError:
        if ledger.file is None:
            raise
        moved_aside = _move_aside(ledger.file)
    ledger = connect(location)
    ledger.create_tables()
    return ledger, moved_aside, Renewal()


def _move_aside(file: Path) -> Path:
    """Rename a database file and what SQLite keeps beside it."""
    target = file.with_name(f"{file.name}.damaged-{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}")
    for suffix in ("-wal", "-shm", ""):
        source = file.with_name(file.name + suffix)
        if source.exists():
            source.replace(target.with_name(target.name + suffix))
    return target


# ---------------------------------------------------------------- rows


def _replace_runs(connection: Connection, all_rows: Sequence[RunRows]) -> None:
    """Insert runs in place of what the ledger has of them. Of copies of one run the last is kept."""
    by_id = {rows.run["id"]: rows for rows in all_rows}
    here = host()
    paths = {rows.run["path"] for rows in by_id.values()}
    # A path may have held another run before: its folder was cleared and used again.
    stale = connection.execute(
        select(runs_table.c.id).where(runs_table.c.host == here, runs_table.c.path.in_(paths))
    ).scalars()
    _delete_runs(connection, {*by_id, *stale})
    _insert(connection, runs_table, [{**rows.run, "host": here} for rows in by_id.values()])
    for table in RUN_PARTS:
        _insert(
            connection,
            table,
            [
                {**row, "run": identity}
                for identity, rows in by_id.items()
                for row in {"cases": rows.cases, "comparisons": rows.comparisons, "timings": rows.timings}[
                    table.name
                ]
            ],
        )


def _delete_runs(connection: Connection, identities: Iterable[str]) -> None:
    wanted = sorted(identities)
    for start in range(0, len(wanted), _BATCH):
        part = wanted[start : start + _BATCH]
        for table in RUN_PARTS:
            connection.execute(delete(table).where(table.c.run.in_(part)))
        connection.execute(delete(runs_table).where(runs_table.c.id.in_(part)))


def _replace_sessions(connection: Connection, all_rows: Sequence[SessionRows]) -> None:
    by_id = {rows.session["id"]: rows for rows in all_rows}
    for identity in sorted(by_id):
        connection.execute(delete(checkpoints).where(checkpoints.c.session == identity))
        connection.execute(delete(sessions).where(sessions.c.id == identity))
    _insert(connection, sessions, [{**rows.session, "host": host()} for rows in by_id.values()])
    _insert(
        connection,
        checkpoints,
        [{**row, "session": identity} for identity, rows in by_id.items() for row in rows.checkpoints],
    )


def _replace_starts(connection: Connection) -> None:
    all_starts = starts.load()
    here = host()
    connection.execute(delete(machine_starts).where(machine_starts.c.host == here))
    rows = [{**asdict(start), "outcome": start.outcome.value, "host": here} for start in all_starts]
    for row in rows:
        del row["provider_start"]  # it is for asking the provider, and the journal has it
    _insert(connection, machine_starts, rows)


def _insert(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    if rows:
        connection.execute(insert(table), list(rows))


def _forget_missing(connection: Connection) -> int:
    """Delete what this machine recorded and whose folder is gone; how many runs and sessions."""
    here = host()
    gone_runs = [
        row.id
        for row in connection.execute(
            select(runs_table.c.id, runs_table.c.path).where(runs_table.c.host == here)
        )
        if not (Path(row.path) / runs.MANIFEST).exists()
    ]
    _delete_runs(connection, gone_runs)
    gone_sessions = [
        row.id
        for row in connection.execute(select(sessions.c.id, sessions.c.path).where(sessions.c.host == here))
        if not is_session(Path(row.path))
    ]
    for identity in gone_sessions:
        connection.execute(delete(checkpoints).where(checkpoints.c.session == identity))
        connection.execute(delete(sessions).where(sessions.c.id == identity))
    return len(gone_runs) + len(gone_sessions)


# ---------------------------------------------------------------- meta


def _known_folders(connection: Connection) -> tuple[Path, ...]:
    """Runs and sessions that this machine recorded."""
    paths: list[str] = []
    for table in (runs_table, sessions):
        paths += connection.execute(select(table.c.path).where(table.c.host == host())).scalars()
    return tuple(map(Path, paths))


def _unique(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple({real_path(path): path for path in paths}.values())


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
