"""The machines that were started from here and may still cost something.

The journal of starts has what is believed, the provider what is true. Where they differ the journal is corrected, with
the time that the provider gives. What the provider cannot be asked about goes on being believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cudadent42.base.errors import LabError, UsageError
from cudadent42.cost.rates import Rates
from cudadent42.remote.core import record
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.providers.gce import fate, gcloud, machine
from cudadent42.remote.providers.gce.fate import End, Fate
from cudadent42.remote.providers.gce.identity import provider_start, taken_over
from cudadent42.remote.providers.gce.machine import Machine, MachineState
from cudadent42.remote.providers.sky import cluster
from cudadent42.remote.providers.sky.cluster import Cluster
from cudadent42.runs import starts
from cudadent42.runs.starts import MachineStart, StartOutcome

AT_ONCE = 8
"""Questions and orders to a provider."""

_ENDED = (StartOutcome.STOPPED, StartOutcome.LOST)
"""It does not run; where it was made for a run, its disk may be there."""

LOST_IS_ASKED = timedelta(days=7)
"""A machine that was lost is asked about for so long after: the answer may have been wrong, and the provider restarts
by itself what a host's error ended, for which it waits up to seven days where there are local SSDs. After that only a
person starts it, and then it is theirs; to ask about every machine that was ever lost would take longer each month."""

UNDER_WAY = timedelta(seconds=gcloud.TIMEOUT_S)
"""For this long after a start was put on record, whoever asked for it may still be waiting for the answer."""

_NOT_ANSWERED = "its start is on record, and the provider has not answered yet"


@dataclass(frozen=True)
class Started:
    """A machine that may still cost something."""

    start: MachineStart
    machine: Machine | Cluster | None
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

    @property
    def word(self) -> str:
        """How it is, for a reader."""
        if self.state is None:
            return "not known"
        if not self.state.costs and self.start.ended is None:
            return "asked for"
        return self.state.value


@dataclass(frozen=True)
class Corrected:
    """A line of the journal that was not true any more."""

    start: MachineStart
    outcome: StartOutcome
    reason: str


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
        _correct(
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
        answers = list(pool.map(lambda start: _ask(start, now), latest.values()))
    machines = []
    for start, answer in zip(latest.values(), answers, strict=True):
        if answer.corrected is not None:
            corrected.append(answer.corrected)
            start = _as_corrected(answer.corrected, now)
        if not answer.theirs and not _is_over(start, answer.state):
            machines.append(_started(start, answer, jobs, table, now))
    return Survey(tuple(machines), tuple(corrected))


def _may_cost(start: MachineStart) -> bool:
    """It runs as far as is known; or its disk is there, which nobody else would delete."""
    if start.outcome in _ENDED:
        instance = machine.of_start(start)
        return cluster.of_start(start) is not None or (instance is not None and instance.fresh)
    return start.outcome in (StartOutcome.REQUESTED, StartOutcome.READY)


def _may_come_back(start: MachineStart, now: datetime) -> bool:
    """It was lost, not long ago. One without a machine that is known here cannot be asked about."""
    if start.outcome is not StartOutcome.LOST or start.ended is None or machine.of_start(start) is None:
        return False
    return now - datetime.fromisoformat(start.ended) < LOST_IS_ASKED


def _is_over(start: MachineStart, state: MachineState | None) -> bool:
    """Nothing of it is left that could cost anything."""
    fresh = start.outcome in _ENDED and _may_cost(start)
    return start.ended is not None and (state is MachineState.GONE or not fresh)


@dataclass(frozen=True)
class _Answer:
    """What the provider says of a start."""

    state: MachineState | None
    problem: str = ""
    corrected: Corrected | None = None
    theirs: bool = False
    """It runs from somebody else's start by now."""


def _ask(start: MachineStart, now: datetime) -> _Answer:
    """How it is; the journal is told where it was wrong."""
    instance = machine.of_start(start)
    if instance is None:
        return _ask_sky(start, now)
    try:
        description = machine.find(instance)
        state = machine.state_in(description)
        runs = state in (MachineState.STARTING, MachineState.RUNNING)
        other = taken_over(instance, description, start) if runs and description is not None else None
    except LabError as error:
        return _Answer(None, str(error))
    if other is not None:
        closed = start.ended is not None
        told = None if closed else _correct(start, other.outcome, other.reason, other.time)
        return _Answer(state, "", told, theirs=True)
    if runs and description is not None:
        return _Answer(state, "", _restarted(start, provider_start(description)))
    if state.costs:
        return _Answer(state)
    left = "made for a run; its disk costs until it is deleted" if state is MachineState.STOPPED else ""
    if start.outcome in _ENDED:
        if left or not instance.fresh:
            return _Answer(state, left)
        why = start.reason or "it is not there any more"
        return _Answer(state, "", _correct(start, StartOutcome.DELETED, why))
    if _is_under_way(start, now):
        return _Answer(state, _NOT_ANSWERED)
    end = fate.what_happened(instance, start.requested)
    return _Answer(
        state, left, _correct(start, _outcome(start, state, end), str(end), machine.moment(end.time))
    )


