"""The bench stage inside one process: per case, paired blocks of every implementation and the control."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cudadent42.base.errors import UsageError
from cudadent42.correctness.guards import Guard, damage, guarded, repair
from cudadent42.correctness.poison import poison_freed_memory
from cudadent42.correctness.second_draw import MOST_DRAWS, decided, is_marginal
from cudadent42.correctness.truth import find_truth, heartbeat, judge
from cudadent42.decisions.schedule import alternating, block_orders, control_name
from cudadent42.integrity.refill import FreshInputs
from cudadent42.integrity.watch import Watch
from cudadent42.model.cases import Case
from cudadent42.model.device import raise_if_device_lost, synchronize, use_device, use_threads
from cudadent42.model.events import (
    Accounted,
    BenchLog,
    BlockMeasured,
    CaseVerified,
    Doing,
    Event,
    IntegrityFound,
    KeptApart,
    Mark,
    Message,
    Progress,
    Skipped,
    no_mark,
)
from cudadent42.model.implementations import NOT_DONE, Call, Implementation, unplanned
from cudadent42.model.integrity import Spent
from cudadent42.model.records import BenchReport, Plan, Sample, TimerKind, VerifiedCase, VerifyReport
from cudadent42.operations import numerics
from cudadent42.operations.interface import Inputs
from cudadent42.registry import get, load_all, trusted
from cudadent42.stages.bench.checks import Checks, SeedSource, random_seed
from cudadent42.stages.bench.conditions import ConditionWatch
from cudadent42.stages.bench.excluded import not_timed_anywhere, not_timed_on
from cudadent42.stages.bench.gpu_state import open_gpu_state
from cudadent42.stages.bench.idle import processor_window_s
from cudadent42.stages.bench.planning import time_planning
from cudadent42.stages.bench.stopping import MIN_BUDGET_BLOCKS, Pace, pilot_blocks
from cudadent42.stages.bench.visits import Visit, estimated_cost, visits
from cudadent42.timing.choice import timer_for
from cudadent42.timing.flush import input_sets
from cudadent42.timing.memory import memory_mb
from cudadent42.timing.timers import Reading, median_reading, passes_for

START_WARM_UP_S = 1.0
"""Of the first case, before its warm-up blocks: clocks rise, threads start, code is paged in."""

STILL_WARM_S = 5.0
"""So long after a measurement a process's threads and pages, and a GPU's clocks, are as they were."""

AGAIN_WARM_UP_S = 0.1
"""In place of ``START_WARM_UP_S``, in a process that is still warm."""

RETURN_WARM_UP = 1
"""Warm-up blocks when a case is visited again: it is calibrated, only caches and threads are cold."""

NEAR_WINDOWS = 2
"""Times as many calls that fill a window: up to here they are near. What differs more in speed is called right in any
windows."""

AFTER_TIMING = "after timing"
"""``VerifiedCase.input`` of the outputs that are checked again."""


@dataclass(frozen=True)
class _Entrant:
    """One row of a block, ready to be timed."""

    name: str
    implementation: Implementation
    read: Callable[[], Reading]
    memory_mb: float
    inner: int | None = None
    """Calls of a reading, known where it is prepared again for every visit."""
    window_s: float = 0.0
    """What a reading takes; known where a block has several."""


@dataclass(frozen=True)
class _Ready:
    """A case between its visits."""

    inputs: FreshInputs
    entrants: Sequence[_Entrant]
    guards: Sequence[Guard] = ()
    """Of the inputs."""
    passes: int = 1
    """Windows of each in a block."""
    last: Mapping[str, Reading] = field(default_factory=dict)
    """Each one's last reading."""


