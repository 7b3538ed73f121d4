"""Memory that one call takes beyond its inputs, output included. Measured apart from the timed calls."""

from __future__ import annotations

import ctypes
import gc
import math
from pathlib import Path

import torch
from torch import Tensor

from cudadent42.model.device import synchronize
from cudadent42.model.implementations import Call
from cudadent42.timing.timers import collector_off

_MB = 1e6


def memory_mb(call: Call, device: str) -> float:
    """Peak over one call in 1e6 bytes.

    CUDA: the allocator's own peak, exact for whatever the implementation allocates through PyTorch. CPU:
    growth of the process's peak resident memory, which includes scratch that the implementation allocates
    by itself, in steps of the page size and within a few hundred kB; never less than the output. NaN where
    the system does not let a process reset its peak (not Linux).
    """
    if device.startswith("cuda"):
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        output = call()
        synchronize(device)
        del output
        return (torch.cuda.max_memory_allocated(device) - before) / _MB
    grown = _resident_growth(call)
    output = call()
    parts: tuple[Tensor, ...] = output if isinstance(output, tuple) else (output,)
    size = sum(part.numel() * part.element_size() for part in parts)
    return max(grown, size / _MB) if math.isfinite(grown) else math.nan


def _resident_growth(call: Call) -> float:
    reset = Path("/proc/self/clear_refs")
    try:
        # What is freed during the call, or was and stays resident, would hide what the call takes.
        gc.collect()
        with collector_off():
            ctypes.CDLL(None).malloc_trim(0)
            reset.write_text("5")  # sets the peak to the present value
            before = _status("VmRSS")
            output = call()
            after = _status("VmHWM")
    except (OSError, AttributeError):
        return math.nan
    del output
    return max(0, after - before) * 1024 / _MB


def _status(field: str) -> int:
    """A line of /proc/self/status, in kibibytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status")
