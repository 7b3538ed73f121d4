"""What lessons are matched against, gathered from logs, run folders and the records of the stages."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import open_file, parse_json, read_json, read_text
from cudadent42.model.records import BuildReport, MachineReport, Results, Status
from cudadent42.runs.changes import count
from cudadent42.runs.source import Revision

Fact = str | int | float | bool | None

LOG_BYTES = 4 << 20
"""Of a log that are read: half from its beginning, half from its end."""

HEAD_LINES = 2000
TAIL_LINES = 6000
"""Of a log that are looked at: an error is near the end, its cause now and then near the beginning."""


_KERNELS = "flashmoe_science"

POWER_CAP = "power cap"
"""As ``Conditions.throttle_reasons`` has it."""


@dataclass(frozen=True)
class Log:
    """Lines that a stage, a compiler or a machine wrote."""

    source: str
    """File name or stage, for the reader."""
    text: str

    def lines(self) -> Iterable[tuple[int, str]]:
        """The lines that are looked at, with their numbers."""
        numbered = list(enumerate(self.text.splitlines(), 1))
        if len(numbered) > HEAD_LINES + TAIL_LINES:
            return numbered[:HEAD_LINES] + numbered[-TAIL_LINES:]
        return numbered


@dataclass(frozen=True)
class PatternEvidence:
    """All that is known about what happened. Whatever is not known is absent, and no symptom holds because of it."""

    logs: tuple[Log, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    resources: tuple[Mapping[str, float], ...] = ()
    """A table for each kernel: the fields of ``Resources``."""
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def __or__(self, other: PatternEvidence) -> PatternEvidence:
        return PatternEvidence(
            (*self.logs, *other.logs),
            {**self.metrics, **other.metrics},
            (*self.resources, *other.resources),
            {**self.facts, **other.facts},
        )


def of_text(text: str, source: str) -> PatternEvidence:
    return PatternEvidence(logs=(Log(source, text),))


def of_file(path: Path) -> PatternEvidence:
    """A log file: its beginning and its end, if it is long. Raises UsageError where it cannot be read."""
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            data = file.read(LOG_BYTES // 2)
            if size > LOG_BYTES:
                file.seek(-LOG_BYTES // 2, 2)
                data += b"\n"
            data += file.read(LOG_BYTES // 2)
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; expected a log file or a run folder"
        ) from error
    return of_text(data.decode("utf-8", errors="replace"), path.name)


def of_build(report: BuildReport) -> PatternEvidence:
    """Compiler output and the resources of every kernel."""
    lines = [f"{f.kernel} for {f.architecture}: {f.message}\n{f.log}" for f in report.failures]
    return PatternEvidence(
        logs=tuple(Log("build", text) for text in lines),
        metrics={"build_failures": len(report.failures)},
        resources=tuple(
            {name: float(value) for name, value in dataclasses.asdict(kernel.resources).items()}
            for kernel in report.kernels
            if kernel.resources is not None
        ),
    )


def of_source(source: Revision | None) -> PatternEvidence:
    """Whether the source differs from its commit, and in how many things of the kernels: the lab around them changes no
    kernel's speed."""
    if source is None:
        return PatternEvidence()
    return PatternEvidence(
        metrics={"changed_things": float(count(source.diff, _KERNELS).things)},
        facts={"source_dirty": source.dirty, "source_commit": source.commit},
    )


def of_machine(report: MachineReport) -> PatternEvidence:
    """The facts, and the checks that warn or failed as lines of a log."""
    lines = [
        f"{check.status.value}  {check.name}  {check.detail}  {check.cause}"
        for check in report.checks
        if check.status in (Status.WARN, Status.FAIL)
    ]
    return PatternEvidence(logs=(Log("preflight", "\n".join(lines)),), facts=report.facts)


def of_results(results: Results) -> PatternEvidence:
    """The numbers of a comparison."""
    blocks = sum(case.measured_blocks for case in results.cases)
    flagged = sum(case.flagged_blocks for case in results.cases)
    speedups = [case.speedup for case in results.cases]
    metrics = {
        "speedup_geomean": results.speedup_geomean,
        "speedup_geomean_ci_low": results.speedup_geomean_ci_low,
        "speedup_geomean_ci_high": results.speedup_geomean_ci_high,
        "speedup_min": min(speedups, default=math.nan),
        "speedup_max": max(speedups, default=math.nan),
        "speedup_median": statistics.median(speedups) if speedups else math.nan,
        "noise_floor": results.noise_floor,
        "detectable_effect": results.detectable_effect,
        "margin": results.margin,
        "flagged_fraction": flagged / blocks if blocks else math.nan,
        "cases_compared": float(len(results.cases)),
    }
    return PatternEvidence(metrics={name: value for name, value in metrics.items() if math.isfinite(value)})


def of_run(folder: Path) -> PatternEvidence:
    """A run folder, finished or not: notes, what the worker printed, build, machine, results, profile and source."""
    from cudadent42.runs import run_folder

    run = run_folder.load_run(folder)
    evidence = of_machine(run.machine) | of_source(run.manifest.revision)
    if run.build is not None:
        evidence |= of_build(run.build)
    if run.results is not None:
        evidence |= of_results(run.results)
    failed = [case for case in (run.verify.cases if run.verify else ()) if not case.passed]
    metrics: dict[str, float] = {
        "samples": len(run.samples),
        "profiled": 0.0,
        "built": float(run.build is not None),
    }
    if run.verify is not None:
        metrics["verification_failures"] = len(failed)
    if run.plan.cases:
        metrics["smallest_case_gflop"] = min(case.flops for case in run.plan.cases) / 1e9
    metrics |= _profile_metrics(folder)
    facts: dict[str, Fact] = {"run_status": run.manifest.status.value, "device": run.plan.device}
    words = [f"{case.case}: {case.implementation} is wrong: {case.detail}" for case in failed]
    entries = _entries(folder / run_folder.LOG)
    metrics |= _power(entries)
    evidence |= PatternEvidence(
        logs=(Log("run", "\n".join([run.manifest.error, *words, *_notes(entries)])),),
        metrics=metrics,
        facts=facts,
    )
    worker_log = folder / "worker.log"
    return evidence | of_file(worker_log) if worker_log.is_file() else evidence


def _profile_metrics(folder: Path) -> dict[str, float]:
    """``profile.json`` {"metrics": {name: number}}; nothing where there is none or it is damaged."""
    try:
        metrics = read_json(folder / "profile.json")["metrics"]
        numbers = {str(name): value for name, value in metrics.items() if type(value) in (int, float)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {"profiled": 1.0, **numbers}


def _entries(path: Path) -> list[dict[str, Any]]:
    """What ``log.jsonl`` holds; without the line that was being written when the run was killed."""
    entries = []
    try:
        lines = read_text(path, errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError):
            entry = parse_json(line)
            if isinstance(entry, dict):
                entries.append(entry)
    return entries


def _notes(entries: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for entry in entries:
        if entry.get("event") in ("note", "detail", "skipped"):
            yield str(entry.get("text") or entry.get("reason"))


def _power(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of the blocks that ran under the power cap; nothing where no block was logged."""
    blocks = [entry["conditions"] for entry in entries if isinstance(entry.get("conditions"), dict)]
    if not blocks:
        return {}
    capped = sum(POWER_CAP in str(block.get("throttle_reasons")) for block in blocks)
    return {"power_capped_fraction": capped / len(blocks)}
