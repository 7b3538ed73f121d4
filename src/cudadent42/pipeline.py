"""The stages in order. The one place that knows the order.

preflight -> build -> verify -> bench -> compare -> report
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42 import implementations, report
from cudadent42.bench.compare import compare
from cudadent42.build import build_for
from cudadent42.errors import BuildFailedError, ExitCode, MachineNotReadyError, UsageError
from cudadent42.events import BlockMeasured, CaseVerified, Event, Message, Progress, Skipped, WorkerLost
from cudadent42.plan import Choices, make_plan
from cudadent42.preflight.definitions import parse_device
from cudadent42.preflight.runner import chosen_device, gather, inspect
from cudadent42.preflight.text import troubles
from cudadent42.progress import Observer
from cudadent42.records import BenchReport, BuildReport, MachineReport, Plan, Results, VerifyReport
from cudadent42.runs import RunWriter, check_output, create_default_folder
from cudadent42.source import revision
from cudadent42.worker import Worker, run_stage
from flashmoe_science import cpu
from flashmoe_science.errors import BuildError, DeviceError

WORKER_LOG = "worker.log"
"""What the worker and the candidates print, in the run folder."""

_LOG_LINES = 20
"""Of a compiler's output that are shown; all of it is in the manifest."""


@dataclass(frozen=True)
class Request:
    """What is asked of a run."""

    choices: Choices
    device: str
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    output: Path | None
    """Folder of the run; None for one under ``runs/``."""
    command: tuple[str, ...]
    save_samples: bool = True
    ignore_preflight: bool = False
    with_report: bool = True


@dataclass(frozen=True)
class Outcome:
    folder: Path
    verify: VerifyReport
    """With the outputs that were checked again after timing."""
    results: Results

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.PASS if self.verify.passed else ExitCode.VERIFICATION_FAILED


@dataclass(frozen=True)
class Prepared:
    """A plan for this machine, which is ready for it."""

    plan: Plan
    machine: MachineReport


def prepare(request: Request, observer: Observer) -> Prepared:
    """The plan, and preflight for it. Bad input is found before the machine is looked at, as it is faster."""
    device = parse_device(request.device)
    _check_choices(request.choices, device)
    if request.output is not None:
        check_output(request.output)
    observer.stage("preflight")
    context = gather(device, request.output or Path("runs"))
    machine = inspect(context)
    for line in troubles(machine):
        observer.note(line)
    if not machine.ready and not request.ignore_preflight:
        raise MachineNotReadyError(
            "this machine is not ready, for the reasons above; `cudadent42 preflight` shows all checks, "
            "--ignore-preflight goes on regardless"
        )
    plan = make_plan(request.choices, chosen_device(context), implementations.registry)
    for name in plan.implementations:
        if implementations.is_plug_in(name):
            continue  # the worker's business: this process runs no code but its own
        reason = implementations.why_not(implementations.get(name, plan.operation), plan.device)
        if reason:
            raise UsageError(f"{name} cannot run on {plan.device}: {reason}")
    return Prepared(plan, machine)


def _check_choices(choices: Choices, device: str) -> None:
    """Raises UsageError where there is no plan on any device that may be meant: a suite can have other cases on CPU."""
    possible = ("cuda:0", "cpu") if device == "auto" else (device,)
    errors: list[UsageError] = []
    for each in possible:
        try:
            make_plan(choices, each, implementations.registry)
        except UsageError as error:
            errors.append(error)
    if len(errors) == len(possible):
        raise errors[0]


def run(request: Request, observer: Observer, opened: Callable[[RunWriter], None]) -> Outcome:
    """A whole run. ``opened`` is given the folder as soon as there is one.

    Raises LabError where the run cannot go on; what was measured until then is in the folder.
    """
    prepared = prepare(request, observer)
    plan = prepared.plan
    source = revision()
    path = request.output or create_default_folder(plan.suite, source)
    with RunWriter(path, plan, prepared.machine, source, request.command, request.save_samples) as folder:
        opened(folder)
        observer = _Recorded(observer, folder)
        built = build(plan, observer)
        folder.set_build(built)
        require(built)
        with Worker(path / WORKER_LOG) as worker:
            verified = verify(plan, worker, observer)
            folder.write_verify(verified)
            benched = _bench(plan, verified, worker, observer, folder)
        verified = replace(verified, cases=(*verified.cases, *benched.rechecked))
        folder.write_verify(verified)
        observer.stage("compare")
        results = compare(plan, benched.samples, benched.skipped, _peaks(plan, observer))
        folder.write_results(results)
        if request.with_report:
            observer.stage("report")
    if request.with_report:
        report.write(path)  # of the finished run, so once the folder is closed
    return Outcome(path, verified, results)


