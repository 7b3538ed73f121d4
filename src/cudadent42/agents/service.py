"""What each tool does: limits first, then a process of the lab, then its answer as a record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Protocol

from cudadent42.agents import tools
from cudadent42.agents.desk import Desk, Job, State, exit_code
from cudadent42.agents.outward import quoted
from cudadent42.agents.project import Project
from cudadent42.agents.tasks import Examination, Preflight, Race, Task, Verification
from cudadent42.base import git
from cudadent42.base.errors import ExitCode, LabError, UsageError
from cudadent42.base.paths import real_path
from cudadent42.base.serialise import decode
from cudadent42.cost import rates
from cudadent42.cost.rates import Rate
from cudadent42.decisions.allowance import Allowance, Limits, allow
from cudadent42.decisions.claims import quotable
from cudadent42.model.device_names import parse_device
from cudadent42.model.history import tracks
from cudadent42.model.implementations import is_plug_in
from cudadent42.model.records import MachineReport, VerifyReport
from cudadent42.plan import Choices, check_below
from cudadent42.profiles.records import Diagnosis

PREFLIGHT_MINUTES = 10.0
"""After which a preflight that hangs is ended. It costs next to nothing, so nobody is asked."""

MEASURING_SHARE = 0.5
"""Of a race's minutes, after which no further block begins: building, verifying and the audit take the rest."""

MOST_WAIT_S = 300.0


class Person(Protocol):
    """Who is told how a call goes on, and asked what is not the agent's to decide."""

    async def agrees(self, question: str) -> bool:
        """Raises LabError where nobody can be asked."""

    async def told(self, progress: float, what: str) -> None: ...


