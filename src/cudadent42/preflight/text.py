"""The report as lines of text. Plain strings: it is also what a bare Python shows."""

from __future__ import annotations

from cudadent42.records import MachineReport, Status

_COLOURS = {Status.OK: "32", Status.WARN: "33", Status.FAIL: "31", Status.SKIP: "2"}


def lines(report: MachineReport, colour: bool = False) -> list[str]:
    """One line per check, with cause and fix below where it has them; the summary; ``Preflight OK`` or what failed."""
    width = max(len(check.name) for check in report.checks)
    out = []
    for check in report.checks:
        word = f"{check.status.value:4}"
        if colour:
            word = f"\x1b[{_COLOURS[check.status]}m{word}\x1b[0m"
        out.append(f"{word}  {check.name:{width}}  {check.detail}".rstrip())
        if check.cause:
            out.append(f"{'':{width + 8}}{check.cause}")
        if check.fix:
            out.append(f"{'':{width + 8}}fix: {check.fix}")
    out.append(report.summary)
    out.append(verdict(report))
    return out


def verdict(report: MachineReport) -> str:
    failed = [check.name for check in report.checks if check.status is Status.FAIL]
    return f"Preflight failed: {', '.join(failed)}" if failed else "Preflight OK"
