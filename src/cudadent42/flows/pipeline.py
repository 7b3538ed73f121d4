"""The stages in order. The one place that knows the order.

preflight -> build -> verify -> bench -> compare -> audit -> ledger -> profile, where a gate asks -> gate -> report
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42 import ledger
from cudadent42.audit import nursery
from cudadent42.audit.cases import claimed
from cudadent42.audit.stage import Audited, audit
from cudadent42.base.errors import BuildFailedError, ExitCode, LabError, MachineNotReadyError, UsageError
from cudadent42.base.observer import Forwarding, Observer
from cudadent42.decisions.claims import NOT_ASKED, with_claim
from cudadent42.decisions.compare import compare
from cudadent42.decisions.verdicts import MIN_BLOCKS
from cudadent42.flows.groundwork import files_of, held_back, integrity_of, load_ahead, written_while_run
from cudadent42.flows.sandboxing import candidates_of, untrusted
from cudadent42.model import implementations
from cudadent42.model.device_names import parse_device
from cudadent42.model.events import (
    WHILE_TIMING,
    BlockMeasured,
    CaseVerified,
    Event,
    IntegrityFound,
    KeptApart,
    Message,
    PlanningTimed,
    Progress,
    Skipped,
    WorkerLost,
)
from cudadent42.model.records import (
    BenchReport,
    BuildReport,
    MachineReport,
    Plan,
    Refusal,
    Results,
    TimerKind,
    VerifyReport,
)
from cudadent42.plan import RunOptions, calls_our_kernels, check_below, for_versions, make_plan
from cudadent42.preflight.runner import chosen_device, gather, inspect
from cudadent42.preflight.text import troubles
from cudadent42.registry import get, registry
from cudadent42.runs.run_folder import RunWriter, check_output, create_default_folder
from cudadent42.runs.source import revision
from cudadent42.sandbox.launch import Sandbox
from cudadent42.stages import gates, report
from cudadent42.stages.build import build_for
from cudadent42.stages.gates import GateReport
from cudadent42.timing.contention import probe
from cudadent42.timing.limits import cpu_limits
from cudadent42.worker.branch import Branch
from cudadent42.worker.parent import LostError, Worker
from cudadent42.worker.stages import measure_peaks, run_stage
from flashmoe_science.errors import BuildError, DeviceError

WORKER_LOG = "worker.log"
"""What the worker and the candidates print, in the run folder."""

AUDIT_LOG = "audit.log"
"""What is printed in the audit's processes."""

_LOG_LINES = 20
"""Of a compiler's output that are shown; all of it is in the manifest."""


@dataclass(frozen=True)
class Outcome:
    folder: Path
    verify: VerifyReport
    """With the outputs that were checked again after timing."""
    results: Results
    gates: GateReport | None = None

    @property
    def impossible(self) -> bool:
        """Whether a latency is below what the machine can do."""
        rows = (*self.results.cases, *self.results.others, *self.results.control)
        return any(row.refused is Refusal.IMPOSSIBLE for row in rows)

    @property
    def exit_code(self) -> ExitCode:
        """A wrong result counts more than any gate, and so does one that was not computed while it was timed."""
        if not self.verify.passed or self.impossible:
            return ExitCode.VERIFICATION_FAILED
        if not (self.results.cases or self.results.others or self.results.control):
            return ExitCode.NOTHING_MEASURED
        if self.results.integrity is not None and not self.results.integrity.sound:
            return ExitCode.UNTRUSTED_RESULT
        return ExitCode.PASS if self.gates is None else self.gates.exit_code


@dataclass(frozen=True)
class Prepared:
    """A plan for this machine, which is ready for it."""

    plan: Plan
    machine: MachineReport


Execute = Callable[[Prepared, RunOptions, Observer, Callable[[RunWriter], None]], Outcome]
"""A prepared run from building on."""


def prepare(options: RunOptions, observer: Observer) -> Prepared:
    """The plan, and preflight for it. Bad input is found before the machine is looked at, as it is faster."""
    device = parse_device(options.device)
    check_on_devices(device, lambda each: _plan(options, each))
    if options.output is not None:
        check_output(options.output)
    observer.stage("preflight")
    context = gather(device, options.output or Path("runs"))
    machine = inspect(context)
    for line in troubles(machine):
        observer.note(line)
    if not machine.ready and not options.ignore_preflight:
        raise MachineNotReadyError(
            "this machine is not ready, for the reasons above; `cudadent42 preflight` shows all checks, "
            "--ignore-preflight goes on regardless"
        )
    plan = _plan(options, chosen_device(context))  # the margin is the device's
    return Prepared(_that_can_run(plan, options.choices.implementations, observer), machine)


