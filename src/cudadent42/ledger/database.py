"""The ledger's database: opening it, transactions that survive other writers, and errors in words.

Readers never wait, writers wait for each other: SQLite runs in WAL mode, and on PostgreSQL a lock that belongs to the
transaction lets in one at a time, so that two cannot wait for each other's rows. Every change is one transaction, so a
process that is killed at any point leaves the ledger as it was before or after it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Inspector,
    Table,
    create_engine,
    event,
    insert,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from cudadent42.base.errors import UsageError
from cudadent42.base.folders import make_private
from cudadent42.ledger.schema import SCHEMA_VERSION, VERSION_KEY, meta, metadata
from flashmoe_science.jit.requirements import install_command

T = TypeVar("T")

BUSY_TIMEOUT_S = 15.0
"""How long a writer waits for the others. A transaction of a rebuild takes a fraction of a second."""

WRITERS_LOCK = 0x6C65646765723432
"""The key of PostgreSQL's advisory lock that a writing transaction holds: "ledger42" in ASCII. A server tells the locks
of its databases apart."""

_ATTEMPTS = 6
"""Of a transaction that the database ended for the sake of another one: programs that do not take `WRITERS_LOCK` may
insert the same keys, or lock rows in another order."""
_FIRST_PAUSE_S = 0.05
"""The longest pause before the second attempt; doubled for each further one. The pause is drawn at random below it, so
that two who met do not meet again."""

_POSTGRESQL = "postgresql"
_WRITING = "ledger_writing"
_CONNECT_TIMEOUT_S = 10

_GAVE_WAY = ("40001", "40P01")
"""SQLSTATE of a serialization failure and of a deadlock."""

_DAMAGED = ("malformed", "not a database", "encrypted")
_INCOMPLETE = ("no such table", "no such column", "has no column", "UndefinedTable", "UndefinedColumn")
_REMEDY = "nothing that was measured is lost: `cudadent42 ledger rebuild` makes it again from the run folders"
_LOCKED = ("locked", "busy", "LockNotAvailable")

_UNREADABLE = (
    "the ledger's URL cannot be read; expected a path or a URL such as postgresql://user@host/name, in which the "
    "letters @ : / ? # ; = of a name or a password are written as %40 %3A %2F %3F %23 %3B %3D"
)
_BRACKETS_AND_COLON = frozenset("[]:")
"""In a user's name: an address of IPv6 that was cut at the wrong place, or a password."""
_HOST = re.compile(r"[\w.:%-]*")
_SEPARATORS = frozenset("@?#;=")
"""In a database's name: the rest of a password that holds one of them, or options of another kind of URL."""


class LedgerError(UsageError):
    """The ledger cannot be used; the message says what to do."""


class DamagedLedgerError(LedgerError):
    """It is not readable as a ledger, or of an older form. A rebuild mends it."""


class _GaveWayError(Exception):
    """The database ended this transaction, because of what another one did."""


