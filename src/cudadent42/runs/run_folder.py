"""Run folders: what one run writes, while it happens, and how it is read back.

    manifest.json  samples.csv  verify.json  results.json  log.jsonl  report.html  report.md

A folder is complete in itself: databases and reports are derived from it. JSON files are replaced atomically,
``samples.csv`` and ``log.jsonl`` flushed row by row: an interrupted run keeps what it measured.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from cudadent42.base.errors import UsageError
from cudadent42.base.files import decode_file, disk_errors, read_json, write_json
from cudadent42.base.reading import in_range, parse_json, read_bytes, read_text
from cudadent42.base.serialise import encode
from cudadent42.model.cases import Case
from cudadent42.model.records import (
    BuildReport,
    Conditions,
    MachineReport,
    Plan,
    Results,
    Sample,
    VerifyReport,
)
from cudadent42.model.sandbox import SandboxReport
from cudadent42.operations import definition
from cudadent42.operations.interface import COMMON_COLUMNS
from cudadent42.runs import kernel_sources
from cudadent42.runs.kernel_sources import KernelSource
from cudadent42.runs.source import Revision
from cudadent42.runs.tables import tables_of_user
from cudadent42.version import __version__

SCHEMA_VERSION = 1

MANIFEST = "manifest.json"
SAMPLES = "samples.csv"
VERIFY = "verify.json"
RESULTS = "results.json"
LOG = "log.jsonl"
RESERVE = ".reserve"
"""Space held while the run goes on, so that how it ended can be written on a full disk."""

_RESERVE_BYTES = 1 << 19

T = TypeVar("T")


class RunStatus(str, Enum):
    RUNNING = "running"
    """Also what a run that was killed leaves behind."""
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class Manifest:
    """Where a run's numbers come from."""

    schema_version: int
    version: str
    """Of cudadent42."""
    status: RunStatus
    error: str
    """Why the run failed; empty otherwise."""
    command: tuple[str, ...]
    started: str
    """UTC, ISO 8601."""
    ended: str | None
    plan: Plan
    machine: MachineReport
    build: BuildReport | None
    revision: Revision | None
    """Of the source tree; None where the package is installed from a wheel."""
    environment: dict[str, str]
    """Variables that change what is measured, such as ``OMP_NUM_THREADS``."""
    sources: dict[str, KernelSource] = field(default_factory=dict)
    """By implementation: the code of those that are not of this project's source."""
    sandbox: SandboxReport | None = None
    """What candidates were confined by; None for a run without ``--untrusted``."""
    results_sha256: str = ""
    """Of ``results.json`` as it was written; empty where there is none yet, and of older runs."""


@dataclass(frozen=True)
class LogLine:
    """A line of ``log.jsonl``. What an event does not have is left out."""

    time: str
    """UTC, ISO 8601."""
    event: str
    """``stage``, ``note``, ``detail``, ``block``, ``skipped`` or ``profiled``."""
    name: str | None = None
    """Of the stage that begins."""
    text: str | None = None
    """Of a note or a detail."""
    key: str | None = None
    """What is skipped: ``Case.id`` or ``Case.id/implementation``."""
    reason: str | None = None
    """Why it is skipped."""
    conditions: Conditions | None = None
    """Of the block that was measured."""
    bound: str | None = None
    """What the profiled kernel runs against."""
    causes: tuple[str, ...] | None = None
    """Rules that explain the profile, the best first."""


@dataclass(frozen=True)
class RunFolder:
    """A run as read back. A run that has not finished lacks its later parts."""

    path: Path
    manifest: Manifest
    samples: tuple[Sample, ...]
    verify: VerifyReport | None
    results: Results | None

    @property
    def plan(self) -> Plan:
        return self.manifest.plan

    @property
    def machine(self) -> MachineReport:
        return self.manifest.machine

    @property
    def build(self) -> BuildReport | None:
        return self.manifest.build


# ---------------------------------------------------------------- writing

_RECORDED_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUDADENT42_RATE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "DNNL_MAX_CPU_ISA",
    "FLASHMOE_CPU_ISA",
    "FLASHMOE_CUDA_APPEND",
    "FLASHMOE_CUDA_BACKWARD",
    "FLASHMOE_CUDA_KERNEL",
    "FLASHMOE_CUDA_KEY_LISTS",
    "FLASHMOE_CUDA_VARLEN",
    "FLASHMOE_MOE_BACKWARD",
    "FLASHMOE_MOE_KERNEL",
    "FLASHMOE_REPEATED_CALLS",
    "FLASHMOE_ROUTING_LOSSES",
    "FLASHMOE_TUNED",
    "GLIBC_TUNABLES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "LD_PRELOAD",
    "MALLOC_CONF",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


