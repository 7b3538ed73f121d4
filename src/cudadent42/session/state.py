"""Where a session stands: a pure function of its events.

A session that is resumed, on this machine or another, is in no other state than one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from cudadent42.session.clock import Instant, between
from cudadent42.session.events import (
    Attempted,
    BudgetReached,
    Decision,
    End,
    Ended,
    Entry,
    Judged,
    Kept,
    LessonsFired,
    Noted,
    Overridden,
    Passed,
    Profiled,
    Reverted,
    Reverting,
    Started,
    Warned,
    WorkEnded,
    WorkOutcome,
    WorkStarted,
)
from cudadent42.session.protocol import Checkpoint, Work

BUDGET_RULE = "budget"
"""How an override of the session's minutes and dollars is named; it counts for the step that it is given to."""

PROFILE_RULE = "profile before changing"
"""Likewise; it counts for one attempt, however often that has to be taken up again."""


class AttemptOutcome(str, Enum):
    OPEN = "open"
    """Not raced to an end, or not judged yet."""
    PASSED = "passed"
    """Its gates passed; kept."""
    FAILED = "failed"
    """Its gates did not pass, and nobody has said what is to become of it."""
    KEPT = "kept"
    """Kept although its gates did not pass."""
    REVERTED = "reverted"


@dataclass(frozen=True)
class RunRecord:
    """One piece of work."""

    checkpoint: str
    run: str
    attempt: int | None
    started: str
    outcome: WorkOutcome | None = None
    """None while it goes on, or after its process was killed."""
    detail: str = ""
    samples: int = 0
    build_failed: bool = False
    speedup: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    verdict: str = ""
    decision: Decision | None = None
    lines: tuple[str, ...] = ()
    control_excess: float = 0.0
    """As of ``WorkEnded``."""


@dataclass(frozen=True)
class Attempt:
    number: int
    parent: str
    commit: str
    things: int
    description: str
    outcome: AttemptOutcome = AttemptOutcome.OPEN
    reverting: bool = False
    run: RunRecord | None = None


@dataclass(frozen=True)
class CheckpointState:
    plan: Checkpoint
    seconds: float = 0.0
    """That passed while it was the current one."""
    passed: bool = False
    overridden: bool = False
    """Passed by an override."""