def measure(
    plan: Plan,
    verified: VerifyReport,
    *,
    emit: Callable[[Event], None],
    start: int = 0,
    dropped: Mapping[str, str] | None = None,
    measured: Mapping[str, int] | None = None,
    barred: Mapping[str, str] | None = None,
    mark: Mark = no_mark,
    started_s: float | None = None,
    watch: Watch | None = None,
    fresh_seed: SeedSource = random_seed,
    last_measured_s: float | None = None,
) -> BenchReport:
    """Times the plan, leaving out what ``verified`` failed or skipped, from visit number ``start`` on.

    The cases are visited in turn, in several rounds (``schedule.rounds``), so a disturbance of some seconds
    touches a few blocks of many cases, where medians do not mind it, and not all blocks of one. Emits one
    ``BlockMeasured`` per counted block; warm-up blocks are thrown away. ``dropped`` are reasons to leave out
    a case (``Case.id``) or one implementation of it (``Case.id/implementation``); ``measured`` are blocks of a case
    that there are already; ``barred`` gives reasons to leave out whole implementations; ``mark`` is told of each
    sample before it is taken; ``started_s`` is when the stage began by ``time.monotonic`` (now, if None),
    for the samples' timestamps. ``watch`` was begun before any candidate was loaded; ``fresh_seed`` gives seeds of
    inputs, which nobody is to know before. ``last_measured_s`` is when this process last measured (``time.monotonic``).
    Raises ``UsageError`` for a plan that this device cannot do.
    """
    if plan.timer in (TimerKind.GRAPH, TimerKind.QUEUE) and not plan.device.startswith("cuda"):
        raise UsageError(
            f"the {plan.timer.value} timer needs a CUDA device, not {plan.device}; use --timer call"
        )
    if plan.timer is TimerKind.CPU and plan.device != "cpu":
        raise UsageError(f"the cpu timer is for the CPU, not for {plan.device}; use --timer call")
    wall_s, ran_s = time.perf_counter(), time.process_time()
    use_device(plan.device)
    use_threads(plan.timer)
    log = BenchLog()

    def tell(event: Event) -> None:
        log.add(event)
        emit(event)

    watch = watch or Watch()
    watch.begin(trusted(plan), lambda finding: tell(IntegrityFound(finding)))
    implementations, unusable = load_all(plan, barred or {}, start, mark, watch.loading)
    implementations |= _own_control(plan, implementations)
    dropped = dropped or {}
    unfit = {**dropped, **not_timed_anywhere(plan, verified, unusable)}
    began_s = time.monotonic() if started_s is None else started_s
    checks = Checks(plan, watch, tell, fresh_seed)
    session = _Session(plan, implementations, unfit, tell, mark, began_s, checks)
    session.warm_up_s = start_warm_up_s(last_measured_s)
    planned = visits(plan)
    cost = [(len(visit.blocks) or plan.warmup) * estimated_cost(plan, visit.case) for visit in planned]
    for index in range(start, len(planned)):
        visit = planned[index]
        if visit.case.id not in dropped:
            session.visit(index, visit.after((measured or {}).get(visit.case.id, 0)))
        fraction = max(sum(cost[: index + 1]) / sum(cost), session.spent)
        tell(Progress("bench", index + 1, len(planned), visit.case.id, fraction))
    watch.look_deep(plan.implementations, with_code=plan.device == "cpu")
    for note in watch.notes():
        tell(KeptApart(note))
    measuring = Spent(time.process_time() - ran_s, time.perf_counter() - wall_s)
    tell(Accounted(measuring, watch.account.settled()))
    return log.report()


def start_warm_up_s(last_measured_s: float | None) -> float:
    """Of a stage in a process that measured last at this time, by ``time.monotonic``."""
    warm = last_measured_s is not None and time.monotonic() - last_measured_s < STILL_WARM_S
    return AGAIN_WARM_UP_S if warm else START_WARM_UP_S