def _that_can_run(plan: Plan, asked_for: Collection[str], observer: Observer) -> Plan:
    """The plan without implementations that the suite names and this machine lacks, each with a line. Raises UsageError
    for one that was asked for by name, for the baseline, and where nothing is left to compare."""
    left_out: dict[str, str] = {}
    for name in plan.implementations:
        runs_elsewhere = implementations.is_plug_in(name) and not implementations.is_kernel_file(name)
        if runs_elsewhere or name in plan.versions:
            continue  # the worker's business: this process runs no code but its own
        reason = implementations.why_not(get(name, plan.operation), plan.device)
        if reason and reason.startswith(f"{name} "):
            reason = f"it {reason.removeprefix(name).strip()}"
        if reason and (name in asked_for or name == plan.baseline):
            raise UsageError(f"{name} cannot run on {plan.device}: {reason}")
        if reason:
            left_out[name] = reason
    names = tuple(name for name in plan.implementations if name not in left_out)
    if left_out and len(names) < 2:
        name, reason = next(iter(left_out.items()))
        raise UsageError(
            f"nothing to compare with {plan.baseline}: {name} cannot run on {plan.device}: {reason}"
        )
    for name, reason in left_out.items():
        observer.note(f"{name} is left out: {reason}")
    return replace(plan, implementations=names)


def _plan(options: RunOptions, device: str) -> Plan:
    """Raises UsageError where the options do not make a plan, or its gates do not fit the plan."""
    plan = make_plan(options.choices, device, registry)
    if options.plug_ins_below is not None:
        check_below((plan.baseline, *plan.implementations), options.plug_ins_below)
    if options.versions:
        plan = for_versions(plan, options.versions)
    if options.gate:
        gates.check(options.gate, plan)
    return plan


def check_on_devices(device: str, check: Callable[[str], object]) -> None:
    """Raises the UsageError of ``check`` where it has one for every device that may be meant, with the words of each
    where they differ: a suite can have other cases on CPU."""
    possible = ("cuda:0", "cpu") if device == "auto" else (device,)
    errors: list[UsageError] = []
    for each in possible:
        try:
            check(each)
        except UsageError as error:
            errors.append(error)
    if len(errors) == len(possible):
        words = dict.fromkeys(map(str, errors))
        if len(words) == 1:
            raise errors[0]
        raise UsageError(
            "; ".join(f"on {name}: {said}" for name, said in zip(("a GPU", "CPU"), words, strict=True))
        )


def run(
    options: RunOptions,
    observer: Observer,
    opened: Callable[[RunWriter], None],
    execute: Execute | None = None,
) -> Outcome:
    """A whole run. ``opened`` is given the folder as soon as there is one; ``execute``: what stands in for `execute`.

    Raises LabError where the run cannot go on; what was measured until then is in the folder.
    """
    prepared = suited(prepare(options, observer), options, observer)
    return (execute or execute_here)(prepared, options, observer, opened)


def suited(prepared: Prepared, options: RunOptions, observer: Observer) -> Prepared:
    """`with_timer`, and said beforehand where no verdict can come of it."""
    if prepared.plan.repeats < MIN_BLOCKS:
        observer.note(
            f"--repeats {prepared.plan.repeats} allows no verdict: at least {MIN_BLOCKS} blocks are needed"
        )
    return with_timer(prepared, options, observer)


def with_timer(prepared: Prepared, options: RunOptions, observer: Observer) -> Prepared:
    """The plan with the timer that suits the machine as it is now, unless one was asked for.

    On a CPU whose processors are not to be had, the clock on the wall measures the scheduler. Processor time on one
    thread does not, and is what is measured there; the run says so.
    """
    plan = prepared.plan
    if plan.device != "cpu" or plan.timer is not TimerKind.CALL:
        return prepared
    contention = probe()
    if not contention.busy:
        return prepared
    what = f"the processors are busy (threads waited for one for {contention.waited_share:.0%} of their time)"
    if options.choices.timer is not None:
        observer.note(f"{what}: whole calls may not be measurable now; --timer cpu measures processor time")
        return prepared
    observer.note(
        f"{what}: processor time on one thread is measured in place of whole calls, which need a quiet machine; "
        "--timer call measures those regardless"
    )
    return replace(prepared, plan=replace(plan, timer=TimerKind.CPU))


