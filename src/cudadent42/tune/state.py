"""Where a tuning stands: a pure function of its journal.

A tuning that was killed, at whatever write, is in no other state than one that was never interrupted. A block counts
once: it is known by its job, the attempt and its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import median
from types import MappingProxyType

from cudadent42.base.errors import UsageError
from cudadent42.decisions.racing import Leaving, Row, blocks_of
from cudadent42.fleet.task import PATIENCE_S
from cudadent42.tune.journal import (
    FILES,
    ArmOut,
    BlockMeasured,
    Compiled,
    ConfirmationFailed,
    ConfirmationStarted,
    Confirmed,
    Entry,
    Gone,
    Installed,
    JobEnded,
    JobReturned,
    JobStarted,
    Joined,
    MachineConfirmed,
    Opened,
    Paused,
    Proposed,
    Quarantined,
    RungDone,
    Searched,
    Sent,
    Settled,
    Setup,
)
from cudadent42.tune.prune import CompiledArm, representatives
from cudadent42.tune.space import DEFAULT

MOST_ATTEMPTS = 3
"""Of a job or a confirmation that ends with an error; then its arms are out, or the case stays as it is."""

MOST_LOST_CONFIRMATIONS = 24
"""That took their workers along: thrice as many as a fleet begins at once, all of which one host may have."""


OfACase = (
    ArmOut | RungDone | Settled | ConfirmationStarted | ConfirmationFailed | MachineConfirmed | Confirmed
)


@dataclass(frozen=True)
class Departure:
    """An arm that left a race, and when."""

    rung: int
    blocks: int
    """That it had."""
    leaving: Leaving


@dataclass(frozen=True)
class JobState:
    arms: tuple[str, ...]
    blocks: int = 0
    """That were measured whole, over all attempts."""
    attempts: int = 0
    failures: int = 0
    losses: int = 0
    """Attempts whose workers went away, of a fleet."""
    open: Mapping[int, str] = field(default_factory=dict)
    """Attempts without an end, with their run folders."""


@dataclass(frozen=True)
class CaseState:
    """The race of one case."""

    case: str
    """``Case.id``."""
    raced: tuple[str, ...] = ()
    """The arms that are raced or were, the default first; empty while something is still to be compiled."""
    added: tuple[int, ...] = ()
    """How many of ``raced`` beside the default each round of a search brought; all of them where there is none."""
    pruned: Mapping[str, str] = field(default_factory=dict)
    """Arms that were never raced here, with the reason."""
    out: Mapping[str, str] = field(default_factory=dict)
    """Arms that could not be raced on, with the reason."""
    departed: tuple[Departure, ...] = ()
    rung: int = 0
    """The one that is being raced."""
    leader: str = DEFAULT
    rows: Mapping[str, Row] = field(default_factory=dict)
    """By arm and block (job, attempt, number), the logarithm of the default's latency over the arm's."""
    settled: Settled | None = None
    confirmed: Confirmed | None = None
    on_machines: tuple[MachineConfirmed, ...] = ()
    """The leader's confirmations of single machines, of a fleet."""
    confirmations: int = 0
    """That were begun."""
    failed: tuple[str, ...] = ()
    """Why confirmations ended with an error. One that a kill or a limit ended is none of them."""
    lost: int = 0
    """Confirmations whose workers went away, of a fleet."""
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    default_ms: Mapping[str, float] = field(default_factory=dict)
    """The default's median latency by the piece of hardware, of a fleet."""

    @property
    def alive(self) -> tuple[str, ...]:
        """The arms that are raced, the default first."""
        gone = {departure.leaving.arm for departure in self.departed} | self.out.keys()
        return tuple(arm for arm in self.raced if arm not in gone)

    @property
    def finished(self) -> bool:
        if self.settled is None:
            return False
        return (
            self.settled.leader == DEFAULT
            or self.confirmed is not None
            or (self.confirmed_no_more and not self.on_machines)
        )

    @property
    def confirmed_no_more(self) -> bool:
        """Whether no further confirmation is tried."""
        return len(self.failed) >= MOST_ATTEMPTS or self.lost >= MOST_LOST_CONFIRMATIONS


@dataclass(frozen=True)
class Job:
    """Blocks of a rung that some arms share."""

    name: str
    """Unique in a tuning: ``case#rung.part``."""
    case: str
    rung: int
    arms: tuple[str, ...]
    """Beside the default."""
    blocks: int
    """Still to be measured."""
    attempt: int


@dataclass(frozen=True)
class State:
    """Everything that the journal says."""

    setup: Setup
    """With the arms that were proposed since."""
    rounds: int = 0
    """Of a search, that were proposed."""
    searched: str = ""
    """Why no more are."""
    compiled: Mapping[str, CompiledArm] = field(default_factory=dict)
    cases: Mapping[str, CaseState] = field(default_factory=dict)
    members: Mapping[str, Joined] = field(default_factory=dict)
    """Workers of a fleet, by name, that are there."""
    joined: frozenset[str] = frozenset()
    """All that ever were."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Pieces of hardware, with the reason."""
    sent: Mapping[str, str] = field(default_factory=dict)
    """Of arms in files, the digest of what workers elsewhere were sent."""
    spent_s: float = 0.0
    """By all processes that worked on it."""
    spent_usd: float = 0.0
    sitting_s: float = 0.0
    usd_per_hour: float = 0.0
    """Of each worker."""
    time: str = ""
    """Of the last entry."""
    sittings: int = 0
    arm_blocks: int = 0
    """Blocks of arms, the default's among them, that were measured."""
    paused: str = ""
    """Why the last process ended before the tuning did; empty while one goes on."""
    installed: tuple[Installed, ...] = ()

    @property
    def finished(self) -> bool:
        return bool(self.cases) and all(case.finished for case in self.cases.values())

    @property
    def searches(self) -> bool:
        """Whether more configurations may be proposed."""
        return self.setup.search is not None and not self.searched

    @property
    def jobs(self) -> Mapping[str, JobState]:
        """By name, of all cases."""
        return {name: job for case in self.cases.values() for name, job in case.jobs.items()}

    @property
    def workers(self) -> int:
        """That are paid for: without a fleet, this machine."""
        return max(1, len(self.members))

    @property
    def winners(self) -> tuple[Confirmed, ...]:
        """What holds, case by case."""
        return tuple(
            case.confirmed
            for case in self.cases.values()
            if case.confirmed is not None and case.confirmed.holds
        )


class Standing:
    """The state after the entries of a journal that grows.

    A fleet's journal grows by thousands of entries, over thousands of cases. So they are kept in one dictionary, and a
    state that was asked for before has the cases of now: who needs an older one folds the journal.
    """

    def __init__(self, setup: Setup, entries: Iterable[Entry]) -> None:
        """Raises UsageError where the entries do not follow from the setup, as in a folder that was damaged or comes
        from elsewhere."""
        self._cases = {case.id: CaseState(case.id) for case in setup.plan.cases}
        self.state = State(setup, cases=MappingProxyType(self._cases))
        try:
            self.add(entries)
            _check_arms(self.state)
        except (LookupError, ValueError, TypeError, ArithmeticError) as error:
            raise UsageError(
                f"the tuning's {FILES.entries} does not follow from its {FILES.setup} "
                f"({type(error).__name__}: {error}); copy the folder again, or begin another"
            ) from error

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.state = _after(self.state, self._cases, entry)


def fold(setup: Setup, entries: Iterable[Entry]) -> State:
    """The state after these entries. Raises UsageError as `Standing`."""
    return Standing(setup, entries).state


def _check_arms(state: State) -> None:
    """Raises LookupError for an arm that the setup does not have."""
    setup = state.setup
    if setup.settings.keys() != setup.arms.keys() - {DEFAULT} or DEFAULT not in setup.arms:
        raise LookupError("not every arm has its settings")
    for case in state.cases.values():
        named = {case.leader, *(each.leaving.arm for each in case.departed), *case.rows}
        named |= {arm for job in case.jobs.values() for arm in job.arms}
        named |= {each.arm for each in case.on_machines}
        if case.confirmed is not None:
            named.add(case.confirmed.arm)
        if case.settled is not None:
            named |= {case.settled.leader, *case.settled.unseparated}
            if case.settled.leader != DEFAULT and case.settled.blocks < 1:
                raise ValueError(f"a confirmation of {case.settled.blocks} blocks")
        if not named <= setup.arms.keys():
            raise LookupError(f"there is no arm {min(named - setup.arms.keys())!r:.80}")


