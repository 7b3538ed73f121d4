"""What ``cudadent42 preflight`` does and prints. Needs nothing but Python, so that a bare one can run it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cudadent42.base.errors import ExitCode
from cudadent42.base.serialise import encode
from cudadent42.base.shown import unfiltered
from cudadent42.model.device_names import parse_device
from cudadent42.model.records import MachineReport
from cudadent42.preflight.fix import apply
from cudadent42.preflight.runner import gather, inspect
from cudadent42.preflight.text import lines

_OPTIONS = ("--fix", "--json")
SCHEMA_VERSION = 1


def main(
    device: str, fix: bool, as_json: bool, tell: Callable[[MachineReport], None] = lambda report: None
) -> ExitCode:
    """Check, mend if asked, print; the exit code. ``tell`` is given what was found."""
    context = gather(parse_device(device), Path("runs"))
    report = inspect(context)
    if fix:
        attempts = apply(report, context)
        for line in attempts:
            print(line, file=sys.stderr)
        if attempts:
            report = inspect(gather(context.device, context.output))
    tell(report)
    if as_json:
        print(
            json.dumps({"schema_version": SCHEMA_VERSION, "ready": report.ready, **encode(report)}, indent=2)
        )
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print("\n".join(lines(report, colour)), file=unfiltered(sys.stdout))
    return ExitCode.PASS if report.ready else ExitCode.NOT_READY


def main_on_bare_python(arguments: Sequence[str]) -> ExitCode:
    """``preflight`` without the package that reads command lines."""
    unknown = [argument for argument in arguments if argument not in _OPTIONS]
    if unknown:
        print(
            f"error: {unknown[0]}: while packages are missing, preflight takes only {' and '.join(_OPTIONS)}",
            file=sys.stderr,
        )
        return ExitCode.USAGE
    return main("auto", "--fix" in arguments, "--json" in arguments)
