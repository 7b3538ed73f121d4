"""A stage in a worker, to its end: whoever costs a worker has failed, and a new one goes on after it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, overload

from cudadent42.base.errors import MachineNotReadyError
from cudadent42.model.events import (
    LOADING,
    RANDOM,
    WHILE_TIMING,
    BenchLog,
    BlockMeasured,
    BuildLog,
    CaseVerified,
    Doing,
    Event,
    IntegrityFound,
    KeptApart,
    KernelFailed,
    Message,
    PeaksMeasured,
    Skipped,
    WorkerLost,
)
from cudadent42.model.integrity import Breach, Finding, Grade
from cudadent42.model.records import (
    BenchReport,
    BuildFailure,
    BuildReport,
    Plan,
    Scope,
    TimerKind,
    VerifiedCase,
    VerifyReport,
)
from cudadent42.registry import trusted
from cudadent42.worker.child import Request
from cudadent42.worker.parent import ForgedError, HungError, LostError, OnEvent, Worker

MAX_LOSSES = 3
"""An implementation that cost this many workers is left out of the rest of the stage."""

MAX_HANGS = 2
"""The same, where it hung: each costs ``TIMEOUT_S``."""

CLOCKS_FACTOR, CLOCKS_MS = 1.05, 1.0
"""By which two clocks may differ: a GPU's and the host's, or a block's end and the moment in which it is heard of."""

Stage = Literal["build", "verify", "bench"]


@overload
def run_stage(
    stage: Literal["build"],
    plan: Plan,
    *,
    on_event: OnEvent,
    verified: None = None,
    worker: Worker | None = None,
) -> BuildReport: ...


@overload
def run_stage(
    stage: Literal["verify"],
    plan: Plan,
    *,
    on_event: OnEvent,
    verified: None = None,
    worker: Worker | None = None,
    scope: Scope = Scope.ALL,
) -> VerifyReport: ...


@overload
def run_stage(
    stage: Literal["bench"],
    plan: Plan,
    *,
    on_event: OnEvent,
    verified: VerifyReport | None = None,
    worker: Worker | None = None,
) -> BenchReport: ...


def run_stage(
    stage: Stage,
    plan: Plan,
    *,
    on_event: OnEvent,
    verified: VerifyReport | None = None,
    worker: Worker | None = None,
    scope: Scope = Scope.ALL,
) -> BuildReport | VerifyReport | BenchReport:
    """Builds the versions of a plan, verifies or times it in ``worker`` (one of its own if None), whatever the
    candidates do. ``scope``: of verifying.

    Every event goes to ``on_event`` as it happens, in this thread; measuring waits for it to return. On
    Ctrl-C the worker is ended and KeyboardInterrupt raised; a ``BenchLog`` that was fed from ``on_event``
    has all blocks so far. Raises ``LabError`` for a plan that cannot be done and ``MachineNotReadyError``
    if no worker can be started.
    """
    if worker is None:
        with Worker() as own:
            return _run(stage, plan, verified, own, on_event, scope)
    return _run(stage, plan, verified, worker, on_event, scope)


def _run(
    stage: Stage,
    plan: Plan,
    verified: VerifyReport | None,
    worker: Worker,
    on_event: OnEvent,
    scope: Scope,
) -> BuildReport | VerifyReport | BenchReport:
    log = _LOGS[stage]()

    blocks: dict[tuple[str, int], Doing | None] = {}
    last_block_s = time.monotonic()
    disagreeing: dict[str, Finding] = {}
    """By case: what this process found, which ends no case."""

    def tell(event: Event) -> None:
        nonlocal last_block_s
        if isinstance(event, BlockMeasured):
            block = event.conditions.case, event.conditions.block
            doing = worker.doing()
            if why := _forged(event, block in blocks, doing):
                error = ForgedError(f"its event pipe was written to by others ({why}); killed")
                error.doing = _writer(plan, blocks.get(block), doing)
                raise error
            blocks[block] = doing
            finding = _longer_than_it_took(plan, event, time.monotonic() - last_block_s)
            if finding is not None and finding.case not in disagreeing:
                disagreeing[finding.case] = finding
                log.add(IntegrityFound(finding))
                on_event(IntegrityFound(finding))
        log.add(event)
        on_event(event)
        if isinstance(event, BlockMeasured):
            last_block_s = time.monotonic()

    request = Request(stage, plan, verified=verified, scope=scope, started_s=time.monotonic())
    losses: Counter[str] = Counter()
    while True:
        try:
            worker.run(request, tell)
        except LostError as error:
            request = _after_loss(request, error, losses, log, tell)
        else:
            if not losses:
                for doing in _not_judged(plan, log, tuple(disagreeing.values()), scope):
                    tell(CaseVerified(_failed(doing, doing.input, ENDED_EARLY)))
            return log.report()


