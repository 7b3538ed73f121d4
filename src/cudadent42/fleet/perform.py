"""A device's tasks, one after the other: races in a process that lives on, whole runs in processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from cudadent42.base import parcels
from cudadent42.base.errors import LabError, UnwritableError
from cudadent42.base.files import require_room
from cudadent42.base.observer import Observer
from cudadent42.fleet.task import Block as Block
from cudadent42.fleet.task import Returned, Right, Task, Way
from cudadent42.flows import pipeline
from cudadent42.flows.pipeline import Prepared
from cudadent42.model.cases import Case
from cudadent42.model.events import BlockMeasured, Event, Skipped
from cudadent42.model.records import MachineReport, Plan, Scope, VerifiedCase, VerifyReport
from cudadent42.plan import RunOptions
from cudadent42.runs.run_folder import RunFolder, RunWriter
from cudadent42.runs.source import revision
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit.cache import cache_directory
from flashmoe_science.tuned.lookup import SWITCH_VARIABLE

COMMAND = ("cudadent42", "fleet")

NOBODY = Right()


@dataclass(frozen=True)
class Unfit:
    """An implementation that cannot be raced on a case; the baseline where none can."""

    implementation: str
    reason: str


OnResult = Callable[[Block | Unfit], None]
"""Told of each as it happens; measuring waits for it. What it raises ends the race."""


class Racer:
    """Races on one device. A context manager: the worker and what was verified live from one race to the next."""

    def __init__(
        self, machine: MachineReport, log: Path, observer: Observer, worker: Worker | None = None
    ) -> None:
        """``worker``: one that was started already, by `worker_of_races`; else it is started for the first race."""
        self._machine = machine
        self._log = log
        self._observer = observer
        self._on_case: dict[tuple[str, str], VerifyReport] = {}
        """By ``Case.id`` and implementation."""
        self._on_dtype: dict[tuple[str, str], VerifyReport] = {}
        """By dtype and implementation, on inputs that depend on no case."""
        self._worker = worker
        self._revision = revision()

    def __enter__(self) -> Racer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rest()

    def rest(self) -> None:
        """Free the device's memory and the processors for something else."""
        if self._worker is not None:
            self._worker.close()

    def race(
        self,
        plan: Plan,
        folder: Path,
        on_result: OnResult,
        command: tuple[str, ...] = COMMAND,
        right: Right = NOBODY,
    ) -> tuple[str, ...]:
        """Measure a plan of one case into a run folder, without the checks of a quoted result. Raises LabError.

        ``right``: who need not be verified. Returns whom the next to race the case need not verify.
        """
        (case,) = plan.cases
        with RunWriter(folder, plan, self._machine, self._revision, command, save_samples=True) as run:
            if self._worker is None:
                self._worker = Worker(self._log)
            verified = self._verify(plan, case, self._worker, right)
            run.write_verify(verified)
            out: set[str] = set()

            def on_event(event: Event) -> None:
                if isinstance(event, BlockMeasured):
                    for sample in event.samples:
                        run.append_sample(sample)
                    flags = event.samples[0].flags if event.samples else ""
                    latencies = {each.implementation: each.latency_ms for each in event.samples}
                    on_result(Block(event.conditions.block, latencies, flags))
                elif isinstance(event, Skipped) and event.stage == "bench":
                    _require_room_to_compile()
                    name = event.key.removeprefix(case.id).removeprefix("/")
                    out.add(name)
                    # A case without rivals is left out too, and they were told of: its baseline is as good as before.
                    if name or not out.issuperset(set(plan.implementations) - {plan.baseline}):
                        on_result(Unfit(name or plan.baseline, event.reason))

            run_stage("bench", plan, on_event=on_event, verified=verified, worker=self._worker)
        return tuple(name for name in plan.implementations if self._is_right(case, name, right))

    def _is_right(self, case: Case, name: str, right: Right) -> bool:
        if name in right.on_case:
            return True
        own = self._on_case.get((case.id, name))
        return own is not None and not own.skipped and own.passed

    def _verify(self, plan: Plan, case: Case, worker: Worker, right: Right) -> VerifyReport:
        """Of every implementation of the plan: on the case once in the life of this process, and on inputs that depend
        on no case once for a dtype. Who is wrong there is timed on no case of it, and is asked nothing more. Nothing is
        asked again of whom others of the fleet have verified."""
        names = plan.implementations
        new = [name for name in names if (case.id, name) not in self._on_case and name not in right.on_case]
        seen = {name for name in names if (case.dtype, name) in self._on_dtype} | {*right.anywhere}
        fresh = [name for name in new if name not in seen]
        if fresh:
            self._observer.detail(
                f"{case.dtype}: verifying {len(fresh)} configurations on adversarial inputs"
            )
            common = _verified(plan, fresh, Scope.COMMON, worker)
            for name in fresh:
                self._on_dtype[case.dtype, name] = _of(common, name)
        nothing = VerifyReport(())
        asked = [name for name in new if not _is_out(self._on_dtype.get((case.dtype, name), nothing), name)]
        if asked:
            self._observer.detail(f"{case.id}: verifying {len(asked)} configurations")
            own = _verified(plan, asked, Scope.CASES, worker)
            self._on_case |= {(case.id, name): _of(own, name) for name in asked}
        parts = [self._on_case.get((case.id, name), nothing) for name in names]
        parts += [self._on_dtype.get((case.dtype, name), nothing) for name in names]
        for name in fresh:
            common = self._on_dtype[case.dtype, name]
            if name in common.skipped and not common.cases:  # it could not be loaded, which is tried again
                del self._on_dtype[case.dtype, name]
        cases: tuple[VerifiedCase, ...] = sum((each.cases for each in parts), ())
        skipped = {key: why for each in parts for key, why in each.skipped.items()}
        return VerifyReport(cases, skipped, baseline=plan.baseline)


