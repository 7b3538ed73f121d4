"""Which commit made it slower? git's bisection, with a race against the good commit as the judge.

The folder of a bisection holds what it is about (``bisect.json``), each judgement as it falls (``steps.jsonl``), and
the run folders of its races. A bisection that was killed goes on from there: the judgements are given to git again.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from cudadent42.base.errors import BuildFailedError, ExitCode, LabError, UsageError
from cudadent42.base.journal import Files, Journal
from cudadent42.base.observer import Forwarding, Observer
from cudadent42.flows import pipeline
from cudadent42.flows.pipeline import Execute, Outcome, Prepared
from cudadent42.flows.race import RaceOptions, as_run, ignore_folder
from cudadent42.flows.race.history import Bisection, Mark, parent_of, subject
from cudadent42.model.records import Version
from cudadent42.plan import Choices, RunOptions, for_versions
from cudadent42.runs.run_folder import load_manifest
from cudadent42.stages.gates import Decision, GateFile, GateReport, counts, outcome_lines
from cudadent42.versions.sources import (
    PACKAGE_FOLDERS,
    WORKING_TREE,
    as_folder,
    export,
    is_of_package,
    repository_root,
    resolve,
)

FILES = Files("bisect.json", "steps.jsonl", "commits, gates or options")

RETRY_PRECISION = 0.5
"""Of the precision, where a race was undecided and is run once more."""

RETRY_BUDGET = 4.0
"""Times the budget of the race, likewise: half the width takes four times the blocks."""


class Role(str, Enum):
    """What a race is for."""

    ENDPOINTS = "endpoints"
    """Whether the bad commit differs from the good one at all."""
    STEP = "step"
    CONFIRMATION = "confirmation"
    """The commit that was found, against its parent."""


class Ending(str, Enum):
    FOUND = "found"
    NOT_CONFIRMED = "not confirmed"
    """The commit that was found passes the gate against its own parent: a judgement was wrong, or the slowdown came in
    steps that are too small for the gate."""
    NO_DIFFERENCE = "no difference"
    """The bad commit passes the gate."""
    UNDECIDED = "undecided"
    """The race of the two ends could not tell them apart."""
    ONLY_SKIPPED = "only skipped"
    """The first bad commit is among some that could not be judged."""


@dataclass(frozen=True)
class Step:
    """One judgement."""

    role: Role
    commit: str
    mark: Mark
    reason: str
    """In one line: the gate that decided, or why nothing could be decided."""
    run: str = ""
    """Run folder, relative to the bisection's; empty where nothing was raced."""
    digest: str = ""
    """Of the sources (``Version.digest``)."""


@dataclass(frozen=True)
class Setup:
    """What a bisection is about; one folder is about one."""

    schema_version: int
    good: str
    bad: str
    entry: str
    gate: GateFile
    choices: Choices
    device: str


@dataclass(frozen=True)
class BisectResult:
    folder: Path
    ending: Ending
    commit: str
    """The first bad commit, or the one that was not confirmed; empty where none was found."""
    subject: str
    possible: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def exit_code(self) -> ExitCode:
        return {
            Ending.FOUND: ExitCode.PASS,
            Ending.NOT_CONFIRMED: ExitCode.GATE_UNDECIDED,
            Ending.NO_DIFFERENCE: ExitCode.USAGE,
            Ending.UNDECIDED: ExitCode.GATE_UNDECIDED,
            Ending.ONLY_SKIPPED: ExitCode.GATE_UNDECIDED,
        }[self.ending]


SCHEMA_VERSION = 1


