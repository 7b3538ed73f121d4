"""What was spent and what came of it: minutes, money, results and verdicts, by session."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from cudadent42.base.errors import LabError
from cudadent42.cost.rates import LOCAL, Rates, Restart
from cudadent42.ledger import open_for_reading
from cudadent42.runs.starts import StartOutcome

if TYPE_CHECKING:
    from cudadent42.ledger.queries import RunCost, SessionLine, StartLine

OUTSIDE = "runs outside sessions"
MACHINES = "machines outside sessions"

_S_PER_HOUR = 3600.0
_S_PER_MINUTE = 60.0

Price = Callable[[str, float], float | None]
"""US dollars of so many seconds at a rate, by its name; None where the table has none."""


@dataclass(frozen=True)
class Account:
    """One line of the bill."""

    name: str
    started: str | None
    """UTC, ISO 8601; None for what has no single beginning."""
    rate: str
    """Of the machine; several by commas."""
    attempts: int
    """Runs that began, however they ended; of machines, starts."""
    minutes: float
    """That are paid for: without those of runs on a machine whose start is on the bill."""
    usd: float | None
    """None where the table has no rate of that name."""
    results: int
    """Runs that finished, with everything verified."""
    verdicts: int
    """Comparisons that said faster, slower or equal."""
    undecided: int

    @property
    def usd_per_verdict(self) -> float | None:
        """None without money or without a verdict."""
        return self.usd / self.verdicts if self.usd is not None and self.verdicts else None


@dataclass(frozen=True)
class Bill:
    accounts: tuple[Account, ...]
    total: Account
    notes: tuple[str, ...]
    """Unknown rates, machines that still run."""


def bill(
    sessions: Sequence[SessionLine],
    outside: Sequence[RunCost],
    starts: Sequence[StartLine],
    rates: Rates,
    now: datetime,
) -> Bill:
    """The accounts of sessions, of runs outside of them and of machines outside of them, with their sum.

    A session costs its machines from start to stop where starts are on record, else its own time from beginning to
    end: a rented machine is paid for between runs too. Runs outside sessions cost their own time, unless they ran on a
    machine whose start is on record, which is then on the bill itself. A failed start is taken to be billed.
    """
    notes: list[str] = []
    usd = _pricer(rates, notes)
    accounts = [
        _of_session(session, [start for start in starts if start.session == session.id], usd, now)
        for session in sessions
    ]
    session_ids = {session.id for session in sessions}
    free = [start for start in starts if start.session is None or start.session not in session_ids]
    if outside:
        paid = [run for run in outside if not any(_covers(start, run, now) for start in free)]
        accounts.append(_of_runs(outside, paid, usd))
    if free:
        accounts.append(_of_machines(free, usd, now))
    notes += [
        f"the machine {start.machine} has been running since {start.requested}, as far as is known"
        for start in starts
        if start.ended is None
    ]
    return Bill(tuple(accounts), _total(accounts), tuple(notes))


def _of_session(session: SessionLine, own: Sequence[StartLine], usd: Price, now: datetime) -> Account:
    """``own``: the starts of its machines."""
    seconds = sum(_start_seconds(start, now) for start in own) if own else session.seconds or 0.0
    money = (
        [usd(start.rate, _start_seconds(start, now)) for start in own]
        if own
        else [usd(session.rate, seconds)]
    )
    return Account(
        name=session.name,
        started=session.started,
        rate=_joined(start.rate for start in own) if own else session.rate,
        attempts=session.runs,
        minutes=seconds / _S_PER_MINUTE,
        usd=_sum(money),
        results=session.results,
        verdicts=session.decided,
        undecided=session.undecided,
    )


def _of_runs(outside: Sequence[RunCost], paid: Sequence[RunCost], usd: Price) -> Account:
    """``paid``: those of them that are on no machine's account."""
    return Account(
        name=OUTSIDE,
        started=None,
        rate=_joined(run.rate for run in outside),
        attempts=len(outside),
        minutes=sum(run.seconds or 0.0 for run in paid) / _S_PER_MINUTE,
        usd=_sum([usd(run.rate, run.seconds or 0.0) for run in paid]),
        results=sum(run.results for run in outside),
        verdicts=sum(run.decided for run in outside),
        undecided=sum(run.undecided for run in outside),
    )


