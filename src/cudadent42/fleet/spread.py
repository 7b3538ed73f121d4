"""A run, or a race of versions, whose cases are spread over a fleet: one run folder, with each case's own inside.

    manifest.json  samples.csv  verify.json  results.json     as of any run; the manifest's machine is the coordinator's
    machines.json                                             which machine measured which case
    parts/                                                    a run folder for each case

All blocks of a case are of one device, so its ratio and its verdict are those of that device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TypeVar

from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.files import write_json
from cudadent42.base.observer import Observer
from cudadent42.base.parcels import Parcel
from cudadent42.decisions.claims import claimed_rows, not_credited, with_claim
from cudadent42.decisions.compare import compare
from cudadent42.fleet.cargo import digests_of
from cudadent42.fleet.desk import Admitted, Desk, Gone, Refused
from cudadent42.fleet.engine import Engine
from cudadent42.fleet.task import Checks, Returned, Task, Way, Worker, plain_name
from cudadent42.fleet.worker import tree_digest
from cudadent42.flows.pipeline import Outcome, Prepared, require, tell_failures
from cudadent42.model.integrity import Integrity, Spent
from cudadent42.model.records import BuildReport, Plan, Results, Verdict, VerifyReport
from cudadent42.plan import RunOptions
from cudadent42.runs.run_folder import (
    RunFolder,
    RunWriter,
    create_default_folder,
    load_manifest,
    load_run,
)
from cudadent42.runs.source import revision
from cudadent42.stages import gates, report

T = TypeVar("T")

MACHINES = "machines.json"

MOST_ATTEMPTS = 3
"""Of a case, each on whoever takes it."""

_WAIT_S = 1.0


@dataclass(frozen=True)
class Measured:
    """A case and where it was measured."""

    case: str
    run: str
    """Its own run folder, relative to the run's."""
    worker: Worker
    files: dict[str, str] = field(default_factory=dict)
    """Of implementations in files that were sent there: by path, the SHA-256 over their files, as they were raced."""


@dataclass(frozen=True)
class Machines:
    """``machines.json``."""

    schema_version: int
    measured: tuple[Measured, ...]
    refused: dict[str, str]
    """Workers that were not taken on, with the reason."""


@dataclass(frozen=True)
class Spread:
    """``execute`` stands in for `cudadent42.flows.pipeline.execute`."""

    engines: Callable[[Path], Engine]
    """Starts the workers, given the folder of the work."""
    suite: str = ""
    """As the user named it."""

    def execute(
        self,
        prepared: Prepared,
        options: RunOptions,
        observer: Observer,
        opened: Callable[[RunWriter], None],
    ) -> Outcome:
        """Raises BuildFailedError where a kernel did not compile, LabError where no case was measured; what was until
        then is in the folder."""
        plan = prepared.plan
        source = revision()
        path = options.output or create_default_folder(plan.suite, source)
        writer = RunWriter(path, plan, prepared.machine, source, options.command, options.save_samples)
        with writer as folder:
            opened(folder)
            engine = self.engines(path)
            try:
                cases = _Cases(plan, options, path, self.suite, observer)
                cases.measure(engine)
            finally:
                engine.close()
            if cases.unbuilt is not None:
                folder.set_build(cases.unbuilt)
                tell_failures(cases.unbuilt, observer)
                require(cases.unbuilt)
            parts = [load_run(path / each.run) for each in cases.measured]
            write_json(path / MACHINES, Machines(1, tuple(cases.measured), cases.refused))
            outcome = _merged(plan, parts, cases.skipped, folder)
        judged = gates.judge(options.gate, path) if options.gate else None
        if options.with_report:
            observer.stage("report")
            report.write(path)
        return replace(outcome, gates=judged)


class _Cases:
    """The cases of a plan on their way."""

    def __init__(self, plan: Plan, options: RunOptions, root: Path, suite: str, observer: Observer) -> None:
        self._plan = plan
        self._options = options
        self._root = root
        self._suite = suite
        self._observer = observer
        self._tree = tree_digest()
        self._parcels: tuple[Parcel, ...] = ()
        self._workers: dict[str, Worker] = {}
        self._tasks: dict[str, Task] = {}
        self.measured: list[Measured] = []
        self.skipped: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.unbuilt: BuildReport | None = None
        """Of the first part in which a kernel did not compile: as for a run on one device, that ends the whole."""

    def measure(self, engine: Engine) -> None:
        """All of them, up to a kernel that does not compile. Raises LabError where no worker can ever come."""
        desk = Desk(engine, self._why_not)
        self._parcels = engine.parcels(self._plan)
        for case in self._plan.cases:
            self._offer(self._task(case.id, 1), desk)
        self._observer.stage("bench")
        while self._tasks and self.unbuilt is None:
            for change in desk.turn(_WAIT_S):
                if isinstance(change, Admitted):
                    self._observer.note(f"{change.worker.name} joined: {change.worker.kind}")
                elif isinstance(change, Refused):
                    self.refused[change.worker.name] = change.reason
                    self._observer.note(f"{change.worker.name} is not taken on: {change.reason}")
                elif isinstance(change, Gone):
                    self._observer.note(f"{change.worker} is gone: {change.reason}")
                else:
                    self._returned(change, desk)

    def _why_not(self, worker: Worker) -> str:
        """A worker that is not to be had, in words. Others may join in the same turn, so one that is counts at once."""
        if worker.tree != self._tree:
            return "it runs other sources of this project than this command"
        kinds = {each.kind for each in self._workers.values()}
        if kinds - {worker.kind}:
            return f"it has {worker.kind}, others of the fleet have {kinds.pop()}"
        drivers = {each.driver for each in self._workers.values()}
        if drivers - {worker.driver}:
            return f"it has driver {worker.driver or 'unknown'}, others of the fleet have {drivers.pop()}"
        self._workers[worker.name] = worker
        return ""

    def _offer(self, task: Task, desk: Desk) -> None:
        self._tasks[task.key] = task
        desk.offer(task)

    def _task(self, case: str, attempt: int) -> Task:
        options = self._options
        return Task(
            case,
            attempt,
            Way.RUN,
            replace(
                self._plan, cases=tuple(each for each in self._plan.cases if each.id == case), script=None
            ),
            f"parts/{plain_name(case)}-{attempt}",
            suite=self._suite,
            checks=Checks(options.audits, options.sealed, options.untrusted, options.accepted_missing),
            parcels=self._parcels,
        )

    def _returned(self, record: Returned, desk: Desk) -> None:
        task = self._tasks.pop(record.key)
        if not record.error:
            worker = self._workers[record.worker]
            self.measured.append(Measured(task.name, task.run, worker, digests_of(record.parcels)))
            done = len(self.measured) / len(self._plan.cases)
            self._observer.advance(done, f"{task.name} on {record.worker}")
            return
        self._observer.note(f"{task.name} on {record.worker}: {record.error}")
        self.unbuilt = self.unbuilt or _unbuilt(self._root / task.run)
        if self.unbuilt is not None:
            return  # compilers say the same everywhere
        if task.attempt < MOST_ATTEMPTS:
            self._offer(self._task(task.name, task.attempt + 1), desk)
        else:
            self.skipped[task.name] = f"{MOST_ATTEMPTS} attempts failed, the last: {record.error}"


def _unbuilt(folder: Path) -> BuildReport | None:
    """What a part's compilers said, where a kernel failed; None where that is not why it has no results."""
    try:
        built = load_manifest(folder).build
    except UsageError:  # nothing came back of it
        return None
    return built if built is not None and not built.passed else None


