"""Which timer measures: the one place that knows all of them."""

from __future__ import annotations

from cudadent42.model.records import Plan, TimerKind
from cudadent42.timing.cuda_timers import CudaEventTimer, CudaGraphTimer, CudaQueueTimer
from cudadent42.timing.flush import flush_for
from cudadent42.timing.processor_time import Kin, ProcessorClock
from cudadent42.timing.timers import PROCESSOR_WINDOW_S, ClockTimer, Timer


def timer_for(plan: Plan, kind: TimerKind | None = None, *, kin: Kin | None = None) -> Timer:
    """For the plan's device and cache state; of the plan's kind unless another is given, which suits the device.

    ``kin``: the processes whose time counts with this one's."""
    kind, flush = kind or plan.timer, flush_for(plan)
    if plan.device.startswith("cuda"):
        if kind is TimerKind.GRAPH:
            return CudaGraphTimer(plan.device, flush)
        if kind is TimerKind.QUEUE:
            return CudaQueueTimer(plan.device, flush)
        return CudaEventTimer(plan.device, flush)
    if kind is TimerKind.CPU:
        clock = ProcessorClock(kin)
        return ClockTimer(flush, clock, PROCESSOR_WINDOW_S, clock.look_around)
    return ClockTimer(flush)