class RunWriter:
    """The run folder of a run in progress: a context manager that, when left, records how the run ended.

    Without ``save_samples`` there is no ``samples.csv``; everything else is written.
    """

    def __init__(
        self,
        path: Path,
        plan: Plan,
        machine: MachineReport,
        revision: Revision | None,
        command: Iterable[str],
        save_samples: bool = True,
    ) -> None:
        self.path = path
        self._cases = {case.id: case for case in plan.cases}
        self.sample_count = 0
        self._manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            version=__version__,
            status=RunStatus.RUNNING,
            error="",
            command=tuple(command),
            started=_now(),
            ended=None,
            plan=plan,
            machine=machine,
            build=None,
            revision=revision,
            environment={name: os.environ[name] for name in _RECORDED_VARIABLES if name in os.environ}
            | tables_of_user(),
            sources=kernel_sources.of_plan(plan),
        )
        create_folder(path)
        with disk_errors(path):
            (path / RESERVE).write_bytes(bytes(_RESERVE_BYTES))
        self._write_manifest()
        with disk_errors(path):
            self._log: TextIO = (path / LOG).open("a", encoding="utf-8")
            self._samples: TextIO | None = None
            if save_samples:
                self._samples = (path / SAMPLES).open("w", encoding="utf-8", newline="")
        self._columns = definition(plan.operation).columns
        self._write_row(self._columns)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end(RunStatus.FINISHED, "")
        elif isinstance(error, KeyboardInterrupt):
            self._end(RunStatus.INTERRUPTED, "")
        else:
            with suppress(UsageError):  # the disk may be what failed: the error on its way out says so
                self._end(RunStatus.FAILED, str(error) or type(error).__name__)

    def _end(self, status: RunStatus, error: str) -> None:
        with suppress(OSError):  # room for the last manifest, should the disk be full
            (self.path / RESERVE).unlink(missing_ok=True)
        for file in (self._log, self._samples):
            with suppress(OSError):  # every row was flushed: what is left over already failed once
                if file is not None:
                    file.close()
        self._manifest = replace(self._manifest, status=status, error=error, ended=_now())
        self._write_manifest()

    def set_build(self, build: BuildReport) -> None:
        self._manifest = replace(self._manifest, build=build)
        self._write_manifest()

    def set_sandbox(self, sandbox: SandboxReport) -> None:
        self._manifest = replace(self._manifest, sandbox=sandbox)
        self._write_manifest()

    def write_verify(self, report: VerifyReport) -> None:
        write_json(self.path / VERIFY, report)

    def write_results(self, results: Results) -> None:
        write_json(self.path / RESULTS, results)
        self._manifest = replace(self._manifest, results_sha256=results_digest(self.path))

    def append_sample(self, sample: Sample) -> None:
        cells = _cells(sample, self._cases[sample.case], self._manifest.plan.seed)
        self._write_row(cells[column] for column in self._columns)
        self.sample_count += 1

    def log(self, event: str, **fields: Any) -> None:
        """One line of ``log.jsonl``; ``fields`` are those of `LogLine`."""
        record = encode(LogLine(_now(), event, **fields))
        line = json.dumps({name: value for name, value in record.items() if value is not None})
        with disk_errors(self.path):
            self._log.write(line + "\n")
            self._log.flush()

    def _write_row(self, row: Iterable[object]) -> None:
        if self._samples is None:
            return
        with disk_errors(self.path):
            csv.writer(self._samples, lineterminator="\n").writerow(row)
            self._samples.flush()

    def _write_manifest(self) -> None:
        write_json(self.path / MANIFEST, self._manifest)


def create_default_folder(suite: str, revision: Revision | None, root: Path = Path("runs")) -> Path:
    """Make the folder for a run that was given none: ``default_path``, or with ``-2``, ``-3``... after it where
    another run began in the same second."""
    wanted = default_path(suite, revision, root)
    path = wanted
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            path = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise UsageError(
                f"cannot make the run folder {path}: {error.strerror}; choose another with --output-dir"
            ) from error
        else:
            break
    return path