def bisect(
    good: str, bad: str, options: RaceOptions, observer: Observer, execute: Execute | None = None
) -> BisectResult:
    """Find the first commit after ``good``, up to ``bad``, that fails ``options.run.gate`` in a race against ``good``.

    ``options.run.output`` is the bisection's folder (None: under ``bisects/``). A bisection of the same commits that it
    holds goes on. ``execute``: what stands in for `pipeline.execute`.

    Raises:
        UsageError: an end is not a commit, the folder is about something else, or git cannot bisect.
        LabError: the good commit does not build or is wrong, or the machine is not ready.
    """
    run = options.run
    if run.gate is None:
        raise UsageError("a bisection needs gates to judge by; name them with --gate")
    for end in (good, bad):
        if end == WORKING_TREE or as_folder(end) is not None:
            raise UsageError(f"{end} is not a commit; a bisection is between two commits")
    root = repository_root(options.repository)
    setup = Setup(
        schema_version=SCHEMA_VERSION,
        good=resolve(good, root),
        bad=resolve(bad, root),
        entry=options.entry,
        gate=run.gate,
        choices=run.choices,
        device=run.device,
    )
    folder = run.output or Path("bisects") / f"{setup.good[:8]}-{setup.bad[:8]}"
    with Journal(folder, FILES, setup, Setup, Step) as journal:
        return _Search(root, setup, run, observer, folder, journal, execute or pipeline.execute).run()