class Ledger:
    """An open ledger. Nothing is connected between two transactions."""

    def __init__(self, engine: Engine, name: str, file: Path | None) -> None:
        self.name = name
        """The path, or the URL without its password."""
        self.file = file
        """Of SQLite."""
        self._engine = engine

    def write(self, work: Callable[[Connection], T]) -> T:
        """``work`` in one transaction, again where it had to give way to another writer's. Raises LedgerError."""
        return self._transact(work, writing=True)

    def read(self, work: Callable[[Connection], T]) -> T:
        """``work`` in one transaction that sees a single state. Raises LedgerError."""
        return self._transact(work, writing=False)

    def _transact(self, work: Callable[[Connection], T], writing: bool) -> T:
        attempt = 1
        while True:
            try:
                with self._told(), self._connect(writing) as connection, connection.begin():
                    return work(connection)
            except _GaveWayError as error:
                if attempt == _ATTEMPTS:
                    raise LedgerError(
                        f"the ledger {self.name} is changed by others all the time: {_ATTEMPTS} attempts had to give "
                        f"way, the last with: {error}; try again"
                    ) from error
            time.sleep(random.uniform(0, _FIRST_PAUSE_S * 2 ** (attempt - 1)))
            attempt += 1

    def check(self) -> None:
        """Raises DamagedLedgerError unless the database is whole: by its own check, and with every table and column."""
        missing = self.read(missing_part)
        if missing:
            raise self._damaged(f"it lacks {missing}")
        self.check_file()

    def check_file(self) -> None:
        """Raises DamagedLedgerError where SQLite finds its file damaged. Servers see to that themselves."""
        if self.file is None:
            return
        rows = self.read(
            lambda connection: connection.exec_driver_sql("PRAGMA quick_check(1)").scalars().all()
        )
        if rows != ["ok"]:
            raise self._damaged(str(rows[0]) if rows else "no answer")

    def create_tables(self) -> None:
        """Make the tables, unless they are there."""

        def make(connection: Connection) -> None:
            self.refuse_foreign(connection)
            metadata.create_all(connection)
            if version_of(connection) is None:
                connection.execute(insert(meta).values(key=VERSION_KEY, value=str(SCHEMA_VERSION)))

        self.write(make)

    def require_version(self) -> None:
        """Raises LedgerError for a ledger of a newer program, DamagedLedgerError for one of an older or none."""
        version = self.read(version_of)
        if version is None:
            raise self._damaged("it has no schema version")
        self.refuse_newer(version)
        if version < SCHEMA_VERSION:
            raise DamagedLedgerError(
                f"the ledger {self.name} is of an older form (schema {version}; this one writes {SCHEMA_VERSION}); "
                f"{_REMEDY}"
            )

    def refuse_newer(self, version: int | None) -> None:
        """Raises LedgerError for the version of a newer program."""
        if version is not None and version > SCHEMA_VERSION:
            raise LedgerError(
                f"the ledger {self.name} was written by a newer cudadent42 (schema {version}; this one knows "
                f"{SCHEMA_VERSION}): upgrade it, or name another ledger with --ledger"
            )

    def refuse_foreign(self, connection: Connection) -> None:
        """Raises LedgerError where another program's tables have the names of the ledger's."""
        inspector = sqlalchemy.inspect(connection)
        if inspector.has_table(meta.name):
            return
        for table in metadata.sorted_tables:
            if inspector.has_table(table.name) and _lacking(inspector, table):
                raise LedgerError(
                    f"{self.name} is no ledger, and its table {table.name!r} is in the way; name another database with "
                    "--ledger or CUDADENT42_LEDGER"
                )

    def is_empty(self) -> bool:
        """Whether it has no tables yet."""
        return self.read(lambda connection: not sqlalchemy.inspect(connection).has_table(meta.name))

    @contextlib.contextmanager
    def _connect(self, writing: bool) -> Iterator[Connection]:
        options: dict[str, Any] = {_WRITING: writing}
        if self._engine.dialect.name == _POSTGRESQL:
            # Whatever the server's default is: a writer must see what was written while it waited for its turn.
            options["isolation_level"] = "READ COMMITTED" if writing else "REPEATABLE READ"
        with self._engine.connect() as connection:
            yield connection.execution_options(**options)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """The database's errors as LedgerError, or as _GaveWayError those that another attempt may not meet."""
        try:
            yield
        except DBAPIError as error:
            reason = " ".join(str(error.orig).split())
            if isinstance(error, IntegrityError) or getattr(error.orig, "sqlstate", None) in _GAVE_WAY:
                raise _GaveWayError(reason) from error
            kind = f"{type(error.orig).__name__}: {reason}"
            if any(word in kind for word in (*_DAMAGED, *_INCOMPLETE)):
                raise self._damaged(reason) from error
            if any(word in kind for word in _LOCKED):
                raise LedgerError(
                    f"the ledger {self.name} is held by another process for more than {BUSY_TIMEOUT_S:.0f} s; "
                    "try again"
                ) from error
            raise LedgerError(
                f"the ledger {self.name} cannot be used: {reason}; mend that, or name another with --ledger or "
                "CUDADENT42_LEDGER"
            ) from error
        except sqlite3.DatabaseError as error:  # of setting a connection up, which SQLAlchemy does not wrap
            raise self._damaged(str(error)) from error
        except SQLAlchemyError as error:
            raise LedgerError(f"the ledger {self.name} cannot be used: {error}") from error

    def _damaged(self, reason: str) -> DamagedLedgerError:
        return DamagedLedgerError(f"the ledger {self.name} is damaged ({reason}); {_REMEDY}")


def connect(location: Path | str) -> Ledger:
    """The ledger at a path or URL; a missing SQLite file is made, empty, for this user alone.

    Raises LedgerError where the URL means nothing or its driver is missing.
    """
    url = _url(location)
    file = _file(url)
    if file is not None:
        _make_file(file)
    name = name_of(url)
    arguments: dict[str, Any] = {}
    if file is not None:
        arguments["timeout"] = BUSY_TIMEOUT_S
    elif url.get_backend_name() == _POSTGRESQL:
        arguments["connect_timeout"] = _CONNECT_TIMEOUT_S
    try:
        engine = create_engine(url, poolclass=NullPool, connect_args=arguments)
    except NoSuchModuleError as error:
        raise LedgerError(
            f"no database is called {url.drivername!r}; expected a path or a URL such as postgresql://user@host/name"
        ) from error
    except ModuleNotFoundError as error:
        extra = install_command("postgres") if "psycopg" in str(error) else f"install {error.name}"
        raise LedgerError(f"the ledger {name} needs the Python package {error.name}: {extra}") from error
    if file is not None:
        event.listen(engine, "connect", _set_up)
        event.listen(engine, "begin", _begin)
    elif engine.dialect.name == _POSTGRESQL:
        event.listen(engine, "begin", _await_turn)
    return Ledger(engine, name, file)


def exists(location: Path | str) -> bool:
    """Whether there may be a ledger: of a file, whether it is there; a server has to be asked."""
    file = _file(_url(location))
    return file is None or file.exists()


def _url(location: Path | str) -> URL:
    if isinstance(location, Path):
        return URL.create("sqlite", database=str(location))
    try:
        url = make_url(location)
    except (ArgumentError, ValueError) as error:
        raise LedgerError(_UNREADABLE) from error
    if url.get_backend_name() != "sqlite" and not _well_formed(url):
        raise LedgerError(_UNREADABLE)
    # Without a driver SQLAlchemy 2.0 would take psycopg2.
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgresql", "postgres") else url


def _well_formed(url: URL) -> bool:
    """Whether no part of a password can have got into what is shown."""
    return (
        not _BRACKETS_AND_COLON.intersection(url.username or "")
        and _HOST.fullmatch(url.host or "") is not None
        and not _SEPARATORS.intersection(url.database or "")
    )


def name_of(location: Path | str | URL) -> str:
    """A ledger for a user's eyes: its file, or its URL without password and query, where passwords may stand too."""
    url = location if isinstance(location, URL) else _url(location)
    file = _file(url)
    return str(file) if file is not None else url.set(query={}).render_as_string(hide_password=True)


def _file(url: URL) -> Path | None:
    if url.get_backend_name() != "sqlite":
        return None
    if not url.database or url.database == ":memory:":
        raise LedgerError(
            "the ledger's URL names no file; expected a path, or sqlite:////path/to/ledger.sqlite"
        )
    return Path(url.database).absolute()


def _make_file(path: Path) -> None:
    """SQLite gives its side files the permissions of this one."""
    if not path.parent.exists():
        make_private(path.parent)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise LedgerError(
            f"cannot open the ledger {path}: {error.strerror}; name another with --ledger or CUDADENT42_LEDGER"
        ) from error


def _set_up(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin` says
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
        if cursor.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            # Whoever loses this race finds it done; a file system without shared memory keeps the old mode.
            with contextlib.suppress(sqlite3.OperationalError):
                cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
    finally:
        cursor.close()


def _begin(connection: Connection) -> None:
    writing = connection.get_execution_options().get(_WRITING, False)
    # A writer that began as a reader could not wait for the others.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


def _await_turn(connection: Connection) -> None:
    """PostgreSQL: a writer waits for the others before it touches anything; the lock goes with its transaction."""
    if connection.get_execution_options().get(_WRITING, False):
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(BUSY_TIMEOUT_S * 1000)}")  # ms
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITERS_LOCK})")


def missing_part(connection: Connection) -> str:
    """The first table or column that is not there; empty where all are."""
    inspector = sqlalchemy.inspect(connection)
    for table in metadata.sorted_tables:
        if not inspector.has_table(table.name):
            return f"the table {table.name}"
        if lacking := _lacking(inspector, table):
            return f"the column {table.name}.{lacking}"
    return ""


def _lacking(inspector: Inspector, table: Table) -> str:
    """The first column of a table that is not there; empty where all are."""
    columns = {column["name"] for column in inspector.get_columns(table.name)}
    return next((column.name for column in table.columns if column.name not in columns), "")


def version_of(connection: Connection) -> int | None:
    """The schema's version; None where none is told."""
    if not sqlalchemy.inspect(connection).has_table(meta.name):
        return None
    everything = select(sqlalchemy.text("*")).select_from(meta)  # a damaged table may lack either column
    values = {
        row.get(meta.c.key.name): row.get(meta.c.value.name)
        for row in connection.execute(everything).mappings()
    }
    text = values.get(VERSION_KEY)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