def _of_machines(free: Sequence[StartLine], usd: Price, now: datetime) -> Account:
    return Account(
        name=MACHINES,
        started=None,
        rate=_joined(start.rate for start in free),
        attempts=len(free),
        minutes=sum(_start_seconds(start, now) for start in free) / _S_PER_MINUTE,
        usd=_sum([usd(start.rate, _start_seconds(start, now)) for start in free]),
        results=0,
        verdicts=0,
        undecided=0,
    )


_MIN_STARTS = 3
"""Starts on record from which on they are believed more than an assumption."""


class Start(Protocol):
    """A start on record, in the ledger or in its journal."""

    @property
    def rate(self) -> str: ...
    @property
    def requested(self) -> str: ...
    @property
    def ready(self) -> str | None: ...
    @property
    def ended(self) -> str | None: ...
    @property
    def outcome(self) -> str: ...


def restart_by_ledger(rate: str, assumed: Restart, named: str | None = None) -> Restart:
    """`restart_on_record` of the starts in the ledger; ``assumed`` where there is none that can be used.

    ``named`` is a path or URL instead of the configured one, which has to be there: raises LabError.
    """
    try:
        opened = open_for_reading(named)
        from cudadent42.ledger import queries

        starts = opened.read(queries.start_lines)
    except LabError:
        if named is not None:
            raise
        return assumed
    return restart_on_record(starts, rate, assumed)


def restart_on_record(starts: Sequence[Start], rate: str, assumed: Restart) -> Restart:
    """What restarts of machines with that rate took so far, or ``assumed`` where too few are on record.

    The failure rate is Laplace's, (failures + 1) / (starts + 2), which is neither 0 nor 1 for a short record.
    """
    ready = [start for start in starts if start.rate == rate and start.ready is not None]
    failed = [
        start
        for start in starts
        if start.rate == rate and start.ready is None and start.outcome == StartOutcome.FAILED.value
    ]
    count = len(ready) + len(failed)
    if count < _MIN_STARTS or not ready:
        return assumed
    return Restart(
        minutes=fmean(_minutes(start.requested, start.ready) for start in ready),
        failure_rate=(len(failed) + 1) / (count + 2),
        failure_minutes=(
            fmean(_minutes(start.requested, start.ended) for start in failed)
            if failed
            else assumed.failure_minutes
        ),
        basis=f"{count} starts of {rate} on record, {len(failed)} failed",
    )


def _minutes(begin: str, end: str | None) -> float:
    if end is None:
        return 0.0
    seconds = (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    return max(0.0, seconds) / _S_PER_MINUTE


def _total(accounts: Sequence[Account]) -> Account:
    return Account(
        name="total",
        started=None,
        rate="",
        attempts=sum(account.attempts for account in accounts if account.name != MACHINES),
        minutes=math.fsum(account.minutes for account in accounts),
        usd=_sum([account.usd for account in accounts]),
        results=sum(account.results for account in accounts),
        verdicts=sum(account.verdicts for account in accounts),
        undecided=sum(account.undecided for account in accounts),
    )


def _pricer(rates: Rates, notes: list[str]) -> Price:
    """Money for seconds at a rate; the first time that a rate is missing goes into the notes."""
    missing: set[str] = set()

    def usd(name: str, seconds: float) -> float | None:
        rate = rates.find(name)
        if rate is not None:
            return seconds / _S_PER_HOUR * rate.usd_per_hour
        if name not in missing:
            missing.add(name)
            notes.append(f"the table has no rate {name!r}; add it, see `cudadent42 cost rates`")
        return None

    return usd


def _sum(parts: Iterable[float | None]) -> float | None:
    """Of what is known; None where something is not."""
    summands = []
    for part in parts:
        if part is None:
            return None
        summands.append(part)
    return math.fsum(summands)


def _start_seconds(start: StartLine, now: datetime) -> float:
    """How long a machine was paid for; until now while its end is not on record."""
    end = now if start.ended is None else datetime.fromisoformat(start.ended)
    return max(0.0, (end - datetime.fromisoformat(start.requested)).total_seconds())


def _covers(start: StartLine, run: RunCost, now: datetime) -> bool:
    """Whether a run happened on the machine of that start, by rate and time."""
    end = now if start.ended is None else datetime.fromisoformat(start.ended)
    began = datetime.fromisoformat(run.started)
    same = start.rate == run.rate and run.rate != LOCAL
    return same and datetime.fromisoformat(start.requested) <= began <= end


def _joined(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
