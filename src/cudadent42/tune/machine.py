"""The engine of a device of this machine: the lab's own worker, timers and checks, one race after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.base.observer import Observer
from cudadent42.decisions.verdicts import MIN_BLOCKS
from cudadent42.flows import pipeline
from cudadent42.flows.pipeline import Outcome, Prepared
from cudadent42.model.cases import Case
from cudadent42.model.events import BlockMeasured, Event, Skipped
from cudadent42.model.records import MachineReport, Plan, Verdict, VerifiedCase, VerifyReport
from cudadent42.plan import RunOptions
from cudadent42.runs.run_folder import RunWriter
from cudadent42.runs.source import Revision, revision
from cudadent42.tune import space as spaces
from cudadent42.tune.engine import Block, Confirmation, OnResult, Unfit
from cudadent42.tune.journal import Setup
from cudadent42.tune.prune import CompiledArm, compile_arm
from cudadent42.tune.space import DEFAULT, Arm, Space
from cudadent42.tune.state import Job
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage

CONFIRMING_BLOCKS = 54
"""Of a confirmation, at least: as many as the last rung of a race."""

WORKER_LOG = "worker.log"


def devices(plan: Plan, count: int) -> tuple[str, ...]:
    """So many GPUs of this machine, of one kind. Raises UsageError where there are not."""
    if count == 1:
        return (plan.device,)
    if plan.device == "cpu":
        raise UsageError(f"--gpus {count}: this tuning is on the CPU, of which there is one")
    import torch

    names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    if len(names) < count or len(set(names[:count])) > 1:
        raise UsageError(
            f"--gpus {count}: expected as many GPUs of one kind; there are {', '.join(names) or 'none'}"
        )
    return tuple(f"cuda:{index}" for index in range(count))


class ThisMachine:
    """An `Engine`, and a context manager: the worker lives from one job to the next."""

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        machine: MachineReport,
        observer: Observer,
        *,
        audits: bool = True,
        device: str = "",
    ) -> None:
        """``device``: another of this machine than the setup's, of the same kind."""
        self._setup = setup
        self._folder = folder
        self._machine = machine
        self._observer = observer
        self._audits = audits
        self._device = device or setup.plan.device
        self._space: Space = spaces.load(Path(setup.space))
        self._cases = {case.id: case for case in setup.plan.cases}
        self._names = {implementation: arm for arm, implementation in setup.arms.items()}
        self._verified: dict[tuple[str, str], VerifyReport] = {}
        self._worker: Worker | None = None
        self._revision: Revision | None = revision()

    def __enter__(self) -> ThisMachine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.close()

    def compile(self, arm: str) -> CompiledArm:
        settings = {} if arm == DEFAULT else self._setup.settings[arm]
        cases = tuple(self._cases.values())
        return compile_arm(self._space, Arm(arm, settings), self._setup.arms[arm], cases, self._setup.target)

    def race(self, job: Job, *, run: str, seed: int, on_result: OnResult) -> None:
        case = self._cases[job.case]
        plan = self._plan(case, job.arms, job.blocks, seed)
        with RunWriter(
            self._folder / run, plan, self._machine, self._revision, ("cudadent42", "tune"), save_samples=True
        ) as folder:
            worker = self._open_worker()
            verified = self._verify(plan, case, worker)
            folder.write_verify(verified)

            def on_event(event: Event) -> None:
                if isinstance(event, BlockMeasured):
                    for sample in event.samples:
                        folder.append_sample(sample)
                    flags = event.samples[0].flags if event.samples else ""
                    latencies = {self._names[each.implementation]: each.latency_ms for each in event.samples}
                    on_result(Block(event.conditions.block, latencies, flags))
                elif isinstance(event, Skipped):
                    self._unfit(event, case, on_result)

            run_stage("bench", plan, on_event=on_event, verified=verified, worker=worker)

    def confirm(self, case: str, arm: str, *, run: str, seed: int, within_s: float | None) -> Confirmation:
        """A run like any other, with all its checks."""
        if self._worker is not None:
            self._worker.close()  # its memory and threads are not beside the race
        blocks = max(CONFIRMING_BLOCKS, self._setup.plan.repeats)
        plan = self._plan(self._cases[case], (arm,), blocks, seed)
        plan = replace(plan, control=True, budget_s=within_s)
        options = RunOptions(
            device=plan.device,
            output=self._folder / run,
            audits=self._audits,
            ignore_preflight=True,  # which this machine passed when the tuning was opened
            command=("cudadent42", "tune"),
        )
        outcome = pipeline.execute(
            Prepared(plan, self._machine), options, self._observer, lambda folder: None
        )
        return judged(outcome, blocks)

    def _plan(self, case: Case, arms: tuple[str, ...], blocks: int, seed: int) -> Plan:
        names = [self._setup.arms[arm] for arm in (DEFAULT, *arms)]
        return replace(
            self._setup.plan,
            device=self._device,
            cases=(case,),
            baseline=names[0],
            implementations=tuple(names),
            repeats=blocks,
            seed=seed,
            control=False,
        )

    def _open_worker(self) -> Worker:
        if self._worker is None:
            self._worker = Worker(self._folder / f"{self._device.replace(':', '-')}-{WORKER_LOG}")
        return self._worker

    def _verify(self, plan: Plan, case: Case, worker: Worker) -> VerifyReport:
        """Of every arm of the plan, each once in the life of this process."""
        new = tuple(name for name in plan.implementations if (case.id, name) not in self._verified)
        if new:
            self._observer.detail(f"{case.id}: verifying {len(new)} configurations")
            report = run_stage(
                "verify",
                replace(plan, implementations=new, baseline=new[0]),
                on_event=lambda event: None,
                worker=worker,
            )
            for name in new:
                self._verified[case.id, name] = _of(report, name)
        reports = [self._verified[case.id, name] for name in plan.implementations]
        cases: tuple[VerifiedCase, ...] = sum((each.cases for each in reports), ())
        skipped = {key: why for each in reports for key, why in each.skipped.items()}
        return VerifyReport(cases, skipped, baseline=plan.baseline)

    def _unfit(self, event: Skipped, case: Case, on_result: OnResult) -> None:
        """What the lab left out, which it names by case and implementation, or by the case alone."""
        if event.stage != "bench":
            return
        name = event.key.removeprefix(case.id).removeprefix("/")
        if name in self._names:
            on_result(Unfit(self._names[name], event.reason))


def _of(report: VerifyReport, name: str) -> VerifyReport:
    """What a report says of one implementation."""
    cases = tuple(each for each in report.cases if each.implementation == name)
    skipped = {key: why for key, why in report.skipped.items() if key == name or key.endswith(f"/{name}")}
    return VerifyReport(cases, skipped)


def judged(outcome: Outcome, planned: int) -> Confirmation:
    """A run of one case, as a confirmation that was to have so many blocks."""
    rows = outcome.results.cases
    if not rows:
        reason = next(iter(outcome.results.skipped.values()), "nothing was timed")
        return Confirmation(float("nan"), 0.0, float("inf"), Verdict.UNDECIDED, False, reason)
    row = rows[0]
    reason = ""
    if not outcome.verify.passed:
        reason = "verification failed"
    elif outcome.exit_code is not ExitCode.PASS:
        reason = f"the run ended with exit code {int(outcome.exit_code)}"
    elif row.refused is not None:
        reason = f"no verdict: {row.refused.value}"
    elif row.verdict is not Verdict.FASTER:
        reason = f"measured as {row.verdict.value} in {row.blocks} blocks"
    elif row.blocks < MIN_BLOCKS:
        reason = f"{row.blocks} blocks are too few"
    return Confirmation(
        ratio=row.speedup,
        low=row.ci_low,
        high=row.ci_high,
        verdict=row.verdict,
        holds=not reason,
        reason=reason or f"confirmed in {row.blocks} blocks",
        cut_short=row.blocks + row.left_out < planned,
    )
