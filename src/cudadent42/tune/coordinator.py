"""A tuning from where it stands to its end: take the next step, put it on record. Only here is that order."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.errors import LabError, MachineNotReadyError, UnwritableError
from cudadent42.base.observer import Observer
from cudadent42.base.seeds import derived_seed
from cudadent42.tune import journal as events
from cudadent42.tune.engine import Block, Engine, Unfit
from cudadent42.tune.journal import Proposed, Searched, TuningJournal
from cudadent42.tune.returned import not_any_more, raced_before
from cudadent42.tune.rungs import Compile, Confirm, Decide, Propose, Race, Settle, Step, next_step
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import MOST_ATTEMPTS, Job, Standing, State
from cudadent42.tune.strategy import SHARE

STOP = "stop"
"""A file of this name in a tuning's folder ends the process after the block that it is in."""

_SEEDS = 2**32

_ENTRIES = 2
"""That are still written once a limit is not yet reached: the next one, and the word that the tuning is paused."""


@dataclass(frozen=True)
class Limits:
    """Beyond which nothing is begun."""

    budget_s: float | None = None
    """Of all processes that worked on the tuning."""
    usd: float | None = None
    usd_per_hour: float = 0.0

    @property
    def there_are(self) -> bool:
        return self.budget_s is not None or self.usd is not None


class LimitReachedError(Exception):
    """The tuning has to pause. The message says why."""


class _DefaultLostError(MachineNotReadyError):
    """The default of a case was raced before, and cannot be now."""


Proposer = Callable[[State], Proposed | Searched]
"""What a search says when it is asked."""


def next_round(state: State, limits: Limits, proposer: Proposer | None) -> Proposed | Searched:
    """Of a search, which ends in time for the rest of the race."""
    assert proposer is not None, "a tuning that searches has somebody who proposes"
    shares = [state.spent_s / limits.budget_s] if limits.budget_s else []
    shares += [state.spent_usd / limits.usd] if limits.usd else []
    if state.rounds and max(shares, default=0.0) > SHARE:
        return Searched(f"{SHARE:.0%} of the budget is used")
    return proposer(state)