ENDED_EARLY = "its event pipe was written to by others (the stage ended before its outputs were verified)"


def _not_judged(
    plan: Plan, log: BuildLog | _VerifyLog | BenchLog, no_reasons: Sequence[Finding], scope: Scope
) -> Iterator[Doing]:
    """Of a stage that says it has ended: what it has left out, though no worker was lost and no reason given. A finding
    of the worker's is a reason to end a case; ``no_reasons`` are findings of this process."""
    if isinstance(log, BuildLog):
        return
    bench: BenchReport | None = None
    if isinstance(log, BenchLog):
        bench = log.report()
        results: Sequence[VerifiedCase] = bench.rechecked
    else:
        results = log.cases
    judged = {(each.case, each.implementation) for each in results}
    excused = {each.case for each in bench.findings if each not in no_reasons} if bench is not None else set()
    timed = {(each.case, each.implementation) for each in bench.samples} if bench is not None else set()
    reasons = log.report().skipped
    trusted_names = trusted(plan)
    if scope is Scope.COMMON:
        # Which inputs there are is what the others were asked. Where nobody was, nobody was judged.
        asked = dict.fromkeys(each.case for each in results) or dict.fromkeys(case.id for case in plan.cases)
        for name in plan.implementations:
            if name not in trusted_names and name not in reasons:
                missing = [id for id in asked if (id, name) not in judged and f"{id}/{name}" not in reasons]
                yield from (Doing(0, id, name, id.partition("/")[0]) for id in missing)
        return
    for case in plan.cases:
        for name in plan.implementations:
            wanted = name not in trusted_names and (bench is None or (case.id, name) in timed)
            keys = {case.id, name, f"{case.id}/{name}"}
            if (
                wanted
                and (case.id, name) not in judged
                and case.id not in excused
                and not keys & reasons.keys()
            ):
                yield Doing(0, case.id, name, WHILE_TIMING if bench is not None else RANDOM)


def _forged(event: BlockMeasured, again: bool, doing: Doing | None) -> str:
    """What about a block is not as the lab would have written it."""
    case, block = event.conditions.case, event.conditions.block
    if again:
        return f"block {block} twice"
    if {(sample.case, sample.block) for sample in event.samples} != {(case, block)}:
        return f"samples of other blocks in block {block}"
    if doing is not None and doing.case != case:
        return f"a block of {case} while {doing.case} was timed"
    return ""


def _longer_than_it_took(plan: Plan, event: BlockMeasured, passed_s: float) -> Finding | None:
    """Where a block's calls took longer by the worker's clock than passed by this process's since the block before it:
    so latencies were written that nobody measured, such as longer ones of the baseline's.

    Not of processor time, of which several threads use more than passes."""
    took_ms = sum(sample.latency_ms * sample.inner for sample in event.samples)
    if plan.timer is TimerKind.CPU or took_ms <= CLOCKS_FACTOR * 1e3 * passed_s + CLOCKS_MS:
        return None
    names = [name for name in plan.implementations if name not in trusted(plan)] or list(plan.implementations)
    evidence = (
        f"the calls of block {event.conditions.block} took {took_ms:.4g} ms by the worker's clock, and "
        f"{1e3 * passed_s:.4g} ms passed by the parent's"
    )
    return Finding(Breach.CLOCKS_DISAGREE, Grade.FAILED, ", ".join(names), event.conditions.case, evidence)


def measure_peaks(plan: Plan, worker: Worker) -> dict[str, float]:
    """The GPU's ceilings, measured in ``worker``. Raises ``LostError`` where that ends it."""
    peaks: dict[str, float] = {}

    def keep(event: Event) -> None:
        if isinstance(event, PeaksMeasured):
            peaks.update(event.peaks)

    worker.run(Request("peaks", plan, started_s=time.monotonic()), keep)
    return peaks


