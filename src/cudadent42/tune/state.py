"""Where a tuning stands: a pure function of its journal.

A tuning that was killed, at whatever write, is in no other state than one that was never interrupted. A block counts
once: it is known by its job, the attempt and its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from cudadent42.decisions.racing import Leaving, Row, blocks_of, chunks
from cudadent42.tune.journal import (
    ARMS_OF_A_JOB,
    ArmOut,
    BlockMeasured,
    Compiled,
    ConfirmationStarted,
    Confirmed,
    Entry,
    Installed,
    JobEnded,
    JobStarted,
    Opened,
    Paused,
    RungDone,
    Settled,
    Setup,
)
from cudadent42.tune.prune import CompiledArm, representatives
from cudadent42.tune.space import DEFAULT

MOST_ATTEMPTS = 3
"""Of a job or a confirmation that ends with an error; then its arms are out, or the case stays as it is."""


@dataclass(frozen=True)
class Departure:
    """An arm that left a race, and when."""

    rung: int
    blocks: int
    """That it had."""
    leaving: Leaving


@dataclass(frozen=True)
class CaseState:
    """The race of one case."""

    case: str
    """``Case.id``."""
    raced: tuple[str, ...] = ()
    """The arms that the race began with, the default first; empty while something is still to be compiled."""
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
    confirmations: int = 0
    """That were begun."""

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
            or self.confirmations >= MOST_ATTEMPTS
        )


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
class JobState:
    arms: tuple[str, ...]
    blocks: int = 0
    """That were measured whole, over all attempts."""
    attempts: int = 0
    failures: int = 0


@dataclass(frozen=True)
class State:
    """Everything that the journal says."""

    setup: Setup
    compiled: Mapping[str, CompiledArm] = field(default_factory=dict)
    cases: Mapping[str, CaseState] = field(default_factory=dict)
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    spent_s: float = 0.0
    """By all processes that worked on it."""
    spent_usd: float = 0.0
    sitting_s: float = 0.0
    usd_per_hour: float = 0.0
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
    def winners(self) -> tuple[Confirmed, ...]:
        """What holds, case by case."""
        return tuple(
            case.confirmed
            for case in self.cases.values()
            if case.confirmed is not None and case.confirmed.holds
        )


def fold(setup: Setup, entries: Iterable[Entry]) -> State:
    """The state behind these entries."""
    state = State(setup, cases=MappingProxyType({case.id: CaseState(case.id) for case in setup.plan.cases}))
    for entry in entries:
        state = after(state, entry)
    return state


def after(state: State, entry: Entry) -> State:
    """The state behind one more entry."""
    event = entry.event
    if isinstance(event, Opened):
        state = replace(
            state, sitting_s=0.0, usd_per_hour=event.usd_per_hour, sittings=state.sittings + 1, paused=""
        )
    passed = max(0.0, entry.elapsed_s - state.sitting_s)
    state = replace(
        state,
        sitting_s=entry.elapsed_s,
        spent_s=state.spent_s + passed,
        spent_usd=state.spent_usd + passed / 3600 * state.usd_per_hour,
    )
    if isinstance(event, Compiled):
        return _with_compiled(state, event.result)
    if isinstance(event, JobStarted | BlockMeasured | JobEnded):
        return _with_job(state, event)
    if isinstance(event, ArmOut | RungDone | Settled | ConfirmationStarted | Confirmed):
        case = state.cases.get(event.case)
        return state if case is None else _with_case(state, _in_case(case, event, state))
    if isinstance(event, Paused):
        return replace(state, paused=event.reason)
    if isinstance(event, Installed):
        return replace(state, installed=(*state.installed, event))
    return state


def _with_compiled(state: State, result: CompiledArm) -> State:
    compiled = {**state.compiled, result.arm: result}
    state = replace(state, compiled=compiled)
    if set(compiled) != set(state.setup.arms):
        return state
    in_order = [compiled[arm] for arm in state.setup.arms]
    cases = {}
    for case in state.cases.values():
        raced, pruned = representatives(in_order, case.case)
        cases[case.case] = replace(case, raced=raced, pruned=pruned)
    return replace(state, cases=cases)


def _with_job(state: State, event: JobStarted | BlockMeasured | JobEnded) -> State:
    if isinstance(event, JobStarted):
        job = state.jobs.get(event.job, JobState(event.arms))
        return _job(state, event.job, replace(job, attempts=max(job.attempts, event.attempt)))
    job = state.jobs.get(event.job, JobState(()))
    if isinstance(event, JobEnded):
        return _job(state, event.job, replace(job, failures=job.failures + bool(event.error)))
    case = state.cases[event.job.rpartition("#")[0]]
    key = f"{event.job}/{event.attempt}/{event.block}"
    if key in case.rows.get(DEFAULT, {}):
        return state
    rows = dict(case.rows)
    base = event.latencies_ms.get(DEFAULT, 0.0)
    if base > 0:
        for arm, latency_ms in event.latencies_ms.items():
            if latency_ms > 0:
                rows[arm] = {**rows.get(arm, {}), key: math.log(base / latency_ms)}
    state = replace(state, arm_blocks=state.arm_blocks + len(event.latencies_ms))
    state = _with_case(state, replace(case, rows=rows))
    return _job(state, event.job, replace(job, blocks=job.blocks + 1))


def _in_case(
    case: CaseState, event: ArmOut | RungDone | Settled | ConfirmationStarted | Confirmed, state: State
) -> CaseState:
    if isinstance(event, ArmOut):
        return replace(case, out={**case.out, event.arm: event.reason})
    if isinstance(event, Settled):
        return replace(case, settled=event, leader=event.leader)
    if isinstance(event, ConfirmationStarted):
        return replace(case, confirmations=max(case.confirmations, event.attempt))
    if isinstance(event, Confirmed):
        return replace(case, confirmed=event)
    departed = tuple(Departure(event.rung, len(case.rows.get(each.arm, {})), each) for each in event.left)
    return replace(case, rung=event.rung + 1, leader=event.leader, departed=(*case.departed, *departed))


def _with_case(state: State, case: CaseState) -> State:
    return replace(state, cases={**state.cases, case.case: case})


def _job(state: State, name: str, job: JobState) -> State:
    return replace(state, jobs={**state.jobs, name: job})


def jobs_of(state: State, case: CaseState) -> list[Job]:
    """What is still to be measured in the case's rung. Arms that went out leave their jobs."""
    rules = state.setup.rules
    alive = case.alive
    # As the rung began: who went out meanwhile has left a gap, and nobody moves into another job.
    began = [arm for arm in case.raced[1:] if arm not in {each.leaving.arm for each in case.departed}]
    began = [arm for arm in began if arm not in case.out or arm in _in_jobs(state, case)]
    jobs = []
    for part, arms in enumerate(chunks(began, ARMS_OF_A_JOB)):
        name = f"{case.case}#{case.rung}.{part}"
        done = state.jobs.get(name, JobState(arms))
        left = tuple(arm for arm in done.arms if arm in alive)
        blocks = blocks_of(rules, case.rung) - done.blocks
        if left and blocks > 0:
            jobs.append(Job(name, case.case, case.rung, left, blocks, done.attempts + 1))
    return jobs


def _in_jobs(state: State, case: CaseState) -> set[str]:
    """Arms that jobs of the case's rung were begun with."""
    begun = f"{case.case}#{case.rung}."
    return {arm for name, job in state.jobs.items() if name.startswith(begun) for arm in job.arms}
