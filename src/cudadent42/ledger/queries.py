"""What is asked of the ledger, as records. No SQL but here, in `store` and in `renewal`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, and_, case, func, select

from cudadent42.ledger.renewal import machines_to_rebuild_on
from cudadent42.ledger.schema import (
    REBUILDING_KEY,
    cases,
    comparisons,
    machine_starts,
    meta,
    metadata,
    runs,
    sessions,
)
from cudadent42.model.history import Point
from cudadent42.model.records import Verdict

_CANDIDATE = "candidate"


@dataclass(frozen=True)
class RunLine:
    """One run. Times are UTC, ISO 8601; what a run did not get as far as is None."""

    id: str
    started: str
    status: str
    suite: str
    device: str
    machine: str
    revision: str
    candidate: str | None
    speedup: float | None
    ci_low: float | None
    ci_high: float | None
    verdict: str | None
    verified: bool | None
    samples: int
    seconds: float | None
    rate: str
    session: str | None
    host: str
    path: str


@dataclass(frozen=True)
class Contents:
    """How much there is."""

    rows: dict[str, int]
    """By table."""
    samples: int
    first: str | None
    last: str | None
    """When the first and the last run began."""
    unfinished_rebuild: str | None
    """When a rebuild began that has not ended."""
    rebuild_on: tuple[str, ...]
    """Machines of which rows are missing until the ledger is rebuilt there."""


@dataclass(frozen=True)
class SessionLine:
    """One session, and what its runs came to."""

    id: str
    name: str
    status: str
    started: str
    seconds: float | None
    rate: str
    runs: int
    results: int
    """Runs that finished, with everything verified."""
    decided: int
    """Comparisons that said faster, slower or equal."""
    undecided: int


@dataclass(frozen=True)
class RunCost:
    """What a run outside of sessions cost and came to; fields as of `SessionLine`."""

    started: str
    seconds: float | None
    rate: str
    results: int
    decided: int
    undecided: int


@dataclass(frozen=True)
class StartLine:
    """One start of a machine."""

    machine: str
    rate: str
    session: str | None
    requested: str
    ready: str | None
    ended: str | None
    outcome: str


def list_runs(connection: Connection, limit: int) -> list[RunLine]:
    """The last runs, the latest first."""
    query = select(*(runs.c[name] for name in RunLine.__dataclass_fields__)).order_by(
        runs.c.started.desc(), runs.c.id
    )
    return [RunLine(**row) for row in _rows(connection, query.limit(limit))]


def contents(connection: Connection) -> Contents:
    rows = {
        table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
        for table in metadata.sorted_tables
        if table is not meta
    }
    samples, first, last = connection.execute(
        select(func.coalesce(func.sum(runs.c.samples), 0), func.min(runs.c.started), func.max(runs.c.started))
    ).one()
    unfinished = connection.execute(select(meta.c.value).where(meta.c.key == REBUILDING_KEY)).scalar()
    waiting = machines_to_rebuild_on(connection)
    return Contents(dict(sorted(rows.items())), int(samples), first, last, unfinished, waiting)


def session_lines(connection: Connection) -> list[SessionLine]:
    """All sessions, in the order of their beginning."""
    tallies: dict[str, list[RunCost]] = {}
    for session, cost in _run_costs(connection):
        if session is not None:
            tallies.setdefault(session, []).append(cost)
    names = ("id", "name", "status", "started", "seconds", "rate")
    query = select(*(sessions.c[name] for name in names)).order_by(sessions.c.started, sessions.c.id)
    lines = []
    for row in _rows(connection, query):
        own = tallies.get(row["id"], [])
        lines.append(
            SessionLine(
                **row,
                runs=len(own),
                results=sum(cost.results for cost in own),
                decided=sum(cost.decided for cost in own),
                undecided=sum(cost.undecided for cost in own),
            )
        )
    return lines


def runs_outside_sessions(connection: Connection) -> list[RunCost]:
    """Those of no session, or of one that the ledger does not have."""
    session_ids = set(connection.execute(select(sessions.c.id)).scalars())
    return [cost for session, cost in _run_costs(connection) if session is None or session not in session_ids]


def start_lines(connection: Connection) -> list[StartLine]:
    """All starts of machines, in the order in which they were asked for."""
    query = select(*(machine_starts.c[name] for name in StartLine.__dataclass_fields__))
    return [StartLine(**row) for row in _rows(connection, query.order_by(machine_starts.c.requested))]


def known_cases(connection: Connection) -> list[tuple[str, int]]:
    """The name of every case that was compared, with the number of runs that did."""
    query = (
        select(comparisons.c.name, func.count(comparisons.c.run.distinct()))
        .where(comparisons.c.role == _CANDIDATE)
        .group_by(comparisons.c.name)
        .order_by(comparisons.c.name)
    )
    return [(name, count) for name, count in connection.execute(query)]


def history(connection: Connection, name: str, dtype: str | None, implementation: str | None) -> list[Point]:
    """A case's comparisons in the order of time: of the candidates, or of the named implementation."""
    of_run = ("started", "path", "machine", "summary", "timer", "cache")
    of_comparison = (
        *("name", "dtype", "implementation", "baseline", "revision"),
        *("speedup", "ci_low", "ci_high", "verdict", "latency_ms"),
    )
    query = (
        select(
            runs.c.id.label("run"),
            *(runs.c[column] for column in of_run),
            *(comparisons.c[column] for column in of_comparison),
            cases.c.shape,
        )
        .join(runs, runs.c.id == comparisons.c.run)
        .join(
            cases,
            and_(
                cases.c.run == comparisons.c.run,
                cases.c.name == comparisons.c.name,
                cases.c.dtype == comparisons.c.dtype,
            ),
        )
        .where(comparisons.c.name == name, comparisons.c.speedup.is_not(None))
        .order_by(runs.c.started, comparisons.c.dtype, comparisons.c.implementation)
    )
    if dtype is not None:
        query = query.where(comparisons.c.dtype == dtype)
    if implementation is None:
        query = query.where(comparisons.c.role == _CANDIDATE)
    else:
        query = query.where(comparisons.c.implementation == implementation)
    return [Point(**row) for row in _rows(connection, query)]


def _run_costs(connection: Connection) -> list[tuple[str | None, RunCost]]:
    """Every run's session and cost."""
    counted = (
        select(
            comparisons.c.run,
            func.count().label("all"),
            func.sum(_one_if(comparisons.c.verdict == Verdict.UNDECIDED.value)).label("undecided"),
        )
        .where(comparisons.c.role == _CANDIDATE)
        .group_by(comparisons.c.run)
        .subquery()
    )
    query = select(
        runs.c.session,
        runs.c.started,
        runs.c.seconds,
        runs.c.rate,
        runs.c.status,
        runs.c.verified,
        func.coalesce(counted.c.all, 0).label("all"),
        func.coalesce(counted.c.undecided, 0).label("undecided"),
    ).outerjoin(counted, counted.c.run == runs.c.id)
    costs = []
    for row in connection.execute(query.order_by(runs.c.started, runs.c.id)).mappings():
        undecided = int(row["undecided"])
        cost = RunCost(
            started=row["started"],
            seconds=row["seconds"],
            rate=row["rate"],
            results=int(row["status"] == "finished" and row["verified"] is True),
            decided=int(row["all"]) - undecided,
            undecided=undecided,
        )
        costs.append((row["session"], cost))
    return costs


def _one_if(condition: Any) -> Any:
    return case((condition, 1), else_=0)


def _rows(connection: Connection, query: Select[Any]) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(query).mappings()]