@dataclass(frozen=True)
class State:
    """Everything that the events say."""

    started: Started
    first: Instant
    last: Instant
    checkpoints: tuple[CheckpointState, ...]
    position: int = 0
    """Of the current checkpoint; their number when all are passed."""
    runs: tuple[RunRecord, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    parent: str = ""
    """Commit of the snapshot that the next change is raced against."""
    profiled: Profiled | None = None
    away_s: float = 0.0
    """Between stops and starts of the machine, by the time of day; not part of any checkpoint's seconds."""
    jumps_s: tuple[float, ...] = ()
    """By how much the time of day jumped, each time that it did."""
    stints: tuple[tuple[str, str], ...] = ()
    """Host and boot of each stay on a machine."""
    overridden: tuple[Overridden, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lessons: tuple[tuple[str, str], ...] = ()
    """Id and title of every lesson that fired, once each."""
    budgets: tuple[BudgetReached, ...] = ()
    stopped_by: str = ""
    """The gate that ends the session; empty while none does."""
    end: Ended | None = None
    failed_builds: int = 0
    """In a row, up to now."""

    @property
    def current(self) -> CheckpointState | None:
        return self.checkpoints[self.position] if self.position < len(self.checkpoints) else None

    @property
    def seconds(self) -> float:
        """That the session has taken, over all checkpoints."""
        return sum(checkpoint.seconds for checkpoint in self.checkpoints)

    @property
    def usd(self) -> float:
        return self.seconds / 3600 * self.started.settings.usd_per_hour

    @property
    def spent(self) -> tuple[BudgetReached, ...]:
        """The budgets, minutes and dollars, of which nothing is left."""
        settings, minutes = self.started.settings, self.seconds / 60
        reached = []
        if minutes >= settings.budget_minutes:
            reached.append(BudgetReached("minutes", minutes, settings.budget_minutes))
        if settings.budget_usd is not None and self.usd >= settings.budget_usd:
            reached.append(BudgetReached("usd", self.usd, settings.budget_usd))
        return tuple(reached)

    @property
    def working(self) -> RunRecord | None:
        """Work that was begun and whose end is not on record."""
        return self.runs[-1] if self.runs and self.runs[-1].outcome is None else None

    @property
    def pending(self) -> Attempt | None:
        """An attempt that is not settled: open, failed or half reverted."""
        if self.attempts and self.attempts[-1].outcome in (AttemptOutcome.OPEN, AttemptOutcome.FAILED):
            return self.attempts[-1]
        return None

    def profile_overridden(self, attempt: int) -> bool:
        """Whether this change may be raced although nothing was profiled."""
        return any((item.rule, item.attempt) == (PROFILE_RULE, attempt) for item in self.overridden)

    def measured(self, checkpoint: str | None = None) -> RunRecord | None:
        """The last run of the suite that finished, at one checkpoint or any."""
        kinds = {state.plan.name for state in self.checkpoints if state.plan.work is Work.MEASURE}
        wanted = kinds if checkpoint is None else kinds & {checkpoint}
        finished = [r for r in self.runs if r.checkpoint in wanted and r.outcome is WorkOutcome.FINISHED]
        return finished[-1] if finished else None

    @property
    def baseline(self) -> RunRecord | None:
        return self.measured(self.checkpoints[0].plan.name)


def replay(entries: Iterable[Entry]) -> State:
    """The state after the events, of which the first is ``Started``."""
    iterator = iter(entries)
    first = next(iterator)
    assert isinstance(first.event, Started)
    state = State(
        started=first.event,
        first=first.at,
        last=first.at,
        checkpoints=tuple(CheckpointState(plan) for plan in first.event.protocol.checkpoints),
        parent=first.event.base,
        stints=((first.at.host, first.at.boot),),
    )
    for entry in iterator:
        state = apply(tick(state, entry.at), entry)
    return state


def tick(state: State, now: Instant) -> State:
    """The state a while later, without anything having happened."""
    if state.end is not None:
        return state
    passed = between(state.last, now)
    # After the last checkpoint nothing is planned any more, but the meter runs until the session is ended.
    index = min(state.position, len(state.checkpoints) - 1)
    current = state.checkpoints[index]
    return replace(
        state,
        last=now,
        checkpoints=_replaced(
            state.checkpoints, index, replace(current, seconds=current.seconds + passed.seconds)
        ),
        away_s=state.away_s + passed.away_s,
        jumps_s=(*state.jumps_s, passed.jump_s) if passed.jump_s else state.jumps_s,
        stints=state.stints if state.last.same_stint(now) else (*state.stints, (now.host, now.boot)),
    )


def apply(state: State, entry: Entry) -> State:
    """The state after one more event; time is `tick`'s business."""
    event = entry.event
    for kinds, change in _CHANGES:
        if isinstance(event, kinds):
            return change(state, entry)
    return state


def _work(state: State, entry: Entry) -> State:
    event = entry.event
    if isinstance(event, WorkStarted):
        run = RunRecord(event.checkpoint, event.run, event.attempt, entry.at.time)
        return _with_run(replace(state, runs=(*state.runs, run)), run)
    if isinstance(event, WorkEnded) and state.working is not None:
        run = replace(
            state.working,
            outcome=event.outcome,
            detail=event.detail,
            samples=event.samples,
            build_failed=event.build_failed,
            speedup=event.speedup,
            ci_low=event.ci_low,
            ci_high=event.ci_high,
            control_excess=event.control_excess,
            verdict=event.verdict,
        )
        if run.outcome is WorkOutcome.FINISHED:
            state = replace(state, failed_builds=0)
        elif run.build_failed:
            state = replace(state, failed_builds=state.failed_builds + 1)
        return _with_run(replace(state, runs=(*state.runs[:-1], run)), run)
    if isinstance(event, Profiled):
        return replace(state, profiled=event)
    return state


def _judgement(state: State, entry: Entry) -> State:
    event = entry.event
    assert isinstance(event, Judged)
    runs = tuple(
        replace(run, decision=event.decision, lines=event.lines) if run.run == event.run else run
        for run in state.runs
    )
    state = replace(state, runs=runs, stopped_by=event.ends)
    judged = [run for run in runs if run.run == event.run]
    if judged:
        state = _with_run(state, judged[-1])
    if event.attempt is not None and event.decision is not Decision.PASSED:
        state = _with_outcome(state, event.attempt, AttemptOutcome.FAILED)
    return state


def _attempt(state: State, entry: Entry) -> State:
    event = entry.event
    if isinstance(event, Attempted):
        attempt = Attempt(event.number, event.parent, event.commit, event.things, event.description)
        return replace(state, attempts=(*state.attempts, attempt))
    if isinstance(event, Kept):
        outcome = AttemptOutcome.KEPT if event.failed else AttemptOutcome.PASSED
        kept = [attempt.commit for attempt in state.attempts if attempt.number == event.number]
        state = replace(state, parent=kept[-1] if kept else state.parent)
        return _with_outcome(state, event.number, outcome)
    if isinstance(event, Reverting):
        return _with_outcome(state, event.number, AttemptOutcome.FAILED, reverting=True)
    if isinstance(event, Reverted):
        return _with_outcome(state, event.number, AttemptOutcome.REVERTED)
    return state


def _passed(state: State, entry: Entry) -> State:
    event = entry.event
    assert isinstance(event, Passed)
    current = state.current
    if current is None or current.plan.name != event.checkpoint:
        return state
    overridden = any(item.rule == gate_rule(event.checkpoint) for item in state.overridden)
    done = replace(current, passed=True, overridden=overridden)
    return replace(
        state, checkpoints=_replaced(state.checkpoints, state.position, done), position=state.position + 1
    )


def _remark(state: State, entry: Entry) -> State:
    event = entry.event
    if isinstance(event, Overridden):
        return replace(state, overridden=(*state.overridden, event))
    if isinstance(event, Warned):
        return replace(state, warnings=(*state.warnings, event.text))
    if isinstance(event, Noted):
        return replace(state, notes=(*state.notes, event.text))
    if isinstance(event, LessonsFired):
        return replace(state, lessons=tuple({**dict(state.lessons), **event.lessons}.items()))
    if isinstance(event, BudgetReached):
        return replace(state, budgets=(*state.budgets, event))
    return state


def _ended(state: State, entry: Entry) -> State:
    assert isinstance(entry.event, Ended)
    return replace(state, end=entry.event)


_CHANGES = (
    ((WorkStarted, WorkEnded, Profiled), _work),
    ((Judged,), _judgement),
    ((Attempted, Kept, Reverting, Reverted), _attempt),
    ((Passed,), _passed),
    ((Overridden, Warned, Noted, LessonsFired, BudgetReached), _remark),
    ((Ended,), _ended),
)


def gate_rule(checkpoint: str) -> str:
    """How an override of a checkpoint's gates is named."""
    return f"gate of {checkpoint}"


def finished(state: State) -> bool:
    return state.end is not None and state.end.end is End.FINISHED


def _with_run(state: State, run: RunRecord) -> State:
    if run.attempt is None:
        return state
    attempts = tuple(
        replace(attempt, run=run) if attempt.number == run.attempt else attempt for attempt in state.attempts
    )
    return replace(state, attempts=attempts)


def _with_outcome(state: State, number: int, outcome: AttemptOutcome, reverting: bool = False) -> State:
    attempts = tuple(
        replace(attempt, outcome=outcome, reverting=reverting) if attempt.number == number else attempt
        for attempt in state.attempts
    )
    return replace(state, attempts=attempts)


def _replaced(
    checkpoints: tuple[CheckpointState, ...], index: int, checkpoint: CheckpointState
) -> tuple[CheckpointState, ...]:
    return (*checkpoints[:index], checkpoint, *checkpoints[index + 1 :])
