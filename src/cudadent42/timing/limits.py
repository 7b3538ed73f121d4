"""What the machine can do at most, from its measured peaks: the ground of ``decisions.floor``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cudadent42.model.limits import BANDWIDTH_LIMIT, CACHE, RATE_LIMIT
from cudadent42.model.records import Plan, TimerKind

MATRIX_UNIT_FACTOR = 32.0
"""What the matrix unit of a CPU that has one (AMX) does at most over its vector units: 2048 operations of 16-bit
numbers in a cycle and core, against 64 of float32 with two 512-bit multiply-adds. The peaks are the vector units'."""


def cpu_limits(plan: Plan, peaks: Mapping[str, float], threads: int) -> dict[str, float]:
    """``peaks`` as measured with ``threads`` threads, of which each counts with its best moment, so that other work on
    the machine does not lower them. The bandwidth has no such moments, and is a limit only of wall time.

    Processor time is that of one core after the other, however many the code uses.
    """
    rates = [rate for name, rate in peaks.items() if name.endswith("_gflops")]
    if not rates:
        return {}
    cores = 1 if plan.timer is TimerKind.CPU else max(threads, os.cpu_count() or 1)
    limits = {RATE_LIMIT: max(rates) / threads * cores * (MATRIX_UNIT_FACTOR if _has_matrix_unit() else 1.0)}
    if plan.timer is TimerKind.CALL and "copy_gbps" in peaks:
        from cudadent42.timing.flush import cache_bytes

        limits |= {BANDWIDTH_LIMIT: peaks["copy_gbps"], CACHE: float(cache_bytes("cpu"))}
    return limits


def cuda_limits(peaks: Mapping[str, float], cache: int) -> dict[str, float]:
    """``cache``: bytes of the L2. The rate is that of the fastest dtype: a kernel may use any unit that its error
    allows."""
    rates = [rate for name, rate in peaks.items() if name.endswith("_gflops")]
    limits = {CACHE: float(cache)}
    if rates:
        limits[RATE_LIMIT] = max(rates)
    if "copy_gbps" in peaks:
        limits[BANDWIDTH_LIMIT] = peaks["copy_gbps"]
    return limits


def _has_matrix_unit() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
