"""Bringing a ledger of an older form, or one that lacks tables or columns, to the present form, in one transaction.

A ledger on a server belongs to several machines, of which each can make only its own rows anew. So rows are taken over,
all that the present form has values for; tables with other rows stay, renamed, until the machines have rebuilt theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import sqlalchemy
from sqlalchemy import Column, ColumnElement, Connection, MetaData, Table, delete, func, insert, null, select
from sqlalchemy.exc import DataError, IntegrityError

from cudadent42.base.reading import parse_json
from cudadent42.ledger.database import Ledger, missing_part, version_of
from cudadent42.ledger.remembered import host
from cudadent42.ledger.schema import (
    REBUILD_ON_KEY,
    REBUILDING_KEY,
    SCHEMA_VERSION,
    VERSION_KEY,
    comparisons,
    meta,
    metadata,
    runs,
)

Old = Mapping[str, Table]
"""The tables that were found, renamed, by the names of the present ones."""

_HOST = "host"


@dataclass(frozen=True)
class Renewal:
    """What became of rows that the present form had no values for."""

    kept_tables: tuple[str, ...] = ()
    """Old tables that hold them, by the names that they have now."""
    rebuild_on: tuple[str, ...] = ()
    """The other machines that recorded them, and have their folders."""


def renew(ledger: Ledger) -> Renewal:
    """Make the tables, or bring those that there are to the present form; what is whole stays untouched.

    Raises LedgerError, and leaves all as it was, for a ledger of a newer program, another program's database, or one
    that cannot be written.
    """

    def work(connection: Connection) -> Renewal:
        ledger.refuse_foreign(connection)
        version = version_of(connection)
        ledger.refuse_newer(version)
        if version == SCHEMA_VERSION and not missing_part(connection):
            return Renewal()
        return _renew(connection)

    return ledger.write(work)


def set_meta(connection: Connection, key: str, value: str) -> None:
    connection.execute(delete(meta).where(meta.c.key == key))
    connection.execute(insert(meta).values(key=key, value=value))


def machines_to_rebuild_on(connection: Connection) -> tuple[str, ...]:
    """Those of which rows are missing since the ledger was brought to the present form."""
    return _names(connection.execute(select(meta.c.value).where(meta.c.key == REBUILD_ON_KEY)).scalar())


def _names(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(parse_json(text or "[]"))
    except (ValueError, TypeError):  # somebody's hand; a reminder is no reason to fail
        return ()


def note_renewed(connection: Connection, waiting: set[str]) -> None:
    """The form is the present one; a rebuild has to follow here, and on the ``waiting`` machines."""
    set_meta(connection, VERSION_KEY, str(SCHEMA_VERSION))
    set_meta(connection, REBUILDING_KEY, datetime.now(timezone.utc).isoformat(timespec="seconds"))
    if waiting:
        set_meta(connection, REBUILD_ON_KEY, json.dumps(sorted(waiting)))


def note_rebuilt(connection: Connection) -> None:
    """This machine's rows are all there again."""
    left = [name for name in machines_to_rebuild_on(connection) if name != host()]
    if left:
        set_meta(connection, REBUILD_ON_KEY, json.dumps(left))
    else:
        connection.execute(delete(meta).where(meta.c.key == REBUILD_ON_KEY))


def _renew(connection: Connection) -> Renewal:
    old = _rename(connection)
    metadata.create_all(connection)
    machines = _machines(connection, old)
    others = tuple(sorted(machines - {host()}))
    left_behind = [
        table
        for table in metadata.sorted_tables
        if table is not meta and old and not _take_over(connection, table, old)
    ]
    note_renewed(connection, {*_waiting(connection, old), *(others if left_behind else ())})
    kept = []
    for name, table in old.items():
        is_only_ours = bool(machines) and not others
        if name in {behind.name for behind in left_behind} and not is_only_ours and _count(connection, table):
            kept.append(table.name)
        else:
            table.drop(connection)
    return Renewal(tuple(kept), others if left_behind else ())


def _rename(connection: Connection) -> dict[str, Table]:
    """Give the tables that there are other names; their indexes go, whose names the new ones need."""
    inspector = sqlalchemy.inspect(connection)
    present = [table.name for table in metadata.sorted_tables if inspector.has_table(table.name)]
    stamp = f"{datetime.now(timezone.utc):%Y%m%dt%H%M%S%f}"
    quote = connection.dialect.identifier_preparer.quote
    tables = {}
    for name in present:
        for index in Table(name, MetaData(), autoload_with=connection).indexes:
            index.drop(connection)
        renamed = f"{name}_kept_{stamp}"
        connection.exec_driver_sql(f"ALTER TABLE {quote(name)} RENAME TO {quote(renamed)}")
        tables[name] = Table(renamed, MetaData(), autoload_with=connection)
    return tables


def _take_over(connection: Connection, table: Table, old: Old) -> bool:
    """Copy all rows of a table; False, and nothing is copied, where the present form lacks values for them."""
    source = old.get(table.name)
    if source is None:
        return False
    expressions = {column.name: _value(column, source, old) for column in table.columns}
    values = {name: value for name, value in expressions.items() if value is not None}
    if len(values) < len(expressions):
        return _count(connection, source) == 0
    try:
        with connection.begin_nested():
            connection.execute(insert(table).from_select(list(values), select(*values.values())))
    except (IntegrityError, DataError):  # what the older form allowed, and this one does not
        return False
    return True


def _value(column: Column[Any], source: Table, old: Old) -> ColumnElement[Any] | None:
    """What a column gets from the old table; None where nothing tells."""
    if column.name in source.c:
        return source.c[column.name]
    if column.nullable:
        return null()
    later = _LATER_COLUMNS.get((column.table.name, column.name))
    return None if later is None else later(source, old)


def _run_revision(source: Table, old: Old) -> ColumnElement[Any] | None:
    """Of a comparison: its run's, as it was before implementations had a revision of their own."""
    of_run = old.get(runs.name)
    if of_run is None or not {"id", "revision"} <= set(of_run.c.keys()) or "run" not in source.c:
        return None
    revision = select(of_run.c.revision).where(of_run.c.id == source.c.run).scalar_subquery()
    return func.coalesce(revision, "")


_LATER_COLUMNS: dict[tuple[str, str], Callable[[Table, Old], ColumnElement[Any] | None]] = {
    (comparisons.name, "revision"): _run_revision,  # since version 2
}
"""Columns that must have a value and that older forms lack: what their rows get."""


def _machines(connection: Connection, old: Old) -> set[str]:
    """All that recorded something, as far as the old tables tell."""
    return {
        name
        for table in old.values()
        if _HOST in table.c
        for name in connection.execute(select(table.c[_HOST]).distinct()).scalars()
        if name is not None
    }


def _waiting(connection: Connection, old: Old) -> set[str]:
    """Machines that have not rebuilt since an earlier renewal."""
    source = old.get(meta.name)
    if source is None or not {"key", "value"} <= set(source.c.keys()):
        return set()
    return set(
        _names(connection.execute(select(source.c.value).where(source.c.key == REBUILD_ON_KEY)).scalar())
    )


def _count(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())
