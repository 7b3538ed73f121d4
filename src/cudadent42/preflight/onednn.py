"""Which instructions oneDNN, one of the libraries behind PyTorch's operators on a CPU, takes on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

LIMIT = "ONEDNN_MAX_CPU_ISA"
"""The variable that holds it to fewer."""
LIMITS = (LIMIT, "DNNL_MAX_CPU_ISA")
"""All that do: the second is its older name, read where the first is not set."""
_TIMEOUT_S = 120
_ISA = re.compile(r"^(?:one)?dnnl?_verbose,(?:v\d+,)?info,cpu,isa:(.+)$", re.MULTILINE)
_CONVOLUTION = """
import torch
torch.nn.functional.conv2d(torch.ones(2, 64, 32, 32), torch.ones(64, 64, 3, 3))
"""
"""The operator that PyTorch gives to oneDNN on any CPU; it says what it is at its first use."""


def instructions(environment: Mapping[str, str]) -> str | None:
    """As oneDNN names them in its own log, in a process of its own with these ``LIMITS`` alone.

    None where it does not say, as PyTorch may be built without oneDNN or without its log, or absent.
    """
    held = {name: text for name, text in os.environ.items() if name not in LIMITS}
    held["ONEDNN_VERBOSE"] = "1"
    held |= {name: environment[name] for name in LIMITS if name in environment}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CONVOLUTION],
            env=held,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return isa_of(done.stdout)


def isa_of(log: str) -> str | None:
    """The instruction set that a log of oneDNN names; None where it names none."""
    match = _ISA.search(log)
    return match[1].strip() if match else None