class _Session:
    """What the cases of one stage share: timer, clock, and the state of the machine."""

    def __init__(
        self,
        plan: Plan,
        implementations: Mapping[str, Implementation],
        unfit: Mapping[str, str],
        emit: Callable[[Event], None],
        mark: Mark,
        started_s: float,
        checks: Checks,
    ) -> None:
        self.plan = plan
        self.checks = checks
        self.implementations = implementations
        self.emit = emit
        self.mark = mark
        self.unfit = unfit
        self.timer = timer_for(plan, kin=checks.watch.kin)
        gpu = None
        if plan.device.startswith("cuda"):
            gpu, problem = open_gpu_state(plan.device)
            if problem:
                emit(Message(problem))
        self.watch = ConditionWatch(gpu)
        self.started_s = started_s
        self.warm_up_s = START_WARM_UP_S
        """That are still to be spent."""
        self.ready: dict[str, _Ready] = {}
        self.finished: set[str] = set()
        self.latest = ""
        self.pace = Pace(plan)

    @property
    def spent(self) -> float:
        """Share of the budget; 0 without one."""
        budget_s = self.plan.budget_s
        return 0.0 if budget_s is None else min(1.0, (time.monotonic() - self.started_s) / budget_s)

    def visit(self, index: int, visit: Visit) -> None:
        """One round of one case: its blocks, and after the last one the check of its outputs."""
        case, blocks = visit.case, visit.blocks
        if case.id in self.finished:
            return
        if self.spent >= visit.share and blocks.start >= MIN_BUDGET_BLOCKS:
            self._finish(index, case)
            return
        ready = self.ready.get(case.id)
        warmup = min(RETURN_WARM_UP, self.plan.warmup)
        if ready is None:
            ready = self.ready[case.id] = self._make_ready(index, case)
            warmup = self.plan.warmup if blocks else pilot_blocks(self.plan)
        elif self.latest == case.id:
            warmup = 0
        if ready.entrants:
            ready = self._with_fresh_inputs(case, ready)
            last = self._run_blocks(index, case, ready, blocks, warmup)
            self.ready[case.id] = replace(ready, last=last)
        self.latest = case.id
        if visit.forecast and (forecast := self.pace.forecast()):
            self.emit(Message(forecast))
        if blocks and (blocks.stop == self.plan.repeats or self.pace.precise(case.id)):
            self._finish(index, case)

    def _finish(self, index: int, case: Case) -> None:
        """The check of the last outputs; then the case's memory is free for the cases to come."""
        ready = self.ready.pop(case.id, None)
        self.finished.add(case.id)
        if ready is not None:
            if ready.last:
                base = next(each for each in ready.entrants if each.name == self.plan.baseline)
                self.checks.look_at_end(case, self.checks.judged(ready.last), base.read)
                self._recheck(index, case, ready)
            if written := damage(ready.guards):
                self.emit(Skipped("bench", case.id, f"while it was timed, one of them {written}"))

    def _make_ready(self, index: int, case: Case) -> _Ready:
        """Inputs and calibrated implementations; no entrants where there is nothing to compare."""
        plan = self.plan
        reasons = not_timed_on(plan, case, self.unfit)
        for key, reason in reasons.items():
            self.emit(Skipped("bench", key, reason))
        if case.id in reasons:
            return _Ready(FreshInputs(case, ()), ())
        names = [name for name in plan.implementations if f"{case.id}/{name}" not in reasons]
        count = input_sets(plan, case)
        sets, guards = guarded(numerics(case).input_sets(case, plan.seed, count, plan.device))
        inputs = FreshInputs(case, sets)
        self.checks.refill(inputs)
        entrants = self._prepare(index, case, names, inputs, guards)
        if not self._worth_timing(entrants):
            self.emit(Skipped("bench", case.id, "nothing left to compare"))
            return _Ready(FreshInputs(case, ()), ())
        slowest_s = max(entrant.window_s for entrant in entrants)
        return _Ready(inputs, entrants, guards, passes_for(self.plan.timer, slowest_s))

    def _worth_timing(self, entrants: Sequence[_Entrant]) -> bool:
        """The baseline is there, and a rival where the plan has one (else the control)."""
        control = control_name(self.plan.baseline)
        names = {entrant.implementation.name for entrant in entrants} - {control}
        alone = len(self.plan.implementations) == 1 and self.plan.control
        return self.plan.baseline in names and (len(names) > 1 or alone)

    def _prepare(
        self,
        index: int,
        case: Case,
        names: Sequence[str],
        inputs: FreshInputs,
        guards: Sequence[Guard],
    ) -> list[_Entrant]:
        """Baseline first, its control after it, then the rest."""
        plan = self.plan
        entrants: list[_Entrant] = []
        inner: int | None = None
        control = control_name(plan.baseline)
        if control in self.implementations:
            names = [*names, control]
        for name in sorted(names, key=lambda name: (name != plan.baseline, name != control)):
            self.mark(Doing(index, case.id, name))
            implementation = self.implementations[name]
            try:
                with self.checks.watch.turn(name), implementation.context():
                    lent = inputs.lend(kept=name in self.checks.watch.trusted)
                    prepared = [implementation.prepare(case, each) for each in lent]
                    calls = [unplanned(each) for each in prepared]
                    if name not in self.checks.watch.trusted:
                        self.checks.finished(name, case, calls[0], inputs)
                    self._warm_up(calls)
                    time_planning(plan, f"{case.id}/{name}", prepared[0], self.emit)
                    memory = memory_mb(calls[0], plan.device)
                    read = self._calibrated(calls, inner)
                    window_s = processor_window_s(read) if plan.timer is TimerKind.CPU else 0.0
                    if inner is None and (plan.versions or plan.device == "cpu"):
                        inner = read().inner
                    again = read().inner if self._prepares_again(implementation) else None
            except NOT_DONE as error:
                self.emit(Skipped("bench", f"{case.id}/{name}", str(error)))
                continue
            except Exception as error:  # noqa: BLE001 - a candidate may raise anything, and that is a result
                raise_if_device_lost(plan.device)
                reason = f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                self.emit(Skipped("bench", f"{case.id}/{name}", reason))
                continue
            if written := damage(guards):
                self.emit(Skipped("bench", f"{case.id}/{name}", written))
                repair(guards)
                continue
            entrants.append(_Entrant(name, implementation, read, memory, again, window_s))
            if name == plan.baseline and plan.control and control not in self.implementations:
                entrants.append(_Entrant(control, implementation, read, memory, again, window_s))
        return entrants

    def _calibrated(self, calls: Sequence[Call], inner: int | None) -> Callable[[], Reading]:
        """``inner``: of the baseline's windows; None where these calls' own number is to be taken.

        Versions have windows of as many calls as the baseline's, and on CPU so has everything whose own number is near:
        the first call of a window meets what others left in the caches, so on a busy machine a window of one call and
        one of two differ by a tenth for the same code, in every block alike.
        """
        if inner is None or self.plan.versions:
            return self.timer.calibrate(calls, inner)
        read = self.timer.calibrate(calls)
        own = read().inner
        near = own != inner and max(own, inner) <= NEAR_WINDOWS * min(own, inner)
        return self.timer.calibrate(calls, inner) if near else read

    def _prepares_again(self, implementation: Implementation) -> bool:
        return implementation.copies_inputs and implementation.name in self.checks.watch.trusted

    def _with_fresh_inputs(self, case: Case, ready: _Ready) -> _Ready:
        """New values in the inputs' memory, and in the copies of those that make some."""
        self.checks.refill(ready.inputs)
        read: dict[str, Callable[[], Reading]] = {}
        for entrant in ready.entrants:
            each = entrant.implementation
            if self._prepares_again(each) and each.name not in read:
                with self.checks.account.of("refill"), each.context():
                    calls = [unplanned(each.prepare(case, inputs)) for inputs in ready.inputs.sets]
                    read[each.name] = self.timer.calibrate(calls, entrant.inner)
        entrants = [
            replace(entrant, read=read.get(entrant.implementation.name, entrant.read))
            for entrant in ready.entrants
        ]
        return replace(ready, entrants=entrants)

    def _warm_up(self, calls: Sequence[Call]) -> None:
        """Once per stage, by time; each case adds its warm-up blocks."""
        stop = time.perf_counter() + self.warm_up_s
        while True:
            calls[0]()
            synchronize(self.plan.device)
            if time.perf_counter() >= stop:
                break
        self.warm_up_s = 0.0

    def _run_blocks(
        self, index: int, case: Case, ready: _Ready, blocks: range, warmup: int
    ) -> dict[str, Reading]:
        """Runs warm-up blocks, which do not count, and ``blocks``; returns each one's last reading."""
        plan = self.plan
        by_name = {entrant.name: entrant for entrant in ready.entrants}
        counted = block_orders(list(by_name), plan.repeats, plan.seed, case.id)
        uncounted = block_orders(list(by_name), warmup, plan.seed, f"{case.id}/warm-up")
        last: dict[str, Reading] = {}
        checked = self.checks.chosen(blocks)
        for block, order in [(-1, order) for order in uncounted] + [(b, counted[b]) for b in blocks]:
            self.checks.before_block()
            self.watch.start()
            poisoned = ready.inputs.sets if block == checked else ()
            taken, seen = self._take(index, case, [by_name[name] for name in order], ready.passes, poisoned)
            last = {entrant.name: reading for entrant, reading, _ in taken}
            conditions, flags = self.watch.stop(case.id, block)
            latencies = {entrant.name: reading.latency_ms for entrant, reading, _ in taken}
            if block == checked:
                self.checks.after_block(case, ready.inputs, seen, counted=block >= 0)
            if block < 0:
                self.pace.warmed_up(case.id, latencies, conditions.duration_s)
                continue
            self.pace.measured(case.id, latencies)
            samples = tuple(
                Sample(
                    case=case.id,
                    implementation=entrant.name,
                    block=block,
                    position=position,
                    latency_ms=reading.latency_ms,
                    inner=reading.inner,
                    memory_mb=entrant.memory_mb,
                    timestamp_s=moment,
                    flags=flags,
                )
                for position, (entrant, reading, moment) in enumerate(taken)
            )
            self.emit(BlockMeasured(samples, conditions))
        return last

    def _take(
        self,
        index: int,
        case: Case,
        order: Sequence[_Entrant],
        passes: int,
        poisoned: Sequence[Inputs] = (),
    ) -> tuple[list[tuple[_Entrant, Reading, float]], dict[str, Reading]]:
        """One block: each entrant's reading, and when it was taken (the last time, where there are several passes).

        Settings are looked at in one pass, by chance, whose readings are handed back too. Where the block's outputs are
        checked, memory of the size of those of ``poisoned`` is full of NaN before each turn of that pass."""
        looked = self.checks.chosen_pass(passes)
        looks = bool(poisoned) or self.checks.looks_at_settings()
        readings: dict[str, list[Reading]] = {entrant.name: [] for entrant in order}
        moments: dict[str, float] = {}
        for number, turn in enumerate(alternating(order, passes)):
            for entrant in turn:
                self.mark(Doing(index, case.id, entrant.name))
                if poisoned and number == looked:
                    with self.checks.account.of("outputs"):
                        for inputs in poisoned:
                            poison_freed_memory(inputs)
                own_turn = self.checks.watch.counted_turn(
                    entrant.implementation.name, case.id, look=looks and number == looked
                )
                with own_turn, entrant.implementation.context():
                    readings[entrant.name].append(entrant.read())
                moments[entrant.name] = time.monotonic() - self.started_s
        taken = [(each, median_reading(readings[each.name]), moments[each.name]) for each in order]
        return taken, {name: each[looked] for name, each in readings.items()}

    def _recheck(self, index: int, case: Case, ready: _Ready) -> None:
        """Verifies the outputs of the last timed calls: a kernel that was right before timing may race after it.

        Those that are a little over a bound are timed again on other values, for blocks that do not count.
        """
        names = self.checks.judged(ready.last)
        if ready.inputs.refillable and self.checks.were_changed(case, ready.inputs, names):
            return
        verdicts = self._judged(case, ready)
        for _ in range(MOST_DRAWS - 1):
            marginal = [each for each in verdicts if is_marginal(each)]
            if not marginal or not ready.inputs.refillable:
                break
            ready = self._with_fresh_inputs(case, ready)
            for _ in range(1 + RETURN_WARM_UP):  # as in a visit: what counts there comes after a warm-up
                taken, _ = self._take(index, case, ready.entrants, ready.passes)
            last = {entrant.name: reading for entrant, reading, _ in taken}
            second = {each.implementation: each for each in self._judged(case, replace(ready, last=last))}
            verdicts = [
                decided(each, second[each.implementation]) if each in marginal else each for each in verdicts
            ]
        for verdict in verdicts:
            self.emit(CaseVerified(verdict))
            if not verdict.passed:
                reason = f"its output after timing is wrong: {verdict.detail}"
                self.emit(Skipped("bench", f"{case.id}/{verdict.implementation}", reason))

    def _judged(self, case: Case, ready: _Ready) -> list[VerifiedCase]:
        """The outputs of the last readings, those apart that were found wrong before."""
        names = [
            name for name in self.checks.judged(ready.last) if f"{case.id}/{name}" not in self.checks.wrong
        ]
        verdicts = []
        for number in sorted({ready.last[name].input_set for name in names}):
            truth = find_truth(case, ready.inputs.sets[number], heartbeat(self.emit))
            verdicts += [
                judge(truth, name, ready.last[name].output, AFTER_TIMING)
                for name in names
                if ready.last[name].input_set == number
            ]
        return verdicts


def _own_control(plan: Plan, usable: Collection[str]) -> dict[str, Implementation]:
    """Where versions are raced, the control is one more copy of the baseline, with modules and state of its own.

    The baseline and a control that share them keep each other's code warm, which looks like an advantage over the
    rival; and what chance of memory layout does to a copy shows in the control too.
    """
    if not plan.versions or not plan.control or plan.baseline not in usable:
        return {}
    name = control_name(plan.baseline)
    versions = {**plan.versions, name: plan.versions[plan.baseline]}
    return {name: get(name, plan.operation, versions)}
