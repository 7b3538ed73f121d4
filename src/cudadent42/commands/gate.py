"""``gate``: a run against conditions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.commands.common import print_json
from cudadent42.commands.options import JsonOption

if TYPE_CHECKING:
    from cudadent42.stages.gates import GateReport


def gate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Name a run folder.")],
    file: Annotated[
        str,
        typer.Option(
            "--gate",
            metavar="NAME|FILE",
            help="Hold it against these gates: default, improvement, profile, or the path of a TOML file.",
        ),
    ] = "default",
    as_json: JsonOption = False,
) -> None:
    """Hold a run against gates.

    The exit code is 1 if a gate fails. It is 6 if none fails, but one cannot be decided from the measurement.
    """
    from cudadent42.stages import gates

    report = gates.judge(gates.load(file), folder)
    if as_json:
        print_json({"folder": folder, **gates_document(report)})
    else:
        print_gates(report)
    raise typer.Exit(report.exit_code)


def gates_document(report: GateReport) -> dict[str, object]:
    """For ``--json``."""
    return {"gates": {"decision": report.decision, "passed": report.passed, "report": report}}


def print_gates(report: GateReport) -> None:
    from cudadent42.stages.gates import report_lines

    for line in report_lines(report):
        print(line)
    print(f"gates ({report.file}): {report.decision.value}")