@dataclass(frozen=True)
class Service:
    """The tools of one server."""

    project: Project
    limits: Limits
    rate: Rate
    desk: Desk

    async def call(self, name: str, arguments: dict[str, Any], person: Person) -> object:
        """The record that answers. Raises LabError, with what was expected and what to do."""
        tool = tools.TOOLS.get(name)
        if tool is None:
            raise UsageError(f"there is no tool {name!r}; expected one of {', '.join(tools.TOOLS)}")
        try:
            wanted = decode(tool.takes, arguments)
        except ValueError as error:
            raise UsageError(str(error)) from error
        handlers: dict[str, Callable[[Any, Person], Awaitable[object]]] = {
            "preflight": self._preflight,
            "verify": self._verify,
            "race_start": self._race_start,
            "race_status": self._race_status,
            "race_result": self._race_result,
            "doctor": self._doctor,
            "history": self._history,
            "budget": self._budget,
            "stop": self._stop,
        }
        return await handlers[name](wanted, person)

    # ------------------------------------------------------------ what answers when it is done

    async def _preflight(self, wanted: tools.OnDevice, person: Person) -> tools.PreflightAnswer:
        allowance = Allowance(PREFLIGHT_MINUTES, 0.0, must_be_agreed=False)
        device = parse_device(wanted.device)
        job = await self.desk.start("preflight", Preflight(device), device, allowance, self.rate.usd_per_hour)
        machine = decode(MachineReport, await self._answer(job, person))
        return tools.PreflightAnswer(machine.ready, machine.summary, machine.checks)

    async def _verify(self, wanted: tools.VerifyArguments, person: Person) -> tools.VerifyAnswer:
        choices = self._choices(wanted, "default")
        task = Verification(parse_device(wanted.device), choices, wanted.untrusted)
        job = await self._start("verify", task, task.device, wanted, person)
        report = decode(VerifyReport, await self._answer(job, person))
        return tools.VerifyAnswer(
            passed=report.passed and not report.findings,
            checked=len(report.cases),
            wrong=tuple(
                replace(case, detail=quoted(case.detail)) for case in report.cases if not case.passed
            ),
            skipped={name: quoted(reason) for name, reason in report.skipped.items()},
            findings=tuple(replace(each, evidence=quoted(each.evidence)) for each in report.findings),
        )

    async def _doctor(self, wanted: tools.DoctorArguments, person: Person) -> Diagnosis:
        folder = self.project.path(wanted.folder)
        task = Examination(folder, wanted.case, wanted.implementation, wanted.measure)
        if wanted.measure:
            await asyncio.to_thread(self._check_folder, folder)
        job = await self._start("doctor", task, "auto", wanted, person)
        return decode(Diagnosis, await self._answer(job, person))

    def _check_folder(self, folder: Path) -> None:
        """Whether what a run folder names may be executed. Raises UsageError."""
        from cudadent42.runs.checking import load_checked

        plan = load_checked(folder).plan
        names = [name for name in (plan.baseline, *plan.implementations) if name not in plan.versions]
        check_below([self.project.implementation(name) for name in names], self.project.root)
        for version in plan.versions.values():
            entry = PurePath(version.entry)
            if entry.is_absolute() or ".." in entry.parts:
                raise UsageError(
                    f"{version.entry!r} is outside of the version {version.revision!r} in {folder}"
                )

    async def _answer(self, job: Job, person: Person) -> Any:
        """What the job answers. A caller that goes away takes it along."""
        try:
            while job.runs:
                await person.told(job.progress, job.stage or "starting")
                await job.until_changed()
        finally:
            self.desk.stop(job, "whoever asked for it has gone")
        if job.state is not State.FINISHED or job.news is None:
            raise _ended(job)
        return job.news.answer

    # ------------------------------------------------------------ races

    async def _race_start(self, wanted: tools.RaceArguments, person: Person) -> tools.RaceStarted:
        task = await asyncio.to_thread(self._race, wanted)
        job = await self._start("race", task, task.device, wanted, person)
        return tools.RaceStarted(job.name, job.allowance.minutes, job.allowance.usd)

    def _race(self, wanted: tools.RaceArguments) -> Race:
        device = parse_device(wanted.device)
        if not wanted.against:
            return Race(device, self._choices(wanted, "default"), wanted.sealed, untrusted=wanted.untrusted)
        against = self.project.revision(wanted.against)
        if wanted.implementation and not is_plug_in(wanted.implementation):
            raise UsageError(
                f"implementation {wanted.implementation!r}: against a revision, expected a file of the project or "
                "nothing, which means this project's kernels"
            )
        entry = ""
        if wanted.implementation:
            try:
                top = git.root(self.project.root)
            except git.GitError as error:
                raise UsageError(f"{self.project.root} has no revisions: {error}") from error
            file, colon, function = self.project.implementation(wanted.implementation).rpartition(".py:")
            path = Path(file + ".py" if colon else function)
            entry = path.relative_to(real_path(top)).as_posix() + (f":{function}" if colon else "")
        choices = self._choices(wanted, "race", with_implementation=False)
        return Race(device, choices, wanted.sealed, against, entry, untrusted=wanted.untrusted)

    async def _race_status(self, wanted: tools.StatusArguments, person: Person) -> tools.RaceStatus:
        job = self._job(wanted.race)
        if not 0.0 <= wanted.wait_s <= MOST_WAIT_S:
            raise UsageError(f"wait_s {wanted.wait_s:g}: expected a number from 0 to {MOST_WAIT_S:g}")
        until = time.monotonic() + wanted.wait_s
        while job.runs and (left_s := until - time.monotonic()) > 0:
            await person.told(job.progress, job.stage or "starting")
            try:
                await asyncio.wait_for(job.until_changed(), left_s)
            except asyncio.TimeoutError:
                break
        return _status(job)

    async def _race_result(self, wanted: tools.WhichRace, person: Person) -> tools.RaceResult:
        job = self._job(wanted.race)
        if job.runs:
            raise UsageError(f"{job.name} goes on ({job.stage or 'starting'}); ask race_status with wait_s")
        if job.state is not State.FINISHED:
            raise _ended(job)
        return await asyncio.to_thread(self._result, job)

    def _result(self, job: Job) -> tools.RaceResult:
        from cudadent42.runs.checking import load_checked

        folder = self.project.path(job.folder)
        run = load_checked(folder)
        results = run.results
        return tools.RaceResult(
            race=job.name,
            folder=str(folder.relative_to(self.project.root)),
            claim_allowed=results is not None and results.claim_allowed,
            claim_reason=results.claim_reason if results is not None else "nothing was measured",
            quote=quotable(results, folder.name, run.manifest.environment) if results is not None else "",
            exit_code=exit_code(job),
            verified=run.verify is not None and run.verify.passed,
            results=results,
        )

    async def _stop(self, wanted: tools.WhichRace, person: Person) -> tools.RaceStatus:
        job = self._job(wanted.race)
        self.desk.stop(job, "the agent asked for it")
        await job.until_done()
        return _status(job)

    # ------------------------------------------------------------ what needs no process

    async def _history(self, wanted: tools.HistoryArguments, person: Person) -> tools.HistoryAnswer:
        return await asyncio.to_thread(_on_record, wanted)

    async def _budget(self, wanted: tools.Nothing, person: Person) -> tools.Budget:
        committed_usd = self.desk.committed_usd
        return tools.Budget(
            max_minutes=self.limits.minutes,
            max_money=self.limits.usd,
            ask_above=self.limits.ask_above_usd,
            rate=self.rate.name,
            usd_per_hour=self.rate.usd_per_hour,
            committed_usd=committed_usd,
            left_usd=max(0.0, self.limits.usd - committed_usd),
            starts=tuple(
                tools.Spent(job.name, job.state, job.minutes, job.usd) for job in self.desk.jobs.values()
            ),
        )

    # ------------------------------------------------------------ parts

    def _choices(self, wanted: tools.WhatToRun, suite: str, *, with_implementation: bool = True) -> Choices:
        names = (self.project.implementation(wanted.implementation),) if wanted.implementation else ()
        race = wanted if isinstance(wanted, tools.RaceArguments) else None
        return Choices(
            suite=self.project.suite(wanted.suite) if wanted.suite else suite,
            dtypes=wanted.dtypes,
            cases=wanted.cases,
            implementations=names if with_implementation else (),
            repeats=race.repeats if race else None,
            timer=race.timer if race else None,
            budget_s=max(1.0, MEASURING_SHARE * wanted.max_minutes * 60.0) if race else None,
        )

    async def _start(self, what: str, task: Task, device: str, wanted: tools.Spending, person: Person) -> Job:
        """Begin what the limits allow, and the person where they say so. What it may cost is reserved before anything
        is waited for, so that two starts at once do not both have the same money."""
        allowance = self._allowance(wanted)
        if allowance.must_be_agreed:
            with self.desk.reserved(allowance.usd):
                await self._agreed(what, allowance, person)
            allowance = self._allowance(wanted)  # the answer may have taken long
        with self.desk.reserved(allowance.usd):
            return await self.desk.start(what, task, device, allowance, self.rate.usd_per_hour)

    def _allowance(self, wanted: tools.Spending) -> Allowance:
        return allow(
            wanted.max_minutes,
            wanted.max_money,
            self.limits,
            usd_per_hour=self.rate.usd_per_hour,
            committed_usd=self.desk.committed_usd,
        )

    async def _agreed(self, what: str, allowance: Allowance, person: Person) -> None:
        """Raises LabError where the person does not agree."""
        question = (
            f"May a run of {what} begin that takes up to {allowance.minutes:g} minutes and costs up to "
            f"{allowance.usd:.2f} US dollars ({self.rate.name}, {self.rate.usd_per_hour:g} an hour)?"
        )
        if not await person.agrees(question):
            raise UsageError(f"the person did not agree to {allowance.usd:.2f} US dollars; nothing began")

    def _job(self, name: str) -> Job:
        job = self.desk.jobs.get(name)
        if job is None:
            there_are = ", ".join(self.desk.jobs) or "none"
            raise UsageError(f"this server started no {name!r}; there are {there_are}")
        return job


