"""A tuning over a fleet: all jobs that are due are handed out, and what comes back is put on record.

The journal is the truth. An attempt is on record before it is offered, and its result is on record before anything
follows from it; so whenever this process is killed, the same command goes on, and no block is lost that had returned
or counts twice. Between the two, who measures what is nobody's memory but the desk's.
"""

from __future__ import annotations

import heapq
import os
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.files import require_room
from cudadent42.base.observer import Observer
from cudadent42.base.parcels import Parcel
from cudadent42.decisions.machines import deviation, is_far_off, usual_deviation
from cudadent42.decisions.racing import blocks_of
from cudadent42.fleet.desk import Admitted, Change, Desk, Gone, Refused
from cudadent42.fleet.engine import Engine
from cudadent42.fleet.task import Returned, Task, Worker
from cudadent42.model.records import Plan
from cudadent42.tune import journal as events
from cudadent42.tune.confirming import concluded, judged_folder
from cudadent42.tune.coordinator import (
    STOP,
    LimitReachedError,
    Limits,
    Proposer,
    next_round,
    said_of,
)
from cudadent42.tune.engine import Confirmation
from cudadent42.tune.journal import TuningJournal
from cudadent42.tune.prune import CompiledArm
from cudadent42.tune.returned import Confirming, Work, machine_confirmed, race_returned
from cudadent42.tune.rungs import Confirm, Decide, Race, Settle, steps_of
from cudadent42.tune.sent import newly_sent
from cudadent42.tune.state import MOST_ATTEMPTS, CaseState, Job, Standing, State
from cudadent42.tune.tasks import run_of, started, task_of
from cudadent42.tune.verified import Verified

MOST_LOSSES = 6
"""Attempts of a job whose workers went away; then its arms are out: they may be what takes workers along."""

CONFIRMING_MACHINES = 8
"""That confirm a winner, where the fleet has as many."""

FAILURES_OF_A_DEVICE = 3
"""Different jobs that failed on it; then it gets no other."""

_MOST_CONFIRMATIONS = 1_000_000
"""Of a process."""
_WAIT_S = 1.0
_CLOSING_S = 12.0
"""That an engine may take to end its workers."""
_BACKLOG = 0.25
"""Of the workers, that find an offer waiting when they come back."""


class Compiler(Protocol):
    """Of this machine. Workers compile what they race for themselves."""

    def take(self, setup: events.Setup) -> None:
        """The tuning's setup, with the arms that were proposed since."""
        ...

    def compile(self, arm: str) -> CompiledArm:
        """Raises LabError where this machine cannot compile at all. Called by several threads."""
        ...


