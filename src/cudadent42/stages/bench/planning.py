"""What the plan of a step takes, apart from the calls that it is made for."""

from __future__ import annotations

import statistics

from cudadent42.model.events import Emit, PlanningTimed
from cudadent42.model.implementations import Call, Planned
from cudadent42.model.records import Plan, TimerKind
from cudadent42.timing.choice import timer_for

READINGS = 5
"""Of which the median counts. It is stated and decides nothing, so it takes no part in the blocks."""


def time_planning(plan: Plan, key: str, call: Call, emit: Emit) -> None:
    """Of one step; nothing for a call that no step plans for. ``key``: ``Case.id/implementation``.

    By the timer ``call`` whatever the run's is: planning is work of the host that may wait for the GPU, and no other
    clock has all of that. Of one set of inputs, as the sets of a case have the same lengths.
    """
    if not isinstance(call, Planned):
        return
    read = timer_for(plan, TimerKind.CALL).calibrate([call.plan])
    emit(PlanningTimed(key, statistics.median(read().latency_ms for _ in range(READINGS))))
