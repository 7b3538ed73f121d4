"""The bench stage inside one process: per case, paired blocks of every implementation and the control."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cudadent42.bench.conditions import ConditionWatch
from cudadent42.bench.cuda_timers import cuda_timer
from cudadent42.bench.flush import flush_for
from cudadent42.bench.gpu_state import open_gpu_state
from cudadent42.bench.memory import memory_mb
from cudadent42.bench.schedule import block_orders, control_name
from cudadent42.bench.timers import CPU_WINDOW_S, ClockTimer, Reading, Timer
from cudadent42.device import synchronize, use_device
from cudadent42.errors import UsageError
from cudadent42.events import BenchLog, BlockMeasured, CaseVerified, Doing, Event, Message, Progress, Skipped
from cudadent42.implementations import Call, Implementation, UnsupportedCaseError
from cudadent42.inputs import Inputs, random_inputs
from cudadent42.records import BenchReport, Case, Plan, Sample, TimerKind, VerifyReport
from cudadent42.verify import Mark, find_truth, judge, load_all, no_mark, not_timed, raise_if_device_lost

INPUT_SETS = 3
"""Input sets that calls rotate over: new pointers at each call, so nothing can be remembered between calls.
"""

START_WARM_UP_S = 1.0
"""Of the first case, before its warm-up blocks: clocks rise, threads start, code is paged in."""

AFTER_TIMING = "after timing"
"""``VerifiedCase.input`` of the outputs that are checked again."""

_CPU_FLOPS_PER_S = 1.5e11
"""Only for the estimate of progress: how time divides between large cases and fixed costs."""


@dataclass(frozen=True)
class _Entrant:
    """One row of a block, ready to be timed."""

    name: str
    implementation: Implementation
    read: Callable[[], Reading]
    memory_mb: float


def measure(
    plan: Plan,
    verified: VerifyReport,
    *,
    emit: Callable[[Event], None],
    start: int = 0,
    barred: Mapping[str, str] | None = None,
    mark: Mark = no_mark,
    started_s: float | None = None,
) -> BenchReport:
    """Times ``plan.cases[start:]``, leaving out what ``verified`` failed or skipped.

    Emits one ``BlockMeasured`` per counted block; warm-up blocks are thrown away. ``barred`` gives reasons
    to leave out whole implementations; ``mark`` is told of each sample before it is taken;
    ``started_s`` is when the stage began by ``time.monotonic`` (now, if None), for the samples' timestamps.
    Raises ``UsageError`` for a plan that this device cannot do.
    """
    if plan.timer is TimerKind.GRAPH and not plan.device.startswith("cuda"):
        raise UsageError(f"the graph timer needs a CUDA device, not {plan.device}; use --timer call")
    use_device(plan.device)
    log = BenchLog()

    def tell(event: Event) -> None:
        log.add(event)
        emit(event)

    implementations, unusable = load_all(plan, barred or {}, start, mark)
    unfit = _unfit(plan, verified, unusable)
    began_s = time.monotonic() if started_s is None else started_s
    session = _Session(plan, implementations, unfit, tell, mark, began_s)
    cost = [_estimated_cost(plan, case) for case in plan.cases]
    for index in range(start, len(plan.cases)):
        session.run_case(index, sum(cost[:index]) / sum(cost), cost[index] / sum(cost))
    return log.report()


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
    ) -> None:
        self.plan = plan
        self.implementations = implementations
        self.emit = emit
        self.mark = mark
        self.unfit = unfit
        self.timer = _timer(plan)
        gpu = None
        if plan.device.startswith("cuda"):
            gpu, problem = open_gpu_state(plan.device)
            if problem:
                emit(Message(problem))
        self.watch = ConditionWatch(gpu)
        self.started_s = started_s
        self.warm = False

    def run_case(self, index: int, fraction: float, share: float) -> None:
        plan, case = self.plan, self.plan.cases[index]
        reasons = _reasons(plan, case, self.unfit)
        for key, reason in reasons.items():
            self.emit(Skipped("bench", key, reason))
        names = [name for name in plan.implementations if f"{case.id}/{name}" not in reasons]
        if case.id not in reasons:
            inputs = [random_inputs(case, plan.seed, i, plan.device) for i in range(INPUT_SETS)]
            entrants = self._prepare(index, names, inputs)
            if self._worth_timing(entrants):
                last: dict[str, Reading] = {}
                for done in self._blocks(index, entrants, last):
                    part = fraction + share * done / plan.repeats
                    self.emit(Progress("bench", index, len(plan.cases), case.id, part))
                self._recheck(case, inputs, last)
            else:
                self.emit(Skipped("bench", case.id, "nothing left to compare"))
        self.emit(Progress("bench", index + 1, len(plan.cases), case.id, fraction + share))

    def _worth_timing(self, entrants: Sequence[_Entrant]) -> bool:
        """The baseline is there, and a rival where the plan has one (else the control)."""
        names = {entrant.implementation.name for entrant in entrants}
        alone = len(self.plan.implementations) == 1 and self.plan.control
        return self.plan.baseline in names and (len(names) > 1 or alone)

    def _prepare(self, index: int, names: Sequence[str], inputs: Sequence[Inputs]) -> list[_Entrant]:
        """Baseline first, its control after it, then the rest."""
        plan, case = self.plan, self.plan.cases[index]
        entrants: list[_Entrant] = []
        for name in sorted(names, key=lambda name: name != plan.baseline):
            self.mark(Doing(index, case.id, name))
            implementation = self.implementations[name]
            try:
                with implementation.context():
                    calls = [implementation.prepare(case, each) for each in inputs]
                    self._warm_up(calls)
                    memory = memory_mb(calls[0], plan.device)
                    read = self.timer.calibrate(calls)
            except (UnsupportedCaseError, NotImplementedError) as error:
                self.emit(Skipped("bench", f"{case.id}/{name}", str(error)))
                continue
            except Exception as error:  # noqa: BLE001 - a candidate may raise anything, and that is a result
                raise_if_device_lost(plan.device)
                reason = f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                self.emit(Skipped("bench", f"{case.id}/{name}", reason))
                continue
            entrants.append(_Entrant(name, implementation, read, memory))
            if name == plan.baseline and plan.control:
                entrants.append(_Entrant(control_name(name), implementation, read, memory))
        return entrants

    def _warm_up(self, calls: Sequence[Call]) -> None:
        """Once per stage, by time; each case adds its warm-up blocks."""
        stop = time.perf_counter() + (0.0 if self.warm else START_WARM_UP_S)
        while True:
            calls[0]()
            synchronize(self.plan.device)
            if time.perf_counter() >= stop:
                break
        self.warm = True

    def _blocks(self, index: int, entrants: Sequence[_Entrant], last: dict[str, Reading]) -> Iterator[int]:
        """Runs the blocks and yields the number of counted ones; leaves each one's last reading in
        ``last``."""
        plan, case = self.plan, self.plan.cases[index]
        by_name = {entrant.name: entrant for entrant in entrants}
        orders = block_orders(list(by_name), plan.warmup + plan.repeats, plan.seed, case.id)
        for number, order in enumerate(orders):
            self.watch.start()
            taken: list[tuple[_Entrant, Reading, float]] = []
            for name in order:
                entrant = by_name[name]
                self.mark(Doing(index, case.id, name))
                with entrant.implementation.context():
                    reading = entrant.read()
                taken.append((entrant, reading, time.monotonic() - self.started_s))
                last[name] = reading
            block = number - plan.warmup
            conditions, flags = self.watch.stop(case.id, block)
            if block < 0:
                continue
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
            yield block + 1

    def _recheck(self, case: Case, inputs: Sequence[Inputs], last: Mapping[str, Reading]) -> None:
        """Verifies the outputs of the last timed calls: a kernel that was right before timing may race
        after it."""
        sets = sorted({reading.input_set for reading in last.values()})
        for number in sets:
            truth = find_truth(case, inputs[number])
            for name, reading in last.items():
                if reading.input_set != number or name == control_name(self.plan.baseline):
                    continue
                result = judge(truth, name, reading.output, AFTER_TIMING)
                self.emit(CaseVerified(result))
                if not result.passed:
                    reason = f"its output after timing is wrong: {result.detail}"
                    self.emit(Skipped("bench", f"{case.id}/{name}", reason))


def _unfit(plan: Plan, verified: VerifyReport, unusable: Mapping[str, str]) -> dict[str, str]:
    """``case/implementation`` that is not timed, with the reason."""
    reasons = not_timed(plan, verified)
    for name, reason in unusable.items():
        reasons |= {f"{case.id}/{name}": reason for case in plan.cases}
    return reasons


def _reasons(plan: Plan, case: Case, unfit: Mapping[str, str]) -> dict[str, str]:
    """Why implementations, or the whole case, cannot be timed."""
    keys = {name: f"{case.id}/{name}" for name in plan.implementations}
    found = {key: unfit[key] for key in keys.values() if key in unfit}
    rivals = [key for name, key in keys.items() if name != plan.baseline]
    if keys[plan.baseline] in found:
        found[case.id] = f"the baseline {plan.baseline} cannot be timed: {found[keys[plan.baseline]]}"
    elif rivals and all(key in found for key in rivals):
        found[case.id] = found[rivals[0]]
    return found


def _timer(plan: Plan) -> Timer:
    flush = flush_for(plan)
    if plan.device.startswith("cuda"):
        return cuda_timer(plan.timer, plan.device, flush)
    return ClockTimer(flush)


def _estimated_cost(plan: Plan, case: Case) -> float:
    blocks = plan.warmup + plan.repeats
    per_call = max(case.flops / _CPU_FLOPS_PER_S, CPU_WINDOW_S)
    return blocks * per_call * (len(plan.implementations) + plan.control)
