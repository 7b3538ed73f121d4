"""In which order the cases of a plan are visited, and for how many blocks each time."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from cudadent42.decisions.schedule import rounds
from cudadent42.model.cases import Case
from cudadent42.model.records import Plan
from cudadent42.timing.flush import input_sets
from cudadent42.timing.timers import CPU_WINDOW_S

MEMORY_SHARE = 0.25
"""Of the machine's memory that inputs and outputs may fill between rounds; beyond that the cases do not take turns."""

_CPU_FLOPS_PER_S = 1.5e11
"""Only for the estimate of progress: how time divides between large cases and fixed costs."""


@dataclass(frozen=True)
class Visit:
    case: Case
    blocks: range
    """Empty: only warming up."""
    share: float
    """Of the budget, after which the visit is left out."""
    forecast: bool = False
    """The last one that only warms up."""

    def after(self, measured: int) -> Visit:
        """Without the blocks that there are already."""
        start = min(max(self.blocks.start, measured), self.blocks.stop)
        return replace(self, blocks=range(start, self.blocks.stop))


def visits(plan: Plan) -> list[Visit]:
    """All cases are warmed up; then they take turns. Where memory is too small for that, one after the other."""
    count = len(plan.cases)
    each = rounds(plan.repeats)
    if not _fits(plan):
        return [
            Visit(case, blocks, (index + 1) / count)
            for index, case in enumerate(plan.cases)
            for blocks in each
        ]
    warming = [Visit(case, range(0), 1.0) for case in plan.cases if plan.warmup]
    warming[-1:] = [replace(visit, forecast=True) for visit in warming[-1:]]
    return warming + [Visit(case, blocks, 1.0) for blocks in each for case in plan.cases]


def _fits(plan: Plan) -> bool:
    """Whether all cases can stay in memory between their rounds. Of the machine's whole memory, not of what
    is free now, so that the visits are the same after a worker was lost."""
    needed = sum(case.memory_bytes(input_sets(plan, case)) for case in plan.cases)
    if plan.device.startswith("cuda"):
        total = int(torch.cuda.get_device_properties(plan.device).total_memory)
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return needed <= MEMORY_SHARE * total


def estimated_cost(plan: Plan, case: Case) -> float:
    """Of one block, in seconds of some machine."""
    per_call = max(case.flops / _CPU_FLOPS_PER_S, CPU_WINDOW_S)
    return per_call * (len(plan.implementations) + plan.control)
