"""What disturbed a block: the machine's state around it. Disturbed blocks are marked, counted and kept; which of them
a comparison leaves out is decided by their marks alone (``compare.left_out``)."""

from __future__ import annotations

import math
import os
import resource
import time
from dataclasses import dataclass, replace

from cudadent42.model.records import Conditions
from cudadent42.stages.bench.gpu_state import GpuState
from cudadent42.timing.contention import WAIT_LIMIT, waited_s

STEAL_LIMIT = 0.01
"""``steal``: the hypervisor gave more than this share of the block's processor time to others."""

CLOCK_LIMIT = 0.02
"""``clock``: the GPU's clock before and after the block differs by more than this share."""

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Snapshot:
    time_s: float
    involuntary_switches: int
    wait_s: float
    steal_s: float


class ConditionWatch:
    """Brackets blocks: ``start`` before, ``stop`` after."""

    def __init__(self, gpu: GpuState | None) -> None:
        self._gpu = gpu
        self._before = _snapshot()
        self._clock_mhz = math.nan

    def start(self) -> None:
        self._clock_mhz = self._gpu.read().sm_clock_mhz if self._gpu else math.nan
        self._before = _snapshot()

    def stop(self, case: str, block: int) -> tuple[Conditions, str]:
        """The conditions since ``start``, and the flags that they earn (comma-separated)."""
        gpu = self._gpu.read() if self._gpu else None
        after, before = _snapshot(), self._before
        duration = after.time_s - before.time_s
        conditions = Conditions(
            case=case,
            block=block,
            duration_s=duration,
            involuntary_switches=after.involuntary_switches - before.involuntary_switches,
            wait_fraction=(after.wait_s - before.wait_s) / duration,
            steal_fraction=(after.steal_s - before.steal_s) / duration / (os.cpu_count() or 1),
            load=os.getloadavg()[0],
        )
        if gpu is not None:
            conditions = replace(
                gpu.add_to(conditions), clock_change=gpu.sm_clock_mhz / (self._clock_mhz or math.nan) - 1.0
            )
        return conditions, ",".join(flags(conditions))


def flags(conditions: Conditions) -> list[str]:
    """The words that go with a block's samples."""
    reasons = []
    if conditions.wait_fraction > WAIT_LIMIT:
        reasons.append("preempted")
    # Linux counts steal in ticks of 10 ms: one tick is no evidence in a block of a few milliseconds.
    ticks = conditions.steal_fraction * conditions.duration_s * (os.cpu_count() or 1) / _TICK_S
    if conditions.steal_fraction > STEAL_LIMIT and round(ticks) > 1:
        reasons.append("steal")
    if conditions.throttle_reasons:
        reasons.append("throttled")
    if abs(conditions.clock_change) > CLOCK_LIMIT:
        reasons.append("clock")
    return reasons


def _snapshot() -> _Snapshot:
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    return _Snapshot(time.perf_counter(), switches, waited_s(), _steal_s())


def _steal_s() -> float:
    try:
        with open("/proc/stat") as file:
            return int(file.readline().split()[8]) * _TICK_S
    except (OSError, IndexError):
        return math.nan