class _VerifyLog:
    """Gathers the events of a verify stage."""

    def __init__(self) -> None:
        self.cases: list[VerifiedCase] = []
        self._skipped: dict[str, str] = {}
        self._findings: list[Finding] = []
        self._kept_apart: list[str] = []

    def add(self, event: Event) -> None:
        if isinstance(event, CaseVerified):
            self.cases.append(event.result)
        elif isinstance(event, IntegrityFound):
            self._findings.append(event.finding)
        elif isinstance(event, KeptApart):
            self._kept_apart.append(event.text)
        elif isinstance(event, Skipped):
            self._skipped[event.key] = event.reason

    def report(self) -> VerifyReport:
        return VerifyReport(
            tuple(self.cases),
            dict(self._skipped),
            findings=tuple(self._findings),
            kept_apart=tuple(self._kept_apart),
        )


_LOGS: dict[Stage, type[BuildLog | _VerifyLog | BenchLog]] = {
    "build": BuildLog,
    "verify": _VerifyLog,
    "bench": BenchLog,
}


def _after_loss(
    request: Request,
    loss: LostError,
    losses: Counter[str],
    log: BuildLog | _VerifyLog | BenchLog,
    tell: OnEvent,
) -> Request:
    """Records what the lost worker was doing as failed; returns the request for the rest of the stage."""
    doing, reason = loss.doing, str(loss)
    if doing is None:
        raise MachineNotReadyError(f"the worker did not start ({reason}); try: python -c 'import torch'")
    tell(WorkerLost(doing.key, reason))
    losses[doing.implementation] += 1
    barred = dict(request.barred)
    if doing.input == LOADING:
        barred[doing.implementation] = f"loading it: {reason}"
        return replace(request, barred=barred)
    if isinstance(log, BuildLog):
        tell(KernelFailed(BuildFailure(doing.implementation, request.plan.device, reason)))
        return replace(request, barred={**barred, doing.implementation: reason})
    if losses[doing.implementation] >= (MAX_HANGS if isinstance(loss, HungError) else MAX_LOSSES):
        barred[doing.implementation] = (
            f"left out after {losses[doing.implementation]} lost workers, the last: {reason}"
        )
        tell(Message(f"{doing.implementation}: {barred[doing.implementation]}"))
    request = replace(request, barred=barred)
    if isinstance(log, BenchLog):
        return _without(request, doing, reason, log, tell, whole_case=isinstance(loss, ForgedError))
    if not _is_recorded(log, doing):
        tell(CaseVerified(_failed(doing, doing.input, reason)))
    return replace(request, start=doing.index + 1)


def _writer(plan: Plan, first: Doing | None, second: Doing | None) -> Doing | None:
    """Of a block that came twice: one was written in a turn of the writer's, which is none of the lab's own."""
    turns = [doing for doing in (first, second) if doing is not None]
    others = [doing for doing in turns if doing.implementation not in trusted(plan)]
    return next(iter([*others, *turns]), None)


def _without(
    request: Request, doing: Doing, reason: str, log: BenchLog, tell: OnEvent, *, whole_case: bool
) -> Request:
    """The rest of the timing, without the one that cost a worker: it has failed, the others go on with the block after
    their last. Without the baseline there is nothing to compare with, so the case goes. So does one, ``whole_case``, of
    whose samples nobody can tell which are real."""
    plan = request.plan
    tell(CaseVerified(_failed(doing, WHILE_TIMING, reason)))
    measured = log.blocks()
    own = doing.implementation != plan.baseline and doing.implementation in plan.implementations
    if own and not whole_case:
        tell(Skipped("bench", doing.key, reason))
        dropped = {**request.dropped, doing.key: reason}
        return replace(request, start=doing.index, dropped=dropped, measured=measured)
    reason = f"{doing.implementation}: {reason}"
    tell(Skipped("bench", doing.case, reason))
    dropped = {**request.dropped, doing.case: reason}
    return replace(request, start=doing.index + 1, dropped=dropped, measured=measured)


def _failed(doing: Doing, input: str, reason: str) -> VerifiedCase:
    return VerifiedCase(doing.case, doing.implementation, input, None, None, None, False, reason)


def _is_recorded(log: _VerifyLog, doing: Doing) -> bool:
    """Whether the result came out before the worker was lost (it leaves after a fault on the GPU)."""
    if not log.cases:
        return False
    last = log.cases[-1]
    return (last.case, last.implementation, last.input) == (doing.case, doing.implementation, doing.input)