def default_path(suite: str, revision: Revision | None, root: Path = Path("runs")) -> Path:
    """``runs/<UTC timestamp>-<suite>-<short revision>``."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    short = revision.short if revision else f"v{__version__}"
    return root / f"{stamp}-{suite}-{short}"


def check_output(path: Path) -> None:
    """Raises UsageError where ``create_folder`` would fail, as far as can be told without making anything."""
    parent = path.absolute()
    try:
        while not parent.exists():
            parent = parent.parent
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UsageError(
            f"cannot use the output folder {path}: {error.strerror}; choose another with --output-dir"
        ) from error
    if not parent.is_dir():
        raise UsageError(f"{parent} is a file; --output-dir needs a new or empty folder")
    try:
        with tempfile.TemporaryFile(dir=parent):  # what permissions say is not the truth for root
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to {parent}: {error.strerror}; choose another folder than {path} with --output-dir"
        ) from error
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"the output folder {path} is not empty; choose a new one with --output-dir")


def create_folder(path: Path) -> None:
    """Make a new folder for a run. One that exists is an error unless it is empty."""
    check_output(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the output folder {path}: {error.strerror}; choose another with --output-dir"
        ) from error


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _cells(sample: Sample, case: Case, seed: int) -> dict[str, object]:
    """By column."""
    return {
        **definition(case.operation).cells(case),
        "implementation": sample.implementation,
        "dtype": case.dtype,
        "latency_ms": sample.latency_ms,
        "throughput_tokens_per_sec": case.tokens / (sample.latency_ms / 1e3)
        if sample.latency_ms > 0
        else float("nan"),
        "memory_mb": sample.memory_mb,
        "case": case.name,
        "block": sample.block,
        "seed": seed,
        "position": sample.position,
        "inner": sample.inner,
        "timestamp_s": sample.timestamp_s,
        "flags": sample.flags,
    }


# ---------------------------------------------------------------- reading


def load_run(path: Path) -> RunFolder:
    """Read a run folder, finished or not. Raises UsageError where it is not one or cannot be understood."""
    return RunFolder(
        path=path,
        manifest=load_manifest(path),
        samples=tuple(_read_samples(path / SAMPLES)),
        verify=_load_optional(VerifyReport, path / VERIFY),
        results=load_results(path),
    )


def load_manifest(path: Path, *, with_build: bool = True) -> Manifest:
    """The manifest of a run folder; errors as of `load_run`.

    ``with_build=False`` leaves a GPU's build report out, most of the file, for readers of many folders.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; expected a run folder, as `cudadent42 run` writes")
    manifest_json = read_json(path / MANIFEST)
    if manifest_json is None:
        raise UsageError(f"{path} has no {MANIFEST}; expected a run folder, as `cudadent42 run` writes")
    schema = manifest_json.get("schema_version") if isinstance(manifest_json, dict) else None
    if not isinstance(schema, int):
        raise UsageError(f"{path / MANIFEST} states no schema_version; it is not a manifest of this program")
    if schema > SCHEMA_VERSION:
        raise UsageError(
            f"{path} was written by a newer cudadent42 (schema {schema}); "
            f"this one reads up to {SCHEMA_VERSION}: upgrade it"
        )
    plan = manifest_json.get("plan")
    if not with_build and not (isinstance(plan, dict) and plan.get("device") == "cpu"):
        manifest_json["build"] = None
    return decode_file(Manifest, manifest_json, path / MANIFEST)


def load_results(path: Path) -> Results | None:
    """The results of a run folder; None where the run did not get so far."""
    return _load_optional(Results, path / RESULTS)


def results_digest(path: Path) -> str:
    """SHA-256 of a run folder's ``results.json``, in hexadecimal digits."""
    return hashlib.sha256(read_bytes(path / RESULTS)).hexdigest()


def load_skipped(path: Path) -> dict[str, str]:
    """What was left out of the timing, with the reason, by the log of a run folder: of use where the run did not get as
    far as ``results.json``."""
    skipped: dict[str, str] = {}
    try:
        lines = read_text(path / LOG, errors="replace").splitlines()
    except FileNotFoundError:
        return skipped
    except OSError as error:
        raise UsageError(f"{path / LOG} cannot be read: {error}") from error
    for line in lines:
        try:
            entry = parse_json(line)
        except ValueError:
            continue  # the line that was being written when the run was killed
        if isinstance(entry, dict) and entry.get("event") == "skipped":
            skipped[str(entry.get("key"))] = str(entry.get("reason"))
    return skipped


def _load_optional(kind: type[T], path: Path) -> T | None:
    data = read_json(path)
    return None if data is None else decode_file(kind, data, path)


def _read_samples(path: Path) -> list[Sample]:
    try:
        text = read_text(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        lines = lines[:-1]  # the row that was being written when the run was killed
    if not lines:
        return []
    reader = csv.DictReader(lines)
    try:
        columns = reader.fieldnames or ()
    except csv.Error as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    missing = [column for column in COMMON_COLUMNS if column not in columns]
    if missing:
        raise UsageError(f"{path} lacks the column {missing[0]!r}; it is not a samples file of this program")
    samples: list[Sample] = []
    try:
        samples.extend(_sample(row) for row in reader)
    except (TypeError, ValueError, csv.Error) as error:
        raise UsageError(f"{path}, line {reader.line_num}: {error}") from error
    return samples


def _sample(row: dict[str, str]) -> Sample:
    return Sample(
        case=f"{row['case']}/{row['dtype']}",
        implementation=row["implementation"],
        block=int(row["block"]),
        position=int(row["position"]),
        latency_ms=in_range(float(row["latency_ms"])),
        inner=int(row["inner"]),
        memory_mb=in_range(float(row["memory_mb"])),
        timestamp_s=in_range(float(row["timestamp_s"])),
        flags=row["flags"],
    )
