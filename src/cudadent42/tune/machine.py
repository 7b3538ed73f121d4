"""The engine of a device of this machine: the lab's own worker, timers and checks, one race after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType

from cudadent42.base.errors import ExitCode
from cudadent42.base.observer import Observer
from cudadent42.base.paths import real_path
from cudadent42.decisions.verdicts import MIN_BLOCKS
from cudadent42.fleet import perform as fleet
from cudadent42.fleet.perform import Racer
from cudadent42.flows import pipeline
from cudadent42.flows.pipeline import Outcome, Prepared
from cudadent42.model.records import MachineReport, Plan, Verdict
from cudadent42.plan import RunOptions
from cudadent42.tune import space as spaces
from cudadent42.tune.arms import materialise
from cudadent42.tune.engine import Block, Confirmation, OnResult, Unfit
from cudadent42.tune.journal import Setup
from cudadent42.tune.prune import CompiledArm, compile_arm
from cudadent42.tune.space import DEFAULT, Arm, Space
from cudadent42.tune.state import Job

WORKER_LOG = "worker.log"


COMMAND = ("cudadent42", "tune")

NO_VERDICT = "no verdict"
"""Begins the reason of a confirmation that was measured and says nothing, such as a disturbed one."""


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
    ) -> None:
        self._folder = folder
        self._machine = machine
        self._observer = observer
        self._audits = audits
        self._device = setup.plan.device
        self._space: Space = spaces.load(Path(setup.space))
        self._cases = {case.id: case for case in setup.plan.cases}
        self._names: dict[str, str] = {}
        self.take(setup)
        log = folder / f"{self._device.replace(':', '-')}-{WORKER_LOG}"
        self._racer = Racer(machine, log, observer)

    def __enter__(self) -> ThisMachine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._racer.rest()

    def take(self, setup: Setup) -> None:
        """Also writes the files of arms that have one each."""
        self._setup = setup
        new = [arm for arm, implementation in setup.arms.items() if implementation not in self._names]
        self._names |= {setup.arms[arm]: arm for arm in new}
        arms = [Arm(arm, setup.settings.get(arm, {})) for arm in new]
        materialise(self._space, arms, real_path(self._folder))

    def compile(self, arm: str) -> CompiledArm:
        settings = {} if arm == DEFAULT else self._setup.settings[arm]
        cases = tuple(self._cases.values())
        return compile_arm(self._space, Arm(arm, settings), self._setup.arms[arm], cases, self._setup.target)

    def race(self, job: Job, *, run: str, seed: int, on_result: OnResult) -> None:
        plan = race_plan(self._setup, job, seed)

        def tell(result: fleet.Block | fleet.Unfit) -> None:
            if isinstance(result, fleet.Unfit):
                on_result(Unfit(self._names[result.implementation], result.reason))
                return
            latencies = {self._names[name]: value for name, value in result.latencies_ms.items()}
            on_result(Block(result.number, latencies, result.flags))

        plan = replace(plan, device=self._device)
        self._racer.race(plan, self._folder / run, tell, command=COMMAND)

    def confirm(
        self, case: str, arm: str, *, blocks: int, run: str, seed: int, within_s: float | None
    ) -> Confirmation:
        """A run like any other, with all its checks."""
        self._racer.rest()  # its memory and threads are not beside the race
        plan = confirming_plan(self._setup, case, arm, blocks, seed)
        plan = replace(plan, device=self._device, budget_s=within_s)
        options = RunOptions(
            device=plan.device,
            output=self._folder / run,
            audits=self._audits,
            ignore_preflight=True,  # which this machine passed when the tuning was opened
            command=COMMAND,
        )
        outcome = pipeline.execute(
            Prepared(plan, self._machine), options, self._observer, lambda folder: None
        )
        return judged(outcome, plan.repeats)


def race_plan(setup: Setup, job: Job, seed: int) -> Plan:
    """Blocks of a job, on the setup's device."""
    return _plan(setup, job.case, job.arms, job.blocks, seed)


def confirming_plan(setup: Setup, case: str, arm: str, blocks: int, seed: int) -> Plan:
    """A run of a winner against the default, like any other."""
    return replace(_plan(setup, case, (arm,), blocks, seed), control=True)


def _plan(setup: Setup, case: str, arms: tuple[str, ...], blocks: int, seed: int) -> Plan:
    names = [setup.arms[arm] for arm in (DEFAULT, *arms)]
    return replace(
        setup.plan,
        cases=(setup.case_of[case],),
        baseline=names[0],
        implementations=tuple(names),
        repeats=blocks,
        seed=seed,
        control=False,
    )


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
        reason = f"{NO_VERDICT}: {row.refused.value}"
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