class FleetCoordinator:
    """Of one tuning, in one process."""

    def __init__(
        self,
        folder: Path,
        journal: TuningJournal,
        setup: events.Setup,
        limits: Limits,
        observer: Observer,
        *,
        tree: str = "",
        suite: str = "",
        audits: bool = True,
        clock: Callable[[], float] = time.monotonic,
        judge: Callable[[Path, int], Confirmation] | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """``tree``: digest of the sources that workers have to have; ``suite``: as the user named it; ``proposer``: of
        a tuning that searches."""
        self._folder = folder
        self._journal = journal
        self._limits = limits
        self._observer = observer
        self._tree = tree
        self._suite = suite
        self._audits = audits
        self._clock = clock
        self._judge = judge or judged_folder
        self._proposer = proposer
        self._longest_s = 0.0
        self._confirming: deque[Confirming] = deque()  # that wait to be handed out
        self._races: list[tuple[int, int, Job]] = []
        """That wait likewise, a heap by rung and age."""
        self._queued = 0
        self._work: dict[str, Work] = {}
        self._pending: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._due: set[str] = set()
        self._verified = Verified()
        self._failed: dict[str, set[str]] = {}
        self._joining: list[Worker] = []
        """That were taken on in this turn, and are not on record yet."""
        self._parcels: Callable[[Plan], tuple[Parcel, ...]] = lambda plan: ()
        """Of the engine: what is sent along with a task."""
        self._standing = Standing(setup, journal.entries)
        self._names = _by_implementation(self.state)

    def run(self, engine: Engine, compiler: Compiler) -> State:
        """To the end, or to a limit: then ``state.paused`` says which. The engine is closed in any case.

        Raises LabError where the work cannot go on.
        """
        desk = Desk(engine, self._why_not, self._clock)
        self._parcels = engine.parcels
        try:
            (self._folder / STOP).unlink(missing_ok=True)
            self._record(events.Opened(platform.node(), self._limits.usd_per_hour))
            self._compile(compiler, desk)
            self._note_sent()
            self._observer.stage("race")
            self._due = set(self.state.cases)
            self._expect(desk, engine)
            while (
                self._due or desk.in_play or self._confirming or self._races or self._propose(compiler, desk)
            ):
                self._check(desk)
                self._enqueue(desk)
                self._hand_out(desk)
                self._take(desk.turn(_WAIT_S), desk)
        except LimitReachedError as limit:
            self._wind_up(desk, engine)
            self._record(events.Paused(str(limit)))
            self._observer.note(f"paused: {limit}; the same command goes on")
        except (KeyboardInterrupt, LabError) as error:
            engine.close()
            self._record(events.Paused(str(error) or "interrupted"))
            raise
        finally:
            engine.close()
        if not self.state.paused:
            self._record(*(events.Gone(name, "the tuning is done") for name in self.state.members))
        return self.state

    def _propose(self, compiler: Compiler, desk: Desk) -> bool:
        """Where nothing is left to do but to search on: whether something came of it. Raises LimitReachedError."""
        waiting = {name for name, case in self.state.cases.items() if not case.finished}
        if not waiting or not self.state.searches:
            return False
        self._observer.stage("propose")
        event = next_round(self.state, self._limits, self._proposer)
        self._record(event)
        self._observer.note(said_of(event))
        self._names = _by_implementation(self.state)
        self._compile(compiler, desk)
        self._note_sent()
        self._observer.stage("race")
        self._due = waiting
        return True

    def _expect(self, desk: Desk, engine: Engine) -> None:
        """What workers measure, or have measured, for a coordinator that was killed."""
        held = engine.held()
        for case in self.state.cases.values():
            for name, job in case.jobs.items():
                rung = int(name.rpartition("#")[2].partition(".")[0])
                wanted = blocks_of(self.state.setup.rules, rung) - job.blocks
                for attempt in job.open if wanted > 0 else ():
                    work = Job(name, case.case, rung, job.arms, wanted, attempt)
                    task = self._task(work)
                    if task.key in held:
                        self._work[task.key] = work
                        self._pending[case.case] += 1
                        desk.expect(task, held[task.key])

    # ---------------------------------------------------------------- record

    @property
    def state(self) -> State:
        return self._standing.state

    def _record(self, *happened: events.Event) -> None:
        self._standing.add(self._journal.extend(happened))

    def _compile(self, compiler: Compiler, desk: Desk) -> None:
        """Before anything is timed: compilers beside it would disturb. The desk takes its turns meanwhile, so workers
        join and see that somebody is there. Raises LimitReachedError."""
        missing = [arm for arm in self.state.setup.arms if arm not in self.state.compiled]
        if not missing:
            return
        self._observer.stage("compile")
        compiler.take(self.state.setup)
        pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        try:
            order = {pool.submit(compiler.compile, arm): number for number, arm in enumerate(missing)}
            pending = set(order)
            while pending:
                done, pending = futures.wait(pending, _WAIT_S, futures.FIRST_COMPLETED)
                results = [each.result() for each in sorted(done, key=order.__getitem__)]
                self._record(*(events.Compiled(result) for result in results))
                if results:
                    self._observer.advance(1 - len(pending) / len(missing), results[-1].arm)
                self._check(desk)
                self._take(desk.turn(0.0), desk)
        finally:
            pool.shutdown(cancel_futures=True)

    def _note_sent(self) -> None:
        """Raises UsageError where files that go to workers elsewhere are others than before."""
        event = newly_sent(self.state, self._parcels)
        self._record(*([] if event is None else [event]))

    # ---------------------------------------------------------------- limits

    def _left_s(self, joining: Sequence[Worker] = ()) -> float | None:
        """Until a limit, if the fleet stays as it is, or as it is with these."""
        limits, state = self._limits, self.state
        since_s = self._journal.elapsed_s - state.sitting_s
        left = [] if limits.budget_s is None else [limits.budget_s - state.spent_s - since_s]
        each_per_s = limits.usd_per_hour / 3600
        if limits.usd is not None and each_per_s > 0:
            spent_usd = state.spent_usd + each_per_s * (
                since_s * state.workers + sum(worker.up_s for worker in joining)
            )
            workers = max(1, len(state.members) + len(joining))
            left.append((limits.usd - spent_usd) / (each_per_s * workers))
        return min(left, default=None)

    def _check(self, desk: Desk) -> None:
        """Raises LimitReachedError where what is under way has to end for a limit to hold."""
        if (self._folder / STOP).exists():
            raise LimitReachedError("it was asked to stop")
        left_s = self._left_s()
        if left_s is None or left_s > self._longest_s + _CLOSING_S:
            return
        self._requeue(desk)
        if left_s <= _CLOSING_S or not desk.held:
            state = self.state
            money = f", ${state.spent_usd:.2f}" if state.spent_usd else ""
            raise LimitReachedError(f"the budget is used up ({state.spent_s / 60:.1f} minutes{money})")

    def _why_not(self, worker: Worker) -> str:
        """A worker that is not to be had, in words."""
        kind = self.state.setup.device.name
        if worker.unit in self.state.quarantined:
            return f"its device is quarantined: {self.state.quarantined[worker.unit]}"
        if worker.kind != kind:
            return f"it has {worker.kind}, and this tuning is of {kind}"
        if self._tree and worker.tree != self._tree:
            return "it runs other sources of this project than the coordinator"
        drivers = {member.driver for member in self.state.members.values()}
        drivers |= {joining.driver for joining in self._joining}
        if drivers - {worker.driver}:
            return f"it has driver {worker.driver or 'unknown'}, others of the fleet have {drivers.pop()}"
        left_s = self._left_s((*self._joining, worker))
        if left_s is not None and left_s <= self._longest_s + _CLOSING_S:
            return "the budget is too short for one more"
        self._joining.append(worker)
        return ""

    def _wind_up(self, desk: Desk, engine: Engine) -> None:
        """What is under way ends after its task where there is time, and its result counts."""
        desk.withdraw()
        for worker in desk.workers:
            desk.dismiss(worker.name)
        left_s = self._left_s()
        stop_s = self._clock() + (60.0 if left_s is None else max(0.0, left_s - _CLOSING_S))
        while desk.held and self._clock() < stop_s:
            self._take(desk.turn(min(_WAIT_S, max(0.0, stop_s - self._clock()))), desk)
        engine.close()

    # ---------------------------------------------------------------- out

    def _enqueue(self, desk: Desk) -> None:
        """Whatever follows for cases of which nothing is under way."""
        for name in sorted(self._due):
            while not self._pending[name] and not self.state.cases[name].finished:
                steps = steps_of(self.state, self.state.cases[name])
                if not steps:  # it waits for what a search proposes
                    self._due.discard(name)
                    break
                if not self._follow(name, steps, desk):
                    break
            if self._pending[name] or self.state.cases[name].finished:
                self._due.discard(name)

    def _follow(self, name: str, steps: tuple[object, ...], desk: Desk) -> bool:
        """Take steps of a case; whether something came of it."""
        for step in steps:
            if isinstance(step, Race):
                self._pending[step.job.case] += 1
                self._queued += 1
                heapq.heappush(self._races, (step.job.rung, self._queued, step.job))
            elif isinstance(step, Decide):
                self._record(events.RungDone(step.case, step.rung, step.leader, step.left))
                left = len(self.state.cases[name].alive) - 1
                self._observer.note(
                    f"{name}: rung {step.rung + 1}, {len(step.left)} left, {left} stay; {step.leader} leads"
                )
            elif isinstance(step, Settle):
                self._record(
                    events.Settled(step.case, step.leader, step.unseparated, step.reason, step.blocks)
                )
            elif isinstance(step, Confirm):
                return self._confirm(step, desk)
        return True

    def _confirm(self, step: Confirm, desk: Desk) -> bool:
        case = self.state.cases[step.case]
        asked = {each.unit for each in case.on_machines}
        free = {worker.unit: worker for worker in desk.workers if worker.unit not in asked}
        wanted = min(CONFIRMING_MACHINES, len(asked) + len(free)) - len(asked)
        if asked and (wanted <= 0 or case.confirmed_no_more):
            self._conclude(case)
            return True
        for worker in heapq.nsmallest(wanted, free.values(), key=lambda each: self._asked[each.name]):
            self._asked[worker.name] += 1
            number = self.state.sittings * _MOST_CONFIRMATIONS + self._asked.total()
            self._pending[step.case] += 1
            self._confirming.append(
                Confirming(step.case, step.arm, number, worker.name, worker.unit, step.blocks)
            )
        return wanted > 0

    def _conclude(self, case: CaseState) -> None:
        """All machines that were to be asked have answered."""
        result = concluded(case, self.state.setup.plan.margin)
        self._record(result)
        word = "holds" if result.holds else "does not hold"
        self._observer.note(
            f"{case.case}: {result.arm} {word}: {result.ratio:.3f}× "
            f"({result.low:.3f} to {result.high:.3f}); {result.reason}"
        )

    def _requeue(self, desk: Desk) -> None:
        """What was offered and nobody has claimed is for later, as another attempt. What was not offered waits as it
        is."""
        for work in [self._work.pop(task.key) for task in desk.withdraw()]:
            self._pending[work.case] -= 1
            self._due.add(work.case)

    def _hand_out(self, desk: Desk) -> None:
        """As many as the workers take, and few more: what is offered cannot be changed."""
        workers = desk.staying
        left_s = self._left_s()
        if left_s is not None and left_s <= self._longest_s + _CLOSING_S:
            return
        free = workers + max(1, int(_BACKLOG * workers)) - desk.for_anybody if workers else 0
        tasks: list[tuple[Work, Task]] = []
        racing = desk.for_anybody > 0
        while free > 0 and (work := self._next(racing)) is not None:
            tasks.append((work, self._task(work)))
            racing |= isinstance(work, Job)
            free -= 1
        self._record(*(event for work, task in tasks for event in started(work, task)))
        for work, task in tasks:
            self._work[task.key] = work
            desk.offer(task)

    def _next(self, racing: bool) -> Work | None:
        """A worker ends what it races with for a confirmation, and begins it again after it. So confirmations wait
        while anybody races, but where a limit may end the tuning: what it paid for is confirmed then."""
        if self._confirming and (self._limits.there_are or not (racing or self._races)):
            return self._confirming.popleft()
        return heapq.heappop(self._races)[-1] if self._races else None

    def _task(self, work: Work) -> Task:
        task = task_of(self.state.setup, work, self._verified, audits=self._audits)
        return replace(task, suite=self._suite, parcels=self._parcels(task.plan))

    # ---------------------------------------------------------------- back

    def _take(self, changes: list[Change], desk: Desk) -> None:
        happened: list[events.Event] = []
        returned: list[tuple[Work, Returned]] = []
        for change in changes:
            if isinstance(change, Admitted):
                worker = change.worker
                happened.append(
                    events.Joined(
                        worker.name, worker.unit, worker.kind, worker.host, worker.driver, worker.up_s
                    )
                )
                self._observer.note(f"{worker.name} joined: {worker.kind}")
            elif isinstance(change, Refused):
                self._observer.note(f"{change.worker.name} is not taken on: {change.reason}")
            elif isinstance(change, Gone):
                happened.append(events.Gone(change.worker, change.reason))
                self._observer.note(f"{change.worker} is gone: {change.reason}")
            else:
                work = self._work.pop(change.key)
                if not change.begun:  # a confirmation, which is another worker's
                    self._pending[work.case] -= 1
                    self._due.add(work.case)
                    continue
                self._longest_s = max(self._longest_s, change.seconds)
                if isinstance(work, Job):
                    self._verified.add(self.state.setup.case_of[work.case], change.right)
                returned.append((work, change))
                happened.append(self._result(work, change))
        # Members leave after their results, which are theirs.
        happened.sort(key=lambda event: isinstance(event, events.Gone))
        self._record(*happened)
        self._joining.clear()
        for work, change in returned:
            self._pending[work.case] -= 1
            self._due.add(work.case)
            self._judge_return(work, change, desk)
        for change in changes:
            if isinstance(change, Gone):
                self._forget(change.worker)

    def _result(self, work: Work, change: Returned) -> events.Event:
        if isinstance(work, Confirming):
            return self._confirmation(work, change)
        return race_returned(self.state, self._names, self._folder, work, change)

    def _confirmation(self, work: Confirming, change: Returned) -> events.Event:
        run = run_of(work)
        if change.error:
            self._observer.note(f"{work.case}: the confirmation on {work.worker} failed: {change.error}")
            lost = change.lost or change.unwritable
            return events.ConfirmationFailed(work.case, work.worker, change.error, lost)
        try:
            result = self._judge(self._folder / run, work.blocks)
        except UsageError as error:
            self._observer.note(f"{work.case}: {error}")
            return events.ConfirmationFailed(work.case, work.worker, str(error))
        return machine_confirmed(work, run, result)

    def _judge_return(self, work: Work, change: Returned, desk: Desk) -> None:
        """Who fails again and again leaves: an arm, or a device. Raises UnwritableError where it is this disk."""
        if change.error:
            require_room(self._folder)
        member = self.state.members.get(change.worker)
        if isinstance(work, Job):
            job = self.state.cases[work.case].jobs[work.name]
            if job.failures >= MOST_ATTEMPTS or job.losses >= MOST_LOSSES:
                reason = f"{job.failures + job.losses} races failed, the last: {change.error}"
                alive = self.state.cases[work.case].alive
                self._record(*(events.ArmOut(work.case, arm, reason) for arm in work.arms if arm in alive))
        if member is None:
            return
        if change.unwritable:
            self._quarantine(member, change.error, desk)
        elif change.error and not change.lost:
            self._observer.note(f"{change.worker}: {change.error}")
            failed = self._failed.setdefault(member.unit, set())
            failed.add(work.name if isinstance(work, Job) else work.case)
            if len(failed) >= FAILURES_OF_A_DEVICE:
                self._quarantine(member, f"{len(failed)} jobs failed on it, the last: {change.error}", desk)
        else:
            case = self.state.cases[work.case]
            if is_far_off(deviation(case.default_ms, member.unit)):
                off = usual_deviation([each.default_ms for each in self.state.cases.values()], member.unit)
                if is_far_off(off):
                    self._quarantine(
                        member, f"the default takes {off:+.0%} against the median of its kind", desk
                    )

    def _quarantine(self, member: events.Joined, reason: str, desk: Desk) -> None:
        if member.unit in self.state.quarantined:
            return
        self._record(events.Quarantined(member.unit, reason))
        self._observer.note(f"{member.worker} is quarantined: {reason}")
        desk.dismiss(member.worker)
        self._forget(member.worker)

    def _forget(self, worker: str) -> None:
        """Confirmations that wait for a worker which takes none any more are for another."""
        for work in [each for each in self._confirming if each.worker == worker]:
            self._confirming.remove(work)
            self._pending[work.case] -= 1
            self._due.add(work.case)


def _by_implementation(state: State) -> dict[str, str]:
    return {implementation: arm for arm, implementation in state.setup.arms.items()}