def _after(state: State, cases: dict[str, CaseState], entry: Entry) -> State:
    """``cases`` are the state's, and are changed."""
    event = entry.event
    if isinstance(event, Opened):
        state = _opened(state, event, entry)
    if entry.elapsed_s != state.sitting_s or entry.time != state.time:  # else of the same write
        state = _later(state, entry)
    if isinstance(event, JobStarted | BlockMeasured | JobEnded | JobReturned):
        return _with_job(state, cases, event)
    if isinstance(event, Compiled):
        return _with_compiled(state, cases, event.result)
    if isinstance(event, OfACase):
        if event.case in cases:
            cases[event.case] = _in_case(cases[event.case], event)
        return state
    if isinstance(event, Joined):
        return _joined(state, event)
    if isinstance(event, Gone):
        members = {name: member for name, member in state.members.items() if name != event.worker}
        return replace(state, members=members)
    if isinstance(event, Quarantined):
        return _without(state, cases, event)
    if isinstance(event, Sent):
        return replace(state, sent={**state.sent, **event.files})
    if isinstance(event, Proposed):
        return _with_proposed(state, event)
    if isinstance(event, Searched):
        return replace(state, searched=event.reason)
    if isinstance(event, Paused):
        return replace(state, paused=event.reason, members={})
    if isinstance(event, Installed):
        return replace(state, installed=(*state.installed, event))
    return state


def _later(state: State, entry: Entry) -> State:
    passed = max(0.0, entry.elapsed_s - state.sitting_s)
    return replace(
        state,
        sitting_s=entry.elapsed_s,
        spent_s=state.spent_s + passed,
        spent_usd=state.spent_usd + passed / 3600 * state.usd_per_hour * state.workers,
        time=entry.time,
    )


def _joined(state: State, event: Joined) -> State:
    """With what a worker cost before, unless it is there for another coordinator again."""
    before_s = 0.0 if event.worker in state.joined else event.up_s
    return replace(
        state,
        members={**state.members, event.worker: event},
        joined=state.joined | {event.worker},
        spent_usd=state.spent_usd + before_s / 3600 * state.usd_per_hour,
    )


def _opened(state: State, event: Opened, entry: Entry) -> State:
    """Workers may have gone on after their coordinator was killed, within their patience. Quarantined ones may be
    mended."""
    spent_usd = state.spent_usd
    if state.members and state.time:
        gap = datetime.fromisoformat(entry.time) - datetime.fromisoformat(state.time)
        alone_s = min(max(0.0, gap.total_seconds()), PATIENCE_S)
        spent_usd += alone_s / 3600 * state.usd_per_hour * len(state.members)
    return replace(
        state,
        sitting_s=0.0,
        usd_per_hour=event.usd_per_hour,
        spent_usd=spent_usd,
        sittings=state.sittings + 1,
        paused="",
        members={},
        quarantined={},
    )


def _without(state: State, cases: dict[str, CaseState], event: Quarantined) -> State:
    """What a device confirmed that is not to be trusted does not count."""
    for name, case in cases.items():
        trusted = tuple(each for each in case.on_machines if each.unit != event.unit)
        if len(trusted) < len(case.on_machines):
            cases[name] = replace(case, on_machines=trusted)
    return replace(state, quarantined={**state.quarantined, event.unit: event.reason})


def _with_proposed(state: State, event: Proposed) -> State:
    setup = state.setup
    setup = replace(setup, arms={**setup.arms, **event.arms}, settings={**setup.settings, **event.settings})
    return replace(state, setup=setup, rounds=event.round)


def _with_compiled(state: State, cases: dict[str, CaseState], result: CompiledArm) -> State:
    compiled = {**state.compiled, result.arm: result}
    state = replace(state, compiled=compiled)
    if len(compiled) < len(state.setup.arms):
        return state
    in_order = [compiled[arm] for arm in state.setup.arms]
    for name, case in cases.items():
        raced, pruned = representatives(in_order, name)  # in their order: who was raced before comes first
        new = len(raced) - max(1, len(case.raced))
        added = (*case.added, new) if new > 0 else case.added
        cases[name] = replace(case, raced=raced, pruned=pruned, added=added)
    return state