class EndedError(LabError):
    """A job that has no answer."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = code


def _ended(job: Job) -> EndedError:
    notes = quoted("; ".join(job.notes))
    return EndedError(job.error + (f" ({notes})" if notes else ""), exit_code(job))


def _status(job: Job) -> tools.RaceStatus:
    return tools.RaceStatus(
        race=job.name,
        state=job.state,
        stage=job.stage,
        progress=job.progress,
        minutes=job.minutes,
        cost_usd=job.usd,
        notes=tuple(map(quoted, job.notes)),
        error=job.error,
    )


def _on_record(wanted: tools.HistoryArguments) -> tools.HistoryAnswer:
    from cudadent42.ledger import open_for_reading

    opened = open_for_reading()
    from cudadent42.ledger import queries

    if not wanted.case:
        names = opened.read(queries.known_cases)
        return tools.HistoryAnswer(cases=tuple(tools.OnRecord(*each) for each in names))
    name, _, dtype = wanted.case.partition("/")
    points = opened.read(
        lambda connection: queries.history(connection, name, dtype or None, wanted.implementation or None)
    )
    if not points:
        raise UsageError(
            f"the ledger has no comparison of the case {wanted.case!r}; without case, all are listed"
        )
    return tools.HistoryAnswer(
        tracks=tuple(tools.HistoryTrack(each.title, each.points, each.changes) for each in tracks(points))
    )


def make_service(root: Path, limits: Limits, desk: Desk) -> Service:
    """For a project's folder. Raises UsageError where this machine's rate is unknown."""
    return Service(Project(root), limits, rates.load().get(rates.of_this_machine()), desk)
