"""What a run rests on besides its samples: the code and the files of the process that decides.

Candidates run as the user does. Whatever this process imports, loads or reads after their start could be what they
wrote meanwhile; so it is loaded ahead of them, and it is looked at whether the files are what they were.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import flashmoe_science
from cudadent42.audit.stage import Audited
from cudadent42.decisions.claims import SHORT_MS
from cudadent42.integrity.files import Files
from cudadent42.model.implementations import is_plug_in, plug_in_file
from cudadent42.model.integrity import Breach, Finding, Grade, Integrity
from cudadent42.model.records import BenchReport, BuildReport, Plan, VerifyReport
from cudadent42.model.text import clean
from cudadent42.operations import definition
from cudadent42.registry import trusted
from flashmoe_science.errors import BuildError, DeviceError

_DECIDING = ("cudadent42.decisions.claims", "cudadent42.ledger.store", "cudadent42.audit.stage")
_REPORTING = (
    "cudadent42.stages.report.html",
    "cudadent42.stages.report.markdown",
    "cudadent42.stages.report.profile",
    "cudadent42.stages.report.figures.speedup",
    "encodings.unicode_escape",  # by which Jinja reads its templates
)

_MOST_NAMES = 3
"""Of files that are named in a finding."""

_HOLD_PYTORCH_BACK = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
    *("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", "NVIDIA_TF32_OVERRIDE"),
)
"""Variables that take instructions or shortcuts from PyTorch, and nothing from a kernel in a file."""

OTHERS_FILES = (
    "leave the files of the lab, its kernels and the baseline alone; if another wrote to them, run again"
)


def load_ahead(plan: Plan, *, with_report: bool) -> None:
    """Imports what this process needs later, and loads the library that measures the machine's peaks."""
    for name in (*_DECIDING, *(_REPORTING if with_report else ())):
        with suppress(
            ImportError
        ):  # a Python without SQLite has no ledger, which is said where it is written
            importlib.import_module(name)
    if plan.versions:
        return  # a race between versions measures no peaks
    definition(plan.operation).numerics()
    peaks = importlib.import_module("cudadent42.timing.cpu_peaks")
    if plan.device == "cpu":
        with suppress(BuildError, DeviceError):  # said where the peaks are measured
            peaks.peaks_library()


def held_back(environment: Mapping[str, str]) -> str:
    """What the environment takes from PyTorch, which a claim about it has to say; empty for nothing."""
    held = [f"{name}={clean(environment[name])}" for name in _HOLD_PYTORCH_BACK if environment.get(name)]
    return (
        f"{', '.join(held)}: PyTorch is held to that, so whoever quotes this run has to say it"
        if held
        else ""
    )


def files_of(plan: Plan, built: BuildReport) -> Files:
    """Of the lab, of its kernels and what they were compiled to, and of the baseline."""
    return Files(_paths(plan, built))


def _paths(plan: Plan, built: BuildReport) -> Iterator[Path]:
    yield Path(__file__).parents[1]
    yield Path(flashmoe_science.__file__).parent
    for kernel in built.kernels:
        yield kernel.artifact
        yield kernel.artifact.with_suffix(".json")
    if plan.baseline not in plan.versions and is_plug_in(plan.baseline):
        yield plug_in_file(plan.baseline)


def written_while_run(plan: Plan, files: Files) -> tuple[Finding, ...]:
    """What somebody wrote to since, where there is somebody who is not the lab's own."""
    names = [name for name in plan.implementations if name not in trusted(plan)]
    written = files.written() if names else []
    if not written:
        return ()
    more = f" and {len(written) - _MOST_NAMES} more" if len(written) > _MOST_NAMES else ""
    evidence = f"{', '.join(written[:_MOST_NAMES])}{more}: written to while candidates ran"
    return (Finding(Breach.REPLACED_FUNCTION, Grade.SUSPECT, ", ".join(names), "", evidence, OTHERS_FILES),)


def integrity_of(
    plan: Plan,
    verified: VerifyReport,
    benched: BenchReport,
    audited: Audited,
    sealed: bool,
    of_files: tuple[Finding, ...],
) -> Integrity:
    """What the stages saw of the candidates, and what became of the files that the run rests on."""
    findings = dict.fromkeys((*of_files, *verified.findings, *benched.findings, *audited.findings))
    return Integrity(
        findings=tuple(findings),
        confirmations=tuple(audited.confirmations),
        hidden_checked=audited.hidden_checked,
        sealed=sealed,
        drawn_by_gain=True,
        highest_first=True,
        short_ms=SHORT_MS if plan.device == "cpu" else 0.0,
        why_not_audited=audited.why_not,
        notes=tuple(dict.fromkeys((*verified.kept_apart, *benched.kept_apart))),
        measuring=benched.measuring,
        checks={**benched.checks, **({"audit": audited.spent} if audited.spent.wall_s else {})},
    )