def _restarted(start: MachineStart, called: str) -> Corrected | None:
    """What is to be corrected about a start of ours whose machine runs, by the provider's word for it."""
    if start.outcome in _ENDED:
        return _correct(start, StartOutcome.READY, "it runs, although it had ended", None, called)
    if start.provider_start not in ("", called):
        # Restarted by the provider itself, which forgets that within weeks; it would look like somebody else's then.
        _correct(start, StartOutcome.READY, start.reason, None, called)
    return None


def _ask_sky(start: MachineStart, now: datetime) -> _Answer:
    """As ``_ask``, of a machine of SkyPilot's; it forgets those that are gone, and when they went."""
    sky_cluster = cluster.of_start(start)
    if sky_cluster is None:
        return _Answer(None, "no provider that is known here; end it yourself")
    try:
        state = cluster.state(sky_cluster)
    except LabError as error:
        return _Answer(None, f"{error}; end it with: {sky_cluster.end_command}")
    if state.costs:
        ended = start.outcome in _ENDED
        return _Answer(state, "", _correct(start, StartOutcome.READY, cluster.RUNS_AGAIN) if ended else None)
    if _is_under_way(start, now):
        return _Answer(state, _NOT_ANSWERED)
    if state is MachineState.STOPPED:
        left = f"its disk costs until it is taken down: {sky_cluster.end_command}"
        if start.outcome in _ENDED:
            return _Answer(state, left)
        return _Answer(state, left, _correct(start, StartOutcome.STOPPED, "SkyPilot says that it is stopped"))
    never = start.outcome is StartOutcome.REQUESTED
    outcome = StartOutcome.FAILED if never else StartOutcome.DELETED
    return _Answer(state, "", _correct(start, outcome, "SkyPilot has no such machine any more"))


def _is_under_way(start: MachineStart, now: datetime) -> bool:
    asked = datetime.fromisoformat(start.requested)
    return start.outcome is StartOutcome.REQUESTED and now - asked < UNDER_WAY


def _outcome(start: MachineStart, state: MachineState, end: End) -> StartOutcome:
    if state is MachineState.STOPPED:
        return StartOutcome.STOPPED
    if end.fate is Fate.DELETED:
        return StartOutcome.DELETED
    if start.outcome is StartOutcome.REQUESTED and end.fate is Fate.UNKNOWN:
        return StartOutcome.FAILED  # it was never made, as far as anybody knows
    return StartOutcome.LOST


def _correct(
    start: MachineStart,
    outcome: StartOutcome,
    reason: str,
    moment: datetime | None = None,
    called: str = "",
) -> Corrected:
    try:
        starts.mark(start.id, outcome, reason, moment, called)
    except UsageError as error:
        # A full disk here must not keep the machines that are on from being shown and ended.
        reason = f"{reason}; {error}"
    return Corrected(start, outcome, reason)


def _as_corrected(line: Corrected, now: datetime) -> MachineStart:
    current = next(start for start in starts.load() if start.id == line.start.id)
    if current.outcome is line.outcome:
        return current
    ended = None if line.outcome is StartOutcome.READY else current.ended or now.isoformat()
    return replace(current, outcome=line.outcome, ended=ended, reason=line.reason)


def _started(
    start: MachineStart,
    answer: _Answer,
    jobs: Sequence[JobRecord],
    table: Rates,
    now: datetime,
) -> Started:
    at_sky = cluster.of_start(start)
    here = [job for job in jobs if _is_on(job, start, at_sky)]
    end = now if start.ended is None else datetime.fromisoformat(start.ended)
    minutes = max(0.0, (end - datetime.fromisoformat(start.requested)).total_seconds()) / 60
    rate = table.find(start.rate)
    return Started(
        start,
        machine.of_start(start) or at_sky,
        answer.state,
        answer.problem,
        tuple(job for job in here if not job.fetched),
        here[-1].cloud.after if here and here[-1].cloud else "",
        minutes,
        None if rate is None else minutes / 60 * rate.usd_per_hour,
    )


def _is_on(begun: JobRecord, start: MachineStart, at_sky: Cluster | None) -> bool:
    if at_sky is not None:
        return cluster.ran_on(begun, start)
    return begun.cloud is not None and begun.cloud.machine == start.machine
