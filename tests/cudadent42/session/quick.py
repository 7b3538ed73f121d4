"""A workshop that is quick (its run folders are real, what is in them is made up), a toy clock, and git."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cudadent42.base.errors import BuildFailedError, UsageError
from cudadent42.base.observer import Observer
from cudadent42.model.records import (
    BuildFailure,
    BuildReport,
    Check,
    Comparison,
    MachineReport,
    Plan,
    Results,
    Sample,
    Status,
    Verdict,
    VerifyReport,
)
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.runs import run_folder
from cudadent42.session.clock import Instant
from cudadent42.session.events import Decision, Settings
from cudadent42.session.protocol import Work
from cudadent42.session.workshop import Judgement, SessionMetric

CASE = AttentionCase("tiny", "fp16", 2, 4, 2, 32, 48, 64, causal=True)
PLAN = Plan("unit", "cpu", (CASE,), "pytorch", ("pytorch", "cudadent42"), repeats=3, warmup=0, seed=7)
MACHINE = MachineReport((Check("python", Status.OK, "3.11"),), "torch=none", {"cores": 2})


@dataclass
class QuickWorkshop:
    """Writes run folders as a run does, in milliseconds."""

    speedup: float = 0.8
    broken: bool = False
    """Whether builds fail."""
    stops: bool = False
    """Whether gates that fail end the session."""
    diagnosed: list[Path] = field(default_factory=list)

    def measure(self, settings: Settings, folder: Path, observer: Observer) -> None:
        self._run(folder, observer)

    def race(
        self, settings: Settings, project: Path, parent: str, child: str, folder: Path, observer: Observer
    ) -> None:
        old, new = (int(self._source(project, commit)) for commit in (parent, child))
        self._run(folder, observer, speedup=old / new)

    def _source(self, project: Path, commit: str) -> str:
        return git(project, "show", f"{commit}:kernel.py").partition("=")[2].split()[0]

    def _run(self, folder: Path, observer: Observer, speedup: float | None = None) -> None:
        factor = self.speedup if speedup is None else speedup
        with run_folder.RunWriter(folder, PLAN, MACHINE, None, ["test"]) as run:
            observer.stage("build")
            failures = (BuildFailure("kernel", "cpu", "no", "error"),) if self.broken else ()
            run.set_build(BuildReport((), failures))
            if failures:
                raise BuildFailedError("1 of the kernels could not be built")
            run.write_verify(VerifyReport(()))
            for block in range(PLAN.repeats):
                for position, name in enumerate(PLAN.implementations):
                    latency = 1.0 if name == "pytorch" else 1.0 / factor
                    run.append_sample(Sample(CASE.id, name, block, position, latency, 1, math.nan, 0.1, ""))
                observer.advance(block / PLAN.repeats, "tiny")
            verdict = Verdict.FASTER if factor > 1.01 else Verdict.SLOWER if factor < 0.99 else Verdict.EQUAL
            low, high = factor * 0.99, factor * 1.01
            row = Comparison(
                "tiny", "fp16", "cudadent42", "pytorch", factor, low, high, verdict, 1.0 / factor, 1.0, 3
            )
            run.write_results(
                Results("pytorch", "cudadent42", factor, low, high, verdict, 0.01, 0.001, (row,))
            )

    def diagnose(self, folder: Path, observer: Observer) -> str:
        self.diagnosed.append(folder)
        return "it does everything several times"

    def known_diagnosis(self, folder: Path) -> str:
        return "seen by hand" if (folder / "diagnosis.json").exists() else ""

    def judge(self, gates: Path, folder: Path, extra: Mapping[str, SessionMetric]) -> Judgement:
        results = run_folder.load_run(folder).results
        assert results is not None
        wanted = {"baseline": 0.0, "fix": 1.01, "validate": 0.97}[gates.stem]
        value = extra["session.improvement"].value if gates.stem == "validate" else results.speedup_geomean
        if value >= wanted:
            return Judgement(Decision.PASSED, 0, (f"passed: {value:.3f}",))
        stopped_by = gates.stem if self.stops else ""
        return Judgement(Decision.FAILED, 1, (f"failed: {value:.3f}, {wanted - value:.3f} off",), stopped_by)

    def check_entry(self, entry: str, project: Path) -> None:
        return

    def check_gates(self, text: str, where: str, work: Work, settings: Settings) -> None:
        if "metric" not in text:
            raise UsageError(f"{where}: no metric")

    def rate(self, name: str) -> float:
        return {"local": 0.0, "dear": 60.0}[name]


class Quiet:
    def __init__(self) -> None:
        self.said: list[str] = []

    def stage(self, name: str) -> None:
        return

    def advance(self, fraction: float, what: str) -> None:
        return

    def note(self, text: str) -> None:
        self.said.append(text)

    def detail(self, text: str) -> None:
        return


class ToyClock:
    """Moves on by itself a little, and as far as it is told."""

    def __init__(self) -> None:
        self.wall_s = 1_800_000_000.0
        self.uptime_s = 1000.0
        self.boot = "boot-1"
        self.host = "host-1"

    def __call__(self) -> Instant:
        from datetime import datetime, timezone

        self.pass_s(0.01)
        time = datetime.fromtimestamp(self.wall_s, timezone.utc).isoformat(timespec="milliseconds")
        return Instant(time, round(self.uptime_s, 3), self.boot, self.host)

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.uptime_s += seconds


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout
