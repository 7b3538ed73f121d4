"""What candidates can be confined by: asked of the kernel, by confining a process that does nothing."""

from __future__ import annotations

import sys

from cudadent42.base.errors import MachineNotReadyError
from cudadent42.preflight.definitions import Context, Definition, Finding
from cudadent42.sandbox.launch import offered


def _sandbox(context: Context) -> Finding:
    if sys.platform != "linux":
        return Finding("sandboxes are made of Linux", skipped=True)
    try:
        report = offered()
    except MachineNotReadyError as error:
        return Finding(f"--untrusted is refused: {error}", facts={"sandbox": "none"})
    detail = report.summary
    if report.missing:
        words = ", ".join(each.value for each in report.missing)
        detail = f"--untrusted is refused, no protection of {words}: {detail}"
    return Finding(detail, facts={"sandbox": report.summary})


DEFINITIONS = (Definition("sandbox", "confines candidates, for --untrusted", _sandbox, ()),)
"""There is no problem with it: a run without ``--untrusted`` does not need it, and one with it says what is missing."""
