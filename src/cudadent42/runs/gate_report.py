"""``gates.json`` in a run folder: what the run was held against, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.files import read_record, write_json
from cudadent42.decisions.gates import SCHEMA_VERSION, Decision, GateReport

GATES = "gates.json"


@dataclass(frozen=True)
class GatesDocument:
    """``gates.json``."""

    schema_version: int
    decision: Decision
    exit_code: int
    report: GateReport


def write_report(folder: Path, report: GateReport) -> Path:
    """``gates.json`` in a run folder, replaced atomically."""
    path = folder / GATES
    write_json(path, GatesDocument(SCHEMA_VERSION, report.decision, int(report.exit_code), report))
    return path


def read_report(folder: Path) -> GateReport | None:
    """What ``write_report`` wrote; None where there is none. Raises UsageError where it cannot be read."""
    document = read_record(GatesDocument, folder / GATES, SCHEMA_VERSION)
    return None if document is None else document.report
