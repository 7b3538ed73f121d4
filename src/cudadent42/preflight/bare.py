"""``cudadent42 preflight`` without the command line's own packages: what runs on a bare Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cudadent42.errors import ExitCode
from cudadent42.preflight.fix import apply
from cudadent42.preflight.runner import gather, inspect
from cudadent42.preflight.text import lines
from cudadent42.serialise import encode

_OPTIONS = ("--fix", "--json")


def main(arguments: Sequence[str]) -> int:
    """Run ``preflight`` with these arguments; the exit code."""
    unknown = [argument for argument in arguments if argument not in _OPTIONS]
    if unknown:
        print(
            f"error: {unknown[0]}: this Python lacks the lab's packages, so preflight takes only {' and '.join(_OPTIONS)}",
            file=sys.stderr,
        )
        return ExitCode.USAGE
    context = gather("auto", Path("runs"))
    report = inspect(context)
    if "--fix" in arguments:
        for line in apply(report, context):
            print(line, file=sys.stderr)
        report = inspect(context)
    if "--json" in arguments:
        print(json.dumps({"ready": report.ready, **encode(report)}, indent=2))
    else:
        print("\n".join(lines(report)))
    return ExitCode.PASS if report.ready else ExitCode.NOT_READY
