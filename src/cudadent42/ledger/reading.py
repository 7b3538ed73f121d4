"""A run folder as rows of the ledger."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import in_range, parse_json, read_json, read_text
from cudadent42.base.serialise import dumps, encode
from cudadent42.cost.rates import LOCAL, RATE_VARIABLE
from cudadent42.model.cases import Case, untagged_operation
from cudadent42.model.records import Comparison, Results
from cudadent42.runs import run_folder
from cudadent42.runs.instructions import with_instructions
from cudadent42.runs.run_folder import Manifest

Row = dict[str, Any]
"""Column name to value."""

ID_DIGITS = 32
_NEEDED = ("case", "dtype", "implementation", "latency_ms", "memory_mb", "flags")
_QUANTILES = ("min_ms", 0.0), ("p10_ms", 0.1), ("median_ms", 0.5), ("p90_ms", 0.9), ("max_ms", 1.0)


@dataclass(frozen=True)
class RunRows:
    """One run; the rows of the parts lack the column ``run``."""

    run: Row
    cases: tuple[Row, ...]
    comparisons: tuple[Row, ...]
    timings: tuple[Row, ...]


def read_run(folder: Path, session: str | None) -> RunRows:
    """The rows of a run folder, finished or not. Raises UsageError where it cannot be understood."""
    manifest = run_folder.load_manifest(folder, with_build=False)
    results = run_folder.load_results(folder)
    timings = _timings(folder / run_folder.SAMPLES)
    if not is_time(manifest.started):
        raise UsageError(
            f"{folder / run_folder.MANIFEST}: started is {manifest.started!r}; expected a time with its zone"
        )
    plan, machine = manifest.plan, manifest.machine
    processor = machine.facts.get("gpu_name" if plan.device.startswith("cuda") else "cpu_model")
    run: Row = {
        "id": identity(manifest),
        "path": path_text(folder),
        "session": session,
        "status": manifest.status.value,
        "error": manifest.error,
        "started": manifest.started,
        "ended": manifest.ended,
        "seconds": seconds_between(manifest.started, manifest.ended or _last_sign_of_life(folder)),
        "rate": manifest.environment.get(RATE_VARIABLE, LOCAL),
        "suite": plan.suite,
        "device": plan.device,
        "timer": plan.timer.value,
        "cache": plan.cache.value,
        "machine": with_instructions(str(processor or machine.summary), manifest),
        "summary": machine.summary,
        "version": manifest.version,
        "revision": _revision(manifest),
        "branch": manifest.revision.branch if manifest.revision else "",
        "baseline": plan.baseline,
        "verified": _verified(folder / run_folder.VERIFY),
        "samples": sum(row["samples"] for row in timings),
        **_headline(results),
    }
    return RunRows(
        run=run,
        cases=tuple({"name": case.name, "dtype": case.dtype, "shape": _shape(case)} for case in plan.cases),
        comparisons=tuple(_comparisons(results, manifest)),
        timings=timings,
    )


def _shape(case: Case) -> str:
    """The case as JSON. Its operation is named where the fields alone would be taken for another's, and what is not set
    is left out; so rows that were written before there were operations, scales and strides stay comparable."""
    fields = {name: value for name, value in encode(case).items() if value is not None and value != []}
    if untagged_operation(fields) != case.operation:
        fields = {"operation": case.operation, **fields}
    return dumps(fields, indent=None)


def path_text(folder: Path) -> str:
    """A folder's path, as databases take it. Raises UsageError where its name is no UTF-8."""
    text = str(folder.absolute())
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text!a} is no UTF-8, which databases need; rename the folder") from error
    return text


def identity(manifest: Manifest) -> str:
    """The same for every copy of a run folder and at every stage of the run: of what is there from the start."""
    plan = manifest.plan
    parts = (manifest.started, manifest.command, plan.suite, plan.device, plan.seed, manifest.machine.facts)
    text = dumps(list(parts), indent=None)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_DIGITS]