class _Search:
    def __init__(
        self,
        root: Path,
        setup: Setup,
        options: RunOptions,
        observer: Observer,
        folder: Path,
        journal: Journal[Setup, Step],
        execute: Execute,
    ) -> None:
        self._execute = execute
        self._root = root
        self._setup = setup
        self._options = options
        self._observer = observer
        self._folder = folder
        self._journal = journal
        self._good = export(setup.good, root, setup.entry)
        self._prepared: Prepared | None = None
        """The machine is looked at once, before the first race."""

    def run(self) -> BisectResult:
        ends = self._judged(Role.ENDPOINTS, self._setup.bad, self._good)
        if ends.mark is not Mark.BAD:
            ending = Ending.NO_DIFFERENCE if ends.mark is Mark.GOOD else Ending.UNDECIDED
            return self._result(ending)
        with tempfile.TemporaryDirectory(prefix="cudadent42-bisect-") as scratch:
            paths = PACKAGE_FOLDERS if is_of_package(self._setup.entry) else ()
            search = Bisection(Path(scratch) / "git", self._root, self._setup.good, self._setup.bad, paths)
            while (position := search.position()).next:
                step = self._judged(Role.STEP, position.next, self._good)
                search.mark(position.next, step.mark)
        if not position.first_bad:
            return self._result(Ending.ONLY_SKIPPED, possible=position.possible)
        parent = parent_of(self._root, position.first_bad)
        if parent:
            own = export(parent, self._root, self._setup.entry)
            if self._judged(Role.CONFIRMATION, position.first_bad, own).mark is Mark.GOOD:
                return self._result(Ending.NOT_CONFIRMED, commit=position.first_bad)
        return self._result(Ending.FOUND, commit=position.first_bad)

    def _result(self, ending: Ending, commit: str = "", possible: tuple[str, ...] = ()) -> BisectResult:
        about = subject(self._root, commit) if commit else ""
        return BisectResult(self._folder, ending, commit, about, possible, self._journal.entries)

    def _judged(self, role: Role, commit: str, parent: Version) -> Step:
        """The judgement on a commit: the one in the journal, or a new one, which is then in the journal."""
        for step in self._journal.entries:
            if (step.role, step.commit) == (role, commit):
                return step
        step = self._judge(role, commit, parent)
        self._journal.append(step)
        self._observer.note(
            f"{commit[:8]} {subject(self._root, commit)[:60]}: {step.mark.value}, {step.reason}"
        )
        return step

    def _judge(self, role: Role, commit: str, parent: Version) -> Step:
        try:
            child = export(commit, self._root, self._setup.entry)
        except UsageError as error:
            return Step(role, commit, Mark.SKIP, str(error))
        twin = self._alike(role, child, parent)
        if twin:
            return Step(
                role, commit, twin.mark, f"the same source as {twin.commit[:8]}", twin.run, child.digest
            )
        for attempt in (1, 2):
            folder = self._run_folder(commit)
            try:
                outcome = self._race(role, parent, child, attempt, folder)
            except BuildFailedError as error:
                reason = f"it does not build: {_failure(folder) or error}"
                return Step(role, commit, Mark.SKIP, reason, self._name(folder), child.digest)
            step = self._read(role, commit, child, outcome)
            if step.mark is not Mark.SKIP or not outcome.verify.passed:
                break
        return step

    def _alike(self, role: Role, child: Version, parent: Version) -> Step | None:
        """A commit whose sources are those of one that was judged needs no race."""
        if child.digest == parent.digest:
            return Step(role, parent.commit, Mark.GOOD, "")
        if role is Role.CONFIRMATION:
            return None
        alike = (step for step in self._journal.entries if step.digest == child.digest)
        return next((step for step in alike if step.role is not Role.CONFIRMATION), None)

    def _race(self, role: Role, parent: Version, child: Version, attempt: int, folder: Path) -> Outcome:
        """With a report where it is evidence; of a step one can be had from its run folder."""
        options = replace(self._options, output=folder, with_report=role is not Role.STEP)
        run = replace(as_run((parent, child), options), audits=False)
        observer = _Discreet(self._observer)
        if self._prepared is None:
            self._prepared = pipeline.suited(pipeline.prepare(run, observer), run, self._observer)
        plan = for_versions(self._prepared.plan, run.versions)
        if attempt > 1:
            plan = replace(
                plan,
                precision=plan.precision and RETRY_PRECISION * plan.precision,
                repeats=int(RETRY_BUDGET * plan.repeats),
                budget_s=plan.budget_s and RETRY_BUDGET * plan.budget_s,
            )
        return self._execute(replace(self._prepared, plan=plan), run, observer, ignore_folder)

    def _read(self, role: Role, commit: str, child: Version, outcome: Outcome) -> Step:
        """A race as a judgement."""
        run = self._name(outcome.folder)
        if not outcome.verify.passed:
            wrong = {each.implementation for each in outcome.verify.cases if not each.passed}
            if outcome.results.baseline in wrong and role is not Role.CONFIRMATION:
                raise LabError(
                    f"the good commit {self._setup.good[:8]} fails verification; see {outcome.folder}"
                )
            return Step(role, commit, Mark.SKIP, "its results are wrong", run, child.digest)
        if outcome.gates is None:
            raise LabError(f"{outcome.folder} was not held against gates")
        mark = {Decision.PASSED: Mark.GOOD, Decision.FAILED: Mark.BAD, Decision.UNDECIDED: Mark.SKIP}
        return Step(role, commit, mark[outcome.gates.decision], _deciding(outcome.gates), run, child.digest)

    def _run_folder(self, commit: str) -> Path:
        """A new folder for a race; one that was killed keeps its own."""
        runs = self._folder / "runs"
        number = len(list(runs.iterdir())) + 1 if runs.is_dir() else 1
        return runs / f"{number:02}-{commit[:8]}"

    def _name(self, folder: Path) -> str:
        return folder.relative_to(self._folder).as_posix()


def _failure(folder: Path) -> str:
    """What the first kernel of a run failed with; empty where that is not on record."""
    built = load_manifest(folder).build
    return " ".join(built.failures[0].message.split()) if built is not None and built.failures else ""


def _deciding(report: GateReport) -> str:
    """The line of the last gate that decided: those of built-in files go from the general to the particular."""
    for outcome in reversed(report.outcomes):
        if outcome.decision is report.decision and counts(outcome.gate):
            return " ".join(outcome_lines(outcome)[0].split())
    return report.decision.value


class _Discreet(Forwarding):
    """An observer of the races: their progress, and not every note of theirs."""

    def note(self, text: str) -> None:
        self.observer.detail(text)