class Coordinator:
    """Of one tuning, in one process."""

    def __init__(
        self,
        folder: Path,
        journal: TuningJournal,
        setup: events.Setup,
        limits: Limits,
        observer: Observer,
        proposer: Proposer | None = None,
    ) -> None:
        """``proposer``: of a tuning that searches."""
        self._folder = folder
        self._journal = journal
        self._limits = limits
        self._observer = observer
        self._proposer = proposer
        self._longest_s = 0.0
        self._standing = Standing(setup, journal.entries)

    def run(self, engine: Engine) -> State:
        """To the end, or to a limit: then ``state.paused`` says which. Raises LabError where the work cannot go on."""
        (self._folder / STOP).unlink(missing_ok=True)
        self._record(events.Opened(platform.node(), self._limits.usd_per_hour))
        engine.take(self.state.setup)
        try:
            while (step := next_step(self.state)) is not None:
                self._check()
                self._do(step, engine)
        except LimitReachedError as limit:
            self._record(events.Paused(str(limit)))
            self._observer.note(f"paused: {limit}; the same command goes on")
        except (KeyboardInterrupt, LabError) as error:
            self._record(events.Paused(str(error) or "interrupted"))
            raise
        return self.state

    @property
    def state(self) -> State:
        return self._standing.state

    def _record(self, event: events.Event) -> None:
        before_s = self.state.spent_s
        self._standing.add((self._journal.append(event),))
        self._longest_s = max(self._longest_s, self.state.spent_s - before_s)

    def _check(self) -> None:
        """Raises LimitReachedError where the next entry might lie beyond a limit, going by the longest wait for one."""
        if (self._folder / STOP).exists():
            raise LimitReachedError("it was asked to stop")
        left_s = self._left_s()
        if left_s is not None and left_s <= _ENTRIES * self._longest_s:
            state = self.state
            spent = f"{state.spent_s / 60:.1f} minutes" + (
                f", ${state.spent_usd:.2f}" if state.spent_usd else ""
            )
            raise LimitReachedError(f"the budget is used up ({spent})")

    def _left_s(self) -> float | None:
        limits, state = self._limits, self.state
        left = [] if limits.budget_s is None else [limits.budget_s - state.spent_s]
        if limits.usd is not None and limits.usd_per_hour > 0:
            left.append((limits.usd - state.spent_usd) / limits.usd_per_hour * 3600)
        return min(left, default=None)

    def _do(self, step: Step, engine: Engine) -> None:
        if isinstance(step, Compile):
            self._compile(step, engine)
        elif isinstance(step, Race):
            self._race(step, engine)
        elif isinstance(step, Decide):
            self._record(events.RungDone(step.case, step.rung, step.leader, step.left))
            left = len(self.state.cases[step.case].alive) - 1
            self._observer.note(
                f"{step.case}: rung {step.rung + 1}, {len(step.left)} left, {left} stay; {step.leader} leads"
            )
        elif isinstance(step, Settle):
            self._record(events.Settled(step.case, step.leader, step.unseparated, step.reason, step.blocks))
        elif isinstance(step, Confirm):
            self._confirm(step, engine)
        elif isinstance(step, Propose):
            self._observer.stage("propose")
            event = next_round(self.state, self._limits, self._proposer)
            self._record(event)
            self._observer.note(said_of(event))
            engine.take(self.state.setup)

    def _compile(self, step: Compile, engine: Engine) -> None:
        """NVRTC and compilers run in processes of their own, so as many as there are processors."""
        self._observer.stage("compile")
        pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        try:
            for done, result in enumerate(pool.map(engine.compile, step.arms), 1):
                self._record(events.Compiled(result))
                self._observer.advance(done / len(step.arms), result.arm)
                self._check()
        finally:
            pool.shutdown(cancel_futures=True)

    def _race(self, step: Race, engine: Engine) -> None:
        job = step.job
        run = f"races/{folder_name(job.name)}-{job.attempt}"
        seed = derived_seed(self.state.setup.plan.seed, job.name, job.attempt) % _SEEDS
        self._observer.stage("race")
        self._record(events.JobStarted(job.name, job.attempt, job.case, job.arms, seed, run))
        measured = 0

        def on_result(result: Block | Unfit) -> None:
            nonlocal measured
            if isinstance(result, Unfit):
                if result.arm == DEFAULT and raced_before(self.state.cases[job.case]):
                    raise _DefaultLostError(not_any_more(job.case, result.reason))
                self._record(events.ArmOut(job.case, result.arm, result.reason))
                return
            measured += 1
            self._record(
                events.BlockMeasured(job.name, job.attempt, result.number, result.latencies_ms, result.flags)
            )
            self._observer.advance(measured / job.blocks, job.name)
            self._check()

        try:
            error = self._attempt(lambda: engine.race(job, run=run, seed=seed, on_result=on_result))
        except _DefaultLostError as lost:
            self._default_lost(job, str(lost))
            return
        arms = [arm for arm in job.arms if arm in self.state.cases[job.case].alive]
        default_is_there = DEFAULT in self.state.cases[job.case].alive
        if not error and measured < job.blocks and arms and default_is_there:
            error = f"{measured} of {job.blocks} blocks were measured"
        self._record(events.JobEnded(job.name, job.attempt, error))
        if error:
            self._observer.note(f"{job.name}: {error}")
            if self.state.jobs[job.name].failures >= MOST_ATTEMPTS:
                for arm in arms:
                    self._record(
                        events.ArmOut(job.case, arm, f"{MOST_ATTEMPTS} races failed, the last: {error}")
                    )

    def _default_lost(self, job: Job, error: str) -> None:
        """A failed attempt, which ends the tuning too: the machine is to be looked at. Where looking did not help, in
        so many processes, the case ends, and the others are reached. Raises MachineNotReadyError before that.
        """
        self._record(events.JobEnded(job.name, job.attempt, error))
        if self.state.jobs[job.name].failures < MOST_ATTEMPTS:
            raise MachineNotReadyError(f"{error}; look at the machine")
        self._observer.note(f"{job.name}: {error}")
        self._record(events.ArmOut(job.case, DEFAULT, f"{MOST_ATTEMPTS} races failed, the last: {error}"))

    def _confirm(self, step: Confirm, engine: Engine) -> None:
        run = f"confirmed/{folder_name(step.case)}-{step.attempt}"
        seed = derived_seed(self.state.setup.plan.seed, "confirm", step.case, step.attempt) % _SEEDS
        self._record(events.ConfirmationStarted(step.case, step.arm, step.attempt, run))
        try:
            result = engine.confirm(
                step.case, step.arm, blocks=step.blocks, run=run, seed=seed, within_s=self._left_s()
            )
        except UnwritableError:
            raise  # the disk's fault, and no winner's
        except LabError as error:
            self._record(events.ConfirmationFailed(step.case, "", str(error)))
            if not self.state.cases[step.case].confirmed_no_more:
                raise
            self._observer.note(f"{step.case}: the confirmation failed: {error}")
            return
        if result.cut_short and not result.holds:
            raise LimitReachedError(f"the budget ended the confirmation of {step.case}")
        self._record(
            events.Confirmed(
                case=step.case,
                arm=step.arm,
                attempt=step.attempt,
                run=run,
                ratio=result.ratio,
                low=result.low,
                high=result.high,
                verdict=result.verdict,
                holds=result.holds,
                reason=result.reason,
            )
        )
        word = "holds" if result.holds else "does not hold"
        self._observer.note(
            f"{step.case}: {step.arm} {word}: {result.ratio:.3f}× ({result.low:.3f} to {result.high:.3f}); "
            f"{result.reason}"
        )

    def _attempt(self, work: Callable[[], None]) -> str:
        """The error that it ended with; empty where there was none. What is the machine's is no arm's: it is raised."""
        try:
            work()
        except (MachineNotReadyError, UnwritableError):
            raise
        except LabError as error:
            return str(error)
        return ""


def said_of(event: Proposed | Searched) -> str:
    """A line for who watches."""
    if isinstance(event, Searched):
        return f"the search is over: {event.reason}"
    return f"round {event.round}: {len(event.arms)} configurations are proposed"


_UNUSUAL = re.compile(r"[^\w.#-]")


def folder_name(name: str) -> str:
    return _UNUSUAL.sub("-", name).replace("#", ".r")