def _verified(path: Path) -> bool | None:
    """Whether every check of ``verify.json`` passed, without making a record of each; None where it was not written."""
    try:
        checks = read_json(path)["cases"]
        return all(check["passed"] is True for check in checks)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _headline(results: Results | None) -> Row:
    names = ("candidate", "speedup", "ci_low", "ci_high", "verdict", "noise_floor")
    if results is None:
        return dict.fromkeys(names)
    values = (
        results.candidate,
        _number(results.speedup_geomean),
        _number(results.speedup_geomean_ci_low),
        _number(results.speedup_geomean_ci_high),
        results.verdict.value if results.cases else None,
        _number(results.noise_floor),
    )
    return dict(zip(names, values, strict=True))


def _revision(manifest: Manifest) -> str:
    return manifest.revision.short if manifest.revision else ""


def _comparisons(results: Results | None, manifest: Manifest) -> Iterable[Row]:
    if results is None:
        return
    groups = (("candidate", results.cases), ("other", results.others), ("control", results.control))
    for role, group in groups:
        for row in group:
            source = manifest.sources.get(row.implementation)
            revision = _revision(manifest) if source is None else source.label
            yield {"role": role, "revision": revision, **_comparison(row)}


def _comparison(row: Comparison) -> Row:
    return {
        "name": row.name,
        "dtype": row.dtype,
        "implementation": row.implementation,
        "baseline": row.baseline,
        "speedup": _number(row.speedup),
        "ci_low": _number(row.ci_low),
        "ci_high": _number(row.ci_high),
        "verdict": row.verdict.value,
        "latency_ms": _number(row.latency_ms),
        "baseline_latency_ms": _number(row.baseline_latency_ms),
        "blocks": row.blocks,
        "flagged_blocks": row.flagged_blocks,
    }


@dataclass
class _Group:
    latencies: list[float]
    memory_mb: list[float]
    flagged: int = 0


def _timings(path: Path) -> tuple[Row, ...]:
    """Number and quantiles of each cell's samples, without making a record of each sample."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    # What follows the last line's end was being written when the run was killed.
    reader = csv.reader(text[: text.rfind("\n") + 1].splitlines())
    header = _header(reader, path)
    if header is None:
        return ()
    missing = [name for name in _NEEDED if name not in header]
    if missing:
        raise UsageError(f"{path} lacks the column {missing[0]!r}; it is not a samples file of this program")
    case, dtype, implementation, latency, memory, flags = map(header.index, _NEEDED)
    groups: dict[tuple[str, str, str], _Group] = {}
    try:
        for row in reader:
            key = (row[case], row[dtype], row[implementation])
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group([], [])
            group.latencies.append(in_range(float(row[latency])))
            group.memory_mb.append(in_range(float(row[memory])))
            if row[flags]:
                group.flagged += 1
    except (IndexError, ValueError, csv.Error) as error:
        raise UsageError(f"{path}, line {reader.line_num}: {error}") from error
    return tuple(_timing(key, group) for key, group in groups.items())


def _header(reader: Iterator[list[str]], path: Path) -> list[str] | None:
    try:
        return next(reader, None)
    except csv.Error as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _timing(key: tuple[str, str, str], group: _Group) -> Row:
    quantiles = np.quantile(group.latencies, [share for _, share in _QUANTILES])
    memory = [value for value in group.memory_mb if math.isfinite(value)]
    return {
        **dict(zip(("name", "dtype", "implementation"), key, strict=True)),
        "samples": len(group.latencies),
        "flagged": group.flagged,
        **{name: _number(float(value)) for (name, _), value in zip(_QUANTILES, quantiles, strict=True)},
        "memory_mb": max(memory) if memory else None,
    }


def _last_sign_of_life(folder: Path) -> str | None:
    """The time of the last whole line of a killed run's log."""
    try:
        lines = read_text(folder / run_folder.LOG, errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("time"), str):
            return str(entry["time"])
    return None


def is_time(text: str) -> bool:
    """Whether this is ISO 8601 with a zone, so that it can be compared."""
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def seconds_between(started: str, ended: str | None) -> float | None:
    """Between two times; 0 where the clock was set back in between."""
    if ended is None:
        return None
    try:
        return max(0.0, (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds())
    except (ValueError, TypeError):  # not times, or only one with a zone
        return None


def _number(value: float) -> float | None:
    """Databases differ in what they make of NaN; NULL they all have."""
    return value if math.isfinite(value) else None
