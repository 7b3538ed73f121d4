"""The report as lines of text. Plain strings: it is also what a bare Python shows."""

from __future__ import annotations

from cudadent42.base.shown import plain
from cudadent42.model.records import Check, MachineReport, Status

_COLOURS = {Status.OK: "32", Status.WARN: "33", Status.FAIL: "31", Status.SKIP: "2"}


def lines(report: MachineReport, colour: bool = False) -> list[str]:
    """One line per check, cause and fix below it; the summary; ``Preflight OK`` or what failed."""
    width = max(len(check.name) for check in report.checks)
    shown = [line for check in report.checks for line in _check_lines(check, width, colour)]
    return [*shown, plain(report.summary), verdict(report)]


def troubles(report: MachineReport, colour: bool = False) -> list[str]:
    """The lines of the checks that warn or failed."""
    checks = [check for check in report.checks if check.status in (Status.WARN, Status.FAIL)]
    width = max((len(check.name) for check in checks), default=0)
    return [line for check in checks for line in _check_lines(check, width, colour)]


def _check_lines(check: Check, width: int, colour: bool) -> list[str]:
    word = f"{check.status.value:4}"
    if colour:
        word = f"\x1b[{_COLOURS[check.status]}m{word}\x1b[0m"
    indent = " " * (width + 8)
    shown = [f"{word}  {check.name:{width}}  {plain(check.detail)}".rstrip()]
    shown += [f"{indent}{plain(check.cause)}"] if check.cause else []
    shown += [f"{indent}fix: {plain(check.fix)}"] if check.fix else []
    return shown


def verdict(report: MachineReport) -> str:
    failed = [check.name for check in report.checks if check.status is Status.FAIL]
    return f"Preflight failed: {', '.join(failed)}" if failed else "Preflight OK"
