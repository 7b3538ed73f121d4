"""A script in a process of its own, and what that leaves."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.files import decode_file, read_json
from cudadent42.recording.records import Recording

RECORD, WITHOUT, WITH = "record", "without", "with"
"""Calls recorded; only the time taken, without this project's kernels and with them."""


@dataclass(frozen=True)
class Ended:
    """One run of a script."""

    exit_code: int
    """As a shell has it: 128 and the number for a script that a signal ended."""
    recording: Recording | None
    """None where the process ended without leaving one: killed, or by ``os._exit``."""


def run(mode: str, command: Sequence[str], *, quiet_output: bool = False) -> Ended:
    """Run a script and wait for it.

    Args:
        mode: ``RECORD``, ``WITHOUT`` or ``WITH``.
        command: the script and its arguments; ``-m`` and a module's name instead of a script.
        quiet_output: what the script prints goes to standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "recording.json"
        arguments = [sys.executable, "-m", "cudadent42.recording.child", mode, str(result), *command]
        process = subprocess.Popen(arguments, stdout=sys.stderr.fileno() if quiet_output else None)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # The terminal has sent it to the script too, which ends as it likes and still leaves a recording.
            code = process.wait()
        data = read_json(result)
        recording = None if data is None else decode_file(Recording, data, result)
    return Ended(code if code >= 0 else 128 - code, recording)
