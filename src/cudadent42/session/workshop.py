"""What a session has others do: measuring, racing, profiling, judging. Its one place that knows the rest of the lab."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cudadent42.base.errors import ExitCode
from cudadent42.base.observer import Observer
from cudadent42.session.events import Decision, Settings
from cudadent42.session.protocol import Work

if TYPE_CHECKING:
    from cudadent42.plan import Choices, RunOptions
    from cudadent42.profiles.records import Diagnosis
    from cudadent42.runs.run_folder import RunWriter


IMPROVEMENT = "session.improvement"
"""The speed-up over that of the baseline."""

ATTEMPTS_PASSED = "session.attempts_passed"

SESSION_METRICS = (IMPROVEMENT, ATTEMPTS_PASSED)
"""What only the session knows, for gates."""


@dataclass(frozen=True)
class SessionMetric:
    """A number that only the session knows. ``low`` and ``high`` are its 95 % interval; NaN where it has none."""

    value: float
    low: float = math.nan
    high: float = math.nan
    from_run: tuple[float, float] | None = None
    """The interval, were the baseline known exactly: the part of it that more blocks in the run that is judged mend."""


@dataclass(frozen=True)
class Judgement:
    """Gates held against a run."""

    decision: Decision
    exit_code: int
    lines: tuple[str, ...]
    """Which gate, by how much, and whether the measurement was able to tell."""
    stopped_by: str = ""
    """The first gate that failed of those that end a session; empty for none."""


class Workshop(Protocol):
    """All of it raises LabError where it cannot go on; what was measured until then is in the folder."""

    def measure(self, settings: Settings, folder: Path, observer: Observer) -> None:
        """Run the session's suite into a new run folder."""

    def race(
        self, settings: Settings, project: Path, parent: str, child: str, folder: Path, observer: Observer
    ) -> None:
        """Race two commits of the project into a new run folder."""

    def diagnose(self, folder: Path, observer: Observer) -> str:
        """Profile a run's slowest case, or judge by what its folder has; what limits it, and what to try first."""

    def known_diagnosis(self, folder: Path) -> str:
        """The diagnosis that a run folder has already, as `diagnose` would say it; empty where it has none."""

    def judge(self, gates: Path, folder: Path, extra: Mapping[str, SessionMetric]) -> Judgement:
        """Hold a gate file against a run and further metrics."""

    def check_entry(self, entry: str, project: Path) -> None:
        """Raises UsageError where what is to be changed is not in the project."""

    def check_gates(self, text: str, where: str, work: Work, settings: Settings) -> None:
        """Raises UsageError where the text is not a gate file, or one on metrics that this work does not have."""

    def rate(self, name: str) -> float:
        """US dollars an hour. Raises UsageError where the name is unknown."""


class Lab:
    """The real one."""

    def __init__(self, command: tuple[str, ...], opened: Callable[[RunWriter], None]) -> None:
        self._command = command
        self._opened = opened

    def measure(self, settings: Settings, folder: Path, observer: Observer) -> None:
        from cudadent42.flows import pipeline

        pipeline.run(self._options(settings, self._choices(settings), folder), observer, self._opened)

    def _options(self, settings: Settings, choices: Choices, folder: Path) -> RunOptions:
        from cudadent42.plan import RunOptions

        return RunOptions(
            choices=choices,
            device=settings.device,
            ignore_preflight=settings.ignore_preflight,
            output=folder,
            command=self._command,
        )

    def _choices(self, settings: Settings) -> Choices:
        """What is changed is what is measured: the first beside the baseline, whose ratio is the run's."""
        from cudadent42.plan import Choices

        own = (settings.entry,) if settings.entry else ()
        return Choices(
            suite=settings.suite,
            dtypes=settings.dtypes,
            cases=settings.cases,
            implementations=(*own, *settings.implementations),
            repeats=settings.repeats,
        )

    def race(
        self, settings: Settings, project: Path, parent: str, child: str, folder: Path, observer: Observer
    ) -> None:
        from cudadent42.flows import race

        options = race.RaceOptions(
            run=self._options(settings, self._race_choices(settings), folder),
            repository=project,
            entry=settings.entry,
        )
        race.race(parent, child, options, observer, self._opened)

    def _race_choices(self, settings: Settings) -> Choices:
        from cudadent42.flows import race
        from cudadent42.plan import Choices

        # The suite of the race has cases of its own; only the session's suite again is narrowed as the session is.
        same = settings.race_suite == settings.suite
        return race.with_defaults(
            Choices(
                suite=settings.race_suite,
                dtypes=settings.dtypes,
                cases=settings.cases if same else (),
                repeats=settings.repeats,
            )
        )

    def diagnose(self, folder: Path, observer: Observer) -> str:
        from cudadent42.flows import doctor
        from cudadent42.stages import report

        observer.stage("profile")
        diagnosis = doctor.examine(folder, observer=observer)
        observer.stage("report")
        report.write(folder)  # which has the diagnosis from now on
        return _in_words(diagnosis)

    def known_diagnosis(self, folder: Path) -> str:
        from cudadent42.profiles import store

        diagnosis = store.load_diagnosis(folder)
        return "" if diagnosis is None else _in_words(diagnosis)

    def judge(self, gates: Path, folder: Path, extra: Mapping[str, SessionMetric]) -> Judgement:
        from cudadent42.stages import gates as lab_gates

        evidence = lab_gates.evidence_of(folder)
        blocks = evidence.overall["speedup"].blocks
        more = {
            name: lab_gates.Measured(one.value, one.low, one.high, blocks, from_blocks=one.from_run)
            if math.isfinite(one.low)
            else lab_gates.Measured(one.value)
            for name, one in extra.items()
        }
        report = lab_gates.evaluate(lab_gates.load(gates), evidence.with_measured(more))
        lab_gates.write_report(folder, report)
        return Judgement(
            Decision(report.decision.value),
            ExitCode(report.exit_code),
            lab_gates.report_lines(report),
            report.stopped_by,
        )

    def check_entry(self, entry: str, project: Path) -> None:
        from cudadent42.versions.sources import check_entry

        if entry:
            check_entry(entry, project)

    def check_gates(self, text: str, where: str, work: Work, settings: Settings) -> None:
        from cudadent42.flows import pipeline
        from cudadent42.model.device_names import parse_device
        from cudadent42.plan import make_plan
        from cudadent42.registry import registry
        from cudadent42.stages import gates
        from cudadent42.stages.gates import loader

        file = loader.parse(text, where)
        choices = self._race_choices(settings) if work is Work.CHANGE else self._choices(settings)

        def check(device: str) -> None:
            gates.check(file, make_plan(choices, device, registry), SESSION_METRICS)

        pipeline.check_on_devices(parse_device(settings.device), check)

    def rate(self, name: str) -> float:
        from cudadent42.cost import rates

        return rates.load().get(name).usd_per_hour


def _in_words(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.summary} Next: {diagnosis.next_step}"