def worker_of_races(log: Path) -> Worker:
    """Begins to load what takes seconds, while nobody has a race for it yet. What races is a tuning's: tables are not
    asked, so that its default is the usual choice."""
    worker = Worker(log)
    with untuned():
        worker.start()
    return worker


def _verified(plan: Plan, names: Sequence[str], scope: Scope, worker: Worker) -> VerifyReport:
    asked = replace(plan, implementations=tuple(names), baseline=names[0])
    return run_stage("verify", asked, on_event=lambda event: None, worker=worker, scope=scope)


def _of(report: VerifyReport, name: str) -> VerifyReport:
    """What a report says of one implementation."""
    cases = tuple(each for each in report.cases if each.implementation == name)
    skipped = {key: why for key, why in report.skipped.items() if key == name or key.endswith(f"/{name}")}
    return VerifyReport(cases, skipped)


def _require_room_to_compile() -> None:
    """Raises UnwritableError where the compile cache takes no more: then that is why a kernel could not be loaded."""
    with suppress(DeviceError, BuildError):  # there is none, which says nothing of a disk
        require_room(cache_directory())


def _is_out(common: VerifyReport, name: str) -> bool:
    """By what it came to on inputs that depend on no case."""
    return name in common.skipped or not all(each.passed for each in common.cases)


class Performer:
    """Does tasks, for one worker."""

    def __init__(
        self, name: str, device: str, racer: Racer, machine: MachineReport, root: Path, observer: Observer
    ) -> None:
        self._name = name
        self._device = device
        self._racer = racer
        self._machine = machine
        self._root = root
        self._observer = observer

    def perform(self, task: Task) -> Returned:
        """Never raises LabError: an error is a result too."""
        began_s = time.monotonic()
        blocks: list[Block] = []
        unfit: dict[str, str] = {}

        def on_result(result: Block | Unfit) -> None:
            if isinstance(result, Unfit):
                unfit[result.implementation] = result.reason
            else:
                blocks.append(result)

        plan = replace(task.plan, device=self._device)
        error, unwritable = "", False
        right: tuple[str, ...] = ()
        try:
            for parcel in task.parcels:
                parcels.check(parcel)
            with nullcontext() if task.tables else untuned():
                if task.way is Way.RACE:
                    right = self._racer.race(plan, self._root / task.run, on_result, right=task.right)
                else:
                    self._racer.rest()
                    self._run(task, plan)
        except LabError as raised:
            error, unwritable = str(raised), isinstance(raised, UnwritableError)
        return Returned(
            key=task.key,
            worker=self._name,
            seconds=round(time.monotonic() - began_s, 3),
            blocks=tuple(blocks),
            unfit=unfit,
            error=error,
            unwritable=unwritable,
            right=right,
            parcels=task.parcels,
        )

    def _run(self, task: Task, plan: Plan) -> None:
        options = RunOptions(
            device=plan.device,
            output=self._root / task.run,
            versions=plan.versions,
            audits=task.checks.audits,
            sealed=task.checks.sealed,
            untrusted=task.checks.untrusted,
            accepted_missing=task.checks.accepted_missing,
            ignore_preflight=True,  # which was looked at when the worker entered
            with_report=False,
            command=COMMAND,
        )
        pipeline.execute(Prepared(plan, self._machine), options, self._observer, lambda folder: None)


def blocks_in(run: RunFolder) -> tuple[Block, ...]:
    """The whole blocks of a run, also of one that was cut short."""
    rows: dict[int, dict[str, float]] = {}
    flags: dict[int, str] = {}
    for sample in run.samples:
        rows.setdefault(sample.block, {})[sample.implementation] = sample.latency_ms
        flags[sample.block] = sample.flags
    last = max(rows, default=0)
    most = max(map(len, rows.values()), default=0)
    # A kill tears the last block alone: before it, fewer samples say that an implementation went out.
    return tuple(
        Block(number, row, flags[number])
        for number, row in sorted(rows.items())
        if number < last or len(row) == most or run.results is not None
    )


@contextmanager
def untuned() -> Iterator[None]:
    """Tables are not asked, here and by the processes that are started meanwhile: the default is the usual choice."""
    before = os.environ.get(SWITCH_VARIABLE)
    os.environ[SWITCH_VARIABLE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH_VARIABLE]
        else:
            os.environ[SWITCH_VARIABLE] = before