def execute(
    prepared: Prepared, options: RunOptions, observer: Observer, opened: Callable[[RunWriter], None]
) -> Outcome:
    """``run`` from building on."""
    with _confined(options, prepared.plan) as sandbox:
        return _execute(prepared, options, observer, opened, sandbox)


execute_here: Execute = execute


def _execute(
    prepared: Prepared,
    options: RunOptions,
    observer: Observer,
    opened: Callable[[RunWriter], None],
    sandbox: Sandbox | None,
) -> Outcome:
    plan = prepared.plan
    source = revision()
    path = options.output or create_default_folder(plan.suite, source)
    writer = RunWriter(path, plan, prepared.machine, source, options.command, options.save_samples)
    audits = options.sealed or options.audits
    trunk = nursery.trunk(plan.operation, kernels=calls_our_kernels(plan)) if audits else None
    with _entered_in_ledger(path, observer), writer as folder, ExitStack() as branches:
        opened(folder)
        recorded = _Recorded(observer, folder)
        if held := held_back(os.environ):
            recorded.note(held)
        if sandbox is not None:
            folder.set_sandbox(sandbox.report)
            recorded.note(f"sandbox: {sandbox.report.summary}")
        with Worker(path / WORKER_LOG, trunk=trunk, sandbox=sandbox) as worker:
            built = build(plan, worker, recorded, sandbox)
            folder.set_build(built)
            require(built)
            load_ahead(plan, with_report=options.with_report)
            files = files_of(plan, built)
            verified = verify(plan, worker, recorded)
            folder.write_verify(verified)
            began_s = time.monotonic()
            benched = _bench(plan, verified, worker, recorded, folder)
            measured_s = time.monotonic() - began_s
            if plan.timer is TimerKind.CPU:  # on a busy machine the wall has time that nobody measured in
                measured_s = min(measured_s, benched.measuring.processor_s)
            peaks = _peaks(plan, worker, recorded)
            branch = worker.hand_over_branch()
            if branch is not None:
                branches.enter_context(branch)
        verified = replace(verified, cases=(*verified.cases, *benched.rechecked))
        folder.write_verify(verified)
        recorded.stage("compare")
        results = compare(plan, benched.samples, benched.skipped, peaks)
        audited = _audit(options, plan, results, path / AUDIT_LOG, measured_s, branch, recorded, sandbox)
        of_files = written_while_run(plan, files)
        integrity = integrity_of(plan, verified, benched, audited, options.sealed, of_files)
        results = replace(results, integrity=integrity, planning_ms=benched.planning_ms)
        results = with_claim(results, verified=verified.passed)
        folder.write_results(results)
        if options.with_report:
            recorded.stage("report")
    if options.gate and gates.wants_profile(options.gate):
        if sandbox is None:
            _profile(path, observer)
        else:
            observer.note(
                "the run is not profiled: a profiler works outside of a sandbox, and would take the candidate there"
            )
    judged = gates.judge(options.gate, path) if options.gate else None
    if options.with_report:
        report.write(path)  # of the finished run, so once the folder is closed
    return Outcome(path, verified, results, judged)


def _audit(
    options: RunOptions,
    plan: Plan,
    results: Results,
    log: Path,
    measured_s: float,
    branch: Branch | None,
    observer: Observer,
    sandbox: Sandbox | None,
) -> Audited:
    """Of what is called faster, and of everything where that is asked for."""
    if not (options.sealed or options.audits) or not claimed(
        results, sealed=options.sealed, on_cpu=plan.device == "cpu"
    ):
        return Audited(why_not="" if options.audits else NOT_ASKED)
    observer.stage("audit")
    audited = audit(
        plan,
        results,
        log=log,
        measured_s=measured_s,
        sealed=options.sealed,
        nursery=branch,
        sandbox=sandbox,
        on_progress=observer.advance,
    )
    for finding in audited.findings:
        observer.note(finding.line)
    return audited


def _profile(path: Path, observer: Observer) -> None:
    """Of the finished run's slowest case. A gate says itself what it lacks, should there be none."""
    from cudadent42.flows import doctor  # which is one more caller of this module

    observer.stage("profile")
    try:
        doctor.examine(path, observer=observer)
    except LabError as error:
        observer.note(f"the run is not profiled: {error}")


@contextmanager
def _entered_in_ledger(path: Path, observer: Observer) -> Iterator[None]:
    """Puts the run into the ledger however it ends: what failed cost money too."""
    try:
        yield
    finally:
        trouble = ledger.record(path)
        if trouble is not None:
            observer.note(trouble)


def verify_only(options: RunOptions, observer: Observer) -> VerifyReport:
    """The run up to verification, without a folder."""
    plan = prepare(options, observer).plan
    with _confined(options, plan) as sandbox, Worker(sandbox=sandbox) as worker:
        if sandbox is not None:
            observer.note(f"sandbox: {sandbox.report.summary}")
        require(build(plan, worker, observer, sandbox))
        return verify(plan, worker, observer)


@contextmanager
def _confined(options: RunOptions, plan: Plan) -> Iterator[Sandbox | None]:
    """The sandbox of the plan's candidates, where one is asked for. Raises MachineNotReadyError where it cannot be."""
    if not options.untrusted:
        yield None
        return
    files, versions = candidates_of(plan)
    with untrusted(plan.device, files, options.accepted_missing, versions=versions) as sandbox:
        yield sandbox


def build(plan: Plan, worker: Worker, observer: Observer, sandbox: Sandbox | None = None) -> BuildReport:
    """Build what the plan needs, and tell what failed. Versions build themselves, in the worker."""
    observer.stage("build")
    if plan.versions:
        built = run_stage("build", plan, on_event=lambda event: _tell(event, observer), worker=worker)
    else:
        built = build_for(plan, lambda done, total, what: observer.advance(done / total, what), sandbox)
    tell_failures(built, observer)
    return built


def tell_failures(built: BuildReport, observer: Observer) -> None:
    """What failed, with the end of what the compiler said."""
    for failure in built.failures:
        observer.note(f"{failure.kernel} for {failure.architecture}: {failure.message}")
        for line in failure.log.splitlines()[-_LOG_LINES:]:
            observer.note(f"    {line}")


def require(built: BuildReport) -> None:
    """Raises BuildFailedError where a kernel failed."""
    if not built.passed:
        raise BuildFailedError(
            f"{len(built.failures)} of the kernels could not be built, see above; nothing was measured"
        )


def verify(plan: Plan, worker: Worker, observer: Observer) -> VerifyReport:
    """Check every case of the plan, and the adversarial inputs."""
    observer.stage("verify")
    report = run_stage("verify", plan, on_event=lambda event: _tell(event, observer), worker=worker)
    return replace(report, baseline=plan.baseline)


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
    elif isinstance(event, PlanningTimed):
        observer.detail(f"{event.key}: planning a step takes {event.planning_ms:.4g} ms")
    elif isinstance(event, Message):
        observer.note(event.text)
    elif isinstance(event, IntegrityFound):
        observer.note(event.finding.line)
    elif isinstance(event, KeptApart):
        observer.note(event.text)
    elif isinstance(event, WorkerLost):
        observer.note(f"{event.doing}: {event.reason}; going on with the next case")
    elif isinstance(event, CaseVerified) and not event.result.passed and event.result.input != WHILE_TIMING:
        observer.note(f"{event.result.case}: {event.result.implementation} is wrong: {event.result.detail}")


def _peaks(plan: Plan, worker: Worker, observer: Observer) -> dict[str, float]:
    """The machine's ceilings, measured now; none where they cannot be, and none for a race of versions: it compares
    them with each other."""
    if plan.versions:
        return {}
    import torch

    from cudadent42.timing.cpu_peaks import (
        measure_cpu_peaks,  # torch takes seconds, and a race needs none here
    )

    try:
        if plan.device != "cpu":
            return measure_peaks(plan, worker)
        peaks = measure_cpu_peaks()
        return peaks | cpu_limits(plan, peaks, torch.get_num_threads())
    except (BuildError, DeviceError, LostError) as error:
        observer.note(f"the machine's peaks are not measured: {error}")
        return {}


class _Recorded(Forwarding):
    """An observer whose words also go into the run's log."""

    def __init__(self, observer: Observer, folder: RunWriter) -> None:
        super().__init__(observer)
        self._folder = folder

    def stage(self, name: str) -> None:
        self._folder.log("stage", name=name)
        super().stage(name)

    def note(self, text: str) -> None:
        self._folder.log("note", text=text)
        super().note(text)

    def detail(self, text: str) -> None:
        self._folder.log("detail", text=text)
        super().detail(text)