def _merged(plan: Plan, parts: Sequence[RunFolder], skipped: dict[str, str], folder: RunWriter) -> Outcome:
    """The run of all parts. Raises LabError where there are none, UsageError where one is not whole."""
    if not parts:
        raise LabError(next(iter(skipped.values()), "no case was measured"))
    order = {case.id: number for number, case in enumerate(plan.cases)}
    parts = sorted(parts, key=lambda part: order[part.plan.cases[0].id])
    for part in parts:
        if part.verify is None or part.results is None:
            raise UsageError(f"{part.path} has no results: {part.manifest.error or 'it was cut short'}")
    verified = VerifyReport(
        cases=tuple(dict.fromkeys(case for part in parts if part.verify for case in part.verify.cases)),
        skipped={key: why for part in parts if part.verify for key, why in part.verify.skipped.items()},
        baseline=plan.baseline,
        findings=tuple(dict.fromkeys(each for part in parts if part.verify for each in part.verify.findings)),
        kept_apart=tuple(
            dict.fromkeys(note for part in parts if part.verify for note in part.verify.kept_apart)
        ),
    )
    builds = [part.build for part in parts if part.build is not None]
    folder.set_build(
        BuildReport(
            _each_once(kernel for build in builds for kernel in build.kernels),
            _each_once(failure for build in builds for failure in build.failures),
        )
    )
    folder.write_verify(verified)
    samples = [sample for part in parts for sample in part.samples]
    for sample in samples:
        folder.append_sample(sample)
    results = [part.results for part in parts if part.results is not None]
    left_out = {key: why for each in results for key, why in each.skipped.items()} | skipped
    # The highest ceiling of all: no case is called impossible for another machine's.
    peaks = {name: max(each.peaks.get(name, 0.0) for each in results) for name in results[0].peaks}
    together = compare(plan, samples, left_out, peaks)
    planning_ms = {key: each for part in results for key, each in part.planning_ms.items()}
    together = replace(together, integrity=combined_integrity(results, together), planning_ms=planning_ms)
    together = with_claim(together, verified=verified.passed)
    folder.write_results(together)
    return Outcome(folder.path, verified, together)


def _each_once(records: Iterable[T]) -> tuple[T, ...]:
    """In their order. They need not be hashable."""
    kept: list[T] = []
    for record in records:
        if record not in kept:
            kept.append(record)
    return tuple(kept)


def combined_integrity(results: Sequence[Results], together: Results) -> Integrity:
    """What the checks of all parts came to, for the claim of them together.

    A part that is not faster was seen not to be slower than it says. That confirms no gain, so it does not count for a
    claim of one; where it was not confirmed, it stays.
    """
    gains = together.verdict is Verdict.FASTER
    parts = [part.integrity for part in results if part.integrity is not None]
    names = dict.fromkeys(name for part in parts for name in part.checks)
    combined = Integrity(
        findings=tuple(dict.fromkeys(each for part in parts for each in part.findings)),
        confirmations=tuple(
            each
            for part in results
            if part.integrity is not None
            for each in part.integrity.confirmations
            if not gains
            or not each.confirmed
            or part.verdict is Verdict.FASTER
            or each.implementation != together.candidate
        ),
        hidden_checked=sum(part.hidden_checked for part in parts),
        sealed=bool(parts) and all(part.sealed for part in parts),
        drawn_by_gain=bool(parts) and all(part.drawn_by_gain for part in parts),
        short_ms=max((part.short_ms for part in parts), default=0.0),
        why_not_audited=next((part.why_not_audited for part in parts if part.why_not_audited), ""),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        measuring=reduce(add, (part.measuring for part in parts), Spent()),
        checks={
            name: reduce(add, (part.checks.get(name, Spent()) for part in parts), Spent()) for name in names
        },
    )
    first = bool(parts) and all(part.highest_first for part in parts)
    return replace(
        combined, highest_first=first and _highest_confirmed(replace(together, integrity=combined))
    )


def _highest_confirmed(together: Results) -> bool:
    """Whether the highest speed-up of the claim was: each part looked at its own highest alone."""
    left_out = not_credited(together)
    rows = [(row.speedup, row.case_id) for row in claimed_rows(together, together.candidate)]
    highest = max((row for row in rows if row[1] not in left_out), default=None)
    assert together.integrity is not None
    return highest is not None and any(
        each.confirmed and (each.case, each.implementation) == (highest[1], together.candidate)
        for each in together.integrity.confirmations
    )
