"""The command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from warm_python import with_usual_signals

ROOT = Path(__file__).resolve().parents[3]


def started(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """``cudadent42 ARGUMENT...`` in ``cwd``, with a ledger there and nobody to answer questions."""
    return subprocess.Popen(
        [sys.executable, "-m", "cudadent42", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDADENT42_LEDGER": str(cwd / "ledger.db")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=with_usual_signals,
    )


def finished(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def cudadent42(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same, once it has ended."""
    return finished(started(*arguments, cwd=cwd))
