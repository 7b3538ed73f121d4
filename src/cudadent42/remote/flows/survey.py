"""The machines that were started from here and may still cost something.

The journal of starts has what is believed, the provider what is true. Where they differ the journal is corrected, with
the time that the provider gives. What the provider cannot be asked about goes on being believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cudadent42.cost.rates import Rates
from cudadent42.remote.core import record
from cudadent42.remote.core.provider import Machine
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.status import ENDED, Corrected, Status, correct
from cudadent42.remote.providers import machine_of
from cudadent42.runs import starts
from cudadent42.runs.starts import MachineStart, StartOutcome

AT_ONCE = 8
"""Questions and orders to a provider."""

LOST_IS_ASKED = timedelta(days=7)
"""A machine that was lost is asked about for so long after: the answer may have been wrong, and the provider restarts
by itself what a host's error ended, for which it waits up to seven days where there are local SSDs. After that only a
person starts it, and then it is theirs; to ask about every machine that was ever lost would take longer each month."""


@dataclass(frozen=True)
class Started:
    """A machine that may still cost something."""

    start: MachineStart
    machine: Machine | None
    """None where the journal names one of no provider that is known here."""
    state: MachineState | None
    """None where it could not be asked."""
    problem: str
    """Why it could not be asked, or what is to be known besides; empty for nothing."""
    jobs: tuple[JobRecord, ...]
    """Runs there that were not brought back yet."""
    after: str
    """What was to become of it after the run: stop, keep or keep:MINUTES; empty where no run is on record."""
    minutes: float
    """That it has been paid for."""
    usd: float | None
    """None where the table has no such rate."""

    def attach_command(self, job: str) -> str:
        """What brings a run back from it, for a user to type; one that is off is started for that."""
        off = self.state is not None and not self.state.costs
        return self.machine.attach_command(job) if self.machine and off else f"cudadent42 remote attach {job}"

    @property
    def word(self) -> str:
        """How it is, for a reader."""
        if self.state is None:
            return "not known"
        if not self.state.costs and self.start.ended is None:
            return "asked for"
        return self.state.value


@dataclass(frozen=True)
class Survey:
    started: tuple[Started, ...]
    corrected: tuple[Corrected, ...]

    @property
    def usd(self) -> float | None:
        """Of all; None where something is not known."""
        priced = [each.usd for each in self.started if each.usd is not None]
        return sum(priced) if len(priced) == len(self.started) else None


def survey(table: Rates, now: datetime) -> Survey:
    """Ask the provider about every start on record that may still cost something, and correct the journal.

    Raises UsageError where the journal cannot be read. Where it cannot be written, that is said with the correction.
    """
    all_starts = starts.load()
    last = {start.machine: start for start in all_starts}
    believed = [
        start
        for start in all_starts
        if _may_cost(start) or (start is last[start.machine] and _may_come_back(start, now))
    ]
    latest = {start.machine: start for start in believed}
    corrected = [
        correct(
            start,
            StartOutcome.STOPPED,
            "it was started again",
            datetime.fromisoformat(latest[start.machine].requested),
        )
        for start in believed
        if start is not latest[start.machine] and start.ended is None
    ]
    jobs, _ = record.readable()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda start: _status(start, now), latest.values()))
    machines = []
    for start, answer in zip(latest.values(), answers, strict=True):
        if answer.corrected is not None:
            corrected.append(answer.corrected)
            start = _as_corrected(answer.corrected, now)
        if not answer.theirs and not _is_over(start, answer.state):
            machines.append(_started(start, answer, jobs, table, now))
    return Survey(tuple(machines), tuple(corrected))


def _status(start: MachineStart, now: datetime) -> Status:
    machine = machine_of(start)
    if machine is None:
        return Status(None, "no provider that is known here; end it yourself")
    return machine.status(start, now)


def _may_cost(start: MachineStart) -> bool:
    """It runs as far as is known; or its disk is there, which nobody else would delete."""
    if start.outcome in ENDED:
        machine = machine_of(start)
        return machine is not None and machine.fresh
    return start.outcome in (StartOutcome.REQUESTED, StartOutcome.READY)


def _may_come_back(start: MachineStart, now: datetime) -> bool:
    """It was lost, not long ago. One without a machine that is known here cannot be asked about."""
    if start.outcome is not StartOutcome.LOST or start.ended is None or machine_of(start) is None:
        return False
    return now - datetime.fromisoformat(start.ended) < LOST_IS_ASKED


def _is_over(start: MachineStart, state: MachineState | None) -> bool:
    """Nothing of it is left that could cost anything."""
    fresh = start.outcome in ENDED and _may_cost(start)
    return start.ended is not None and (state is MachineState.GONE or not fresh)


def _as_corrected(line: Corrected, now: datetime) -> MachineStart:
    current = next(each for each in starts.load() if each.id == line.start.id)
    if current.outcome is line.outcome:
        return current
    ended = None if line.outcome is StartOutcome.READY else current.ended or now.isoformat()
    return replace(current, outcome=line.outcome, ended=ended, reason=line.reason)


def _started(
    start: MachineStart,
    status: Status,
    jobs: Sequence[JobRecord],
    table: Rates,
    now: datetime,
) -> Started:
    machine = machine_of(start)
    here = [job for job in jobs if machine is not None and machine.ran(job, start)]
    end = now if start.ended is None else datetime.fromisoformat(start.ended)
    minutes = max(0.0, (end - datetime.fromisoformat(start.requested)).total_seconds()) / 60
    rate = table.find(start.rate)
    return Started(
        start,
        machine,
        status.state,
        status.problem,
        tuple(job for job in here if not job.fetched),
        here[-1].cloud.after if here and here[-1].cloud else "",
        minutes,
        None if rate is None else minutes / 60 * rate.usd_per_hour,
    )