def _with_job(
    state: State, cases: dict[str, CaseState], event: JobStarted | BlockMeasured | JobEnded | JobReturned
) -> State:
    case = cases[event.job.rpartition("#")[0]]
    job = case.jobs.get(event.job, JobState(()))
    if isinstance(event, JobStarted):
        job = replace(
            job if job.arms else JobState(event.arms),
            attempts=max(job.attempts, event.attempt),
            open={**job.open, event.attempt: event.run},
        )
    elif isinstance(event, JobEnded):
        job = replace(job, failures=job.failures + bool(event.error), open=_closed(job, event.attempt))
    elif isinstance(event, JobReturned):
        if event.attempt not in job.open:
            return state  # it was told before
        return _with_return(state, cases, case, job, event)
    else:
        key = f"{event.job}/{event.attempt}/{event.block}"
        if key in case.rows.get(DEFAULT, {}):
            return state
        case = replace(case, rows=_with_rows(case.rows, {key: event.latencies_ms}))
        state = replace(state, arm_blocks=state.arm_blocks + len(event.latencies_ms))
        job = replace(job, blocks=job.blocks + 1)
    cases[case.case] = replace(case, jobs={**case.jobs, event.job: job})
    return state


def _with_return(
    state: State, cases: dict[str, CaseState], case: CaseState, job: JobState, event: JobReturned
) -> State:
    """The blocks of a whole attempt, as far as the job still wants them."""
    rung = int(event.job.rpartition("#")[2].partition(".")[0])
    wanted = max(0, blocks_of(state.setup.rules, rung) - job.blocks)
    blocks = {
        f"{event.job}/{event.attempt}/{number}": {
            arm: latency for arm, latency in zip(event.arms, block, strict=True) if latency > 0
        }
        for number, block in enumerate(event.blocks[:wanted])
    }
    latencies = [block[0] for block in event.blocks if block and block[0] > 0]
    member = state.members.get(event.worker)
    default_ms = case.default_ms
    if latencies and member is not None:
        default_ms = {**default_ms, member.unit: median(latencies)}
    job = replace(
        job,
        blocks=job.blocks + len(blocks),
        failures=job.failures + (bool(event.error) and not event.lost),
        losses=job.losses + event.lost,
        open=_closed(job, event.attempt),
    )
    cases[case.case] = replace(
        case,
        rows=_with_rows(case.rows, blocks),
        out={**case.out, **event.unfit},
        default_ms=default_ms,
        jobs={**case.jobs, event.job: job},
    )
    return replace(state, arm_blocks=state.arm_blocks + sum(map(len, blocks.values())))


def _closed(job: JobState, attempt: int) -> Mapping[int, str]:
    return {number: run for number, run in job.open.items() if number != attempt}


def _with_rows(rows: Mapping[str, Row], blocks: Mapping[str, Mapping[str, float]]) -> Mapping[str, Row]:
    """With these blocks, by their keys: latencies in ms by arm."""
    new: dict[str, dict[str, float]] = {}
    for key, latencies_ms in blocks.items():
        base = latencies_ms.get(DEFAULT, 0.0)
        if base > 0:
            for arm, latency_ms in latencies_ms.items():
                if latency_ms > 0:
                    new.setdefault(arm, {})[key] = math.log(base / latency_ms)
    return {**rows, **{arm: {**rows.get(arm, {}), **row} for arm, row in new.items()}}


def _in_case(case: CaseState, event: OfACase) -> CaseState:
    if isinstance(event, ArmOut):
        return replace(case, out={**case.out, event.arm: event.reason})
    if isinstance(event, Settled):
        return replace(case, settled=event, leader=event.leader)
    if isinstance(event, ConfirmationStarted):
        return replace(case, confirmations=max(case.confirmations, event.attempt))
    if isinstance(event, ConfirmationFailed):
        if event.lost:
            return replace(case, lost=case.lost + 1)
        return replace(case, failed=(*case.failed, event.reason))
    if isinstance(event, MachineConfirmed):
        if any(each.unit == event.unit for each in case.on_machines):
            return case
        return replace(case, on_machines=(*case.on_machines, event))
    if isinstance(event, Confirmed):
        return replace(case, confirmed=event)
    departed = tuple(Departure(event.rung, len(case.rows.get(each.arm, {})), each) for each in event.left)
    return replace(case, rung=event.rung + 1, leader=event.leader, departed=(*case.departed, *departed))