def verify_only(request: Request, observer: Observer) -> VerifyReport:
    """The run up to verification, without a folder."""
    plan = prepare(request, observer).plan
    require(build(plan, observer))
    with Worker() as worker:
        return verify(plan, worker, observer)


def build(plan: Plan, observer: Observer) -> BuildReport:
    """Build what the plan needs, and tell what failed."""
    observer.stage("build")
    built = build_for(plan, lambda done, total, what: observer.advance(done / total, what))
    for failure in built.failures:
        observer.note(f"{failure.kernel} for {failure.architecture}: {failure.message}")
        for line in failure.log.splitlines()[-_LOG_LINES:]:
            observer.note(f"    {line}")
    return built


def require(built: BuildReport) -> None:
    """Raises BuildFailedError where a kernel failed."""
    if not built.passed:
        raise BuildFailedError(
            f"{len(built.failures)} of the kernels could not be built, see above; nothing was measured"
        )


def verify(plan: Plan, worker: Worker, observer: Observer) -> VerifyReport:
    """Check every case of the plan, and the adversarial inputs."""
    observer.stage("verify")
    return run_stage("verify", plan, on_event=lambda event: _tell(event, observer), worker=worker)


def _bench(
    plan: Plan, verified: VerifyReport, worker: Worker, observer: Observer, folder: RunWriter
) -> BenchReport:
    def on_event(event: Event) -> None:
        if isinstance(event, BlockMeasured):
            for sample in event.samples:
                folder.append_sample(sample)
            folder.log("block", conditions=event.conditions)
            return
        if isinstance(event, Skipped):
            folder.log("skipped", key=event.key, reason=event.reason)
        _tell(event, observer)

    observer.stage("bench")
    return run_stage("bench", plan, on_event=on_event, verified=verified, worker=worker)


def _tell(event: Event, observer: Observer) -> None:
    """One event of a worker, in words."""
    if isinstance(event, Progress):
        observer.advance(event.fraction, event.what)
    elif isinstance(event, Skipped) and event.stage == "bench":
        observer.note(f"{event.key}: not timed: {event.reason}")
    elif isinstance(event, Skipped):
        observer.detail(f"{event.key}: not verified: {event.reason}")
    elif isinstance(event, Message):
        observer.note(event.text)
    elif isinstance(event, WorkerLost):
        observer.note(f"{event.doing}: {event.reason}; going on with the next case")
    elif isinstance(event, CaseVerified) and not event.result.passed:
        observer.note(f"{event.result.case}: {event.result.implementation} is wrong: {event.result.detail}")


def _peaks(plan: Plan, observer: Observer) -> dict[str, float]:
    """The machine's ceilings, measured now; none where they cannot be."""
    if plan.device != "cpu":
        return {}
    try:
        return cpu.measure_peaks()
    except (BuildError, DeviceError) as error:
        observer.note(f"the machine's peaks are not measured: {error}")
        return {}


class _Recorded:
    """An observer whose words also go into the run's log."""

    def __init__(self, observer: Observer, folder: RunWriter) -> None:
        self._observer = observer
        self._folder = folder

    def stage(self, name: str) -> None:
        self._folder.log("stage", name=name)
        self._observer.stage(name)

    def advance(self, fraction: float, what: str) -> None:
        self._observer.advance(fraction, what)

    def note(self, text: str) -> None:
        self._folder.log("note", text=text)
        self._observer.note(text)

    def detail(self, text: str) -> None:
        self._folder.log("detail", text=text)
        self._observer.detail(text)
