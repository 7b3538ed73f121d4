"""How long a run will take, before anything of it is known. For money and patience, so it leans to the long side.

The figures are of slow machines: an NVIDIA L4, two processor cores with AVX2 that others use as well. No committed
run folder took longer than is estimated here; most took a fraction.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudadent42.model.cases import Case
from cudadent42.model.records import Plan
from cudadent42.stages.bench.stopping import MIN_BUDGET_BLOCKS
from cudadent42.stages.verify import units


@dataclass(frozen=True)
class _Pace:
    """What a device does in a second, at the least."""

    flops: float
    """Of a kernel that is measured."""
    reference_flops: float
    """In float64, of the verification's reference."""
    calls: int
    """In one sample, at least."""


_CPU = _Pace(2e10, 1e10, 1)
_CUDA = _Pace(3e13, 4e11, 3)

_SAMPLE_S = 0.015
"""Of the shortest: a timer's window, the flushing of caches and the bookkeeping around it."""
_UNIT_S = 0.25
"""Of one verification, whatever its size."""
_CALIBRATION_BLOCKS = 5
"""What a case costs before its first block, in blocks."""
_COMPILED_FOR_EACH_CASE = "flash_attn_cute"
_COMPILE_S = 5.0
"""Of one case by that implementation, which compiles for each."""
_AROUND_S = 120.0
"""Everything else: imports, preflight, compiling every kernel anew, the report."""


def estimate_s(plan: Plan) -> float:
    """Seconds that ``cudadent42 run`` takes for the plan, preflight to report, on a machine that is ready."""
    pace = _CPU if plan.device == "cpu" else _CUDA
    verifying = sum(_UNIT_S + unit.case.flops / pace.reference_flops for unit in units(plan))
    compiling = _COMPILE_S * len(plan.cases) if _COMPILED_FOR_EACH_CASE in plan.implementations else 0.0
    return _AROUND_S + compiling + verifying + _bench_s(plan, pace)


def _bench_s(plan: Plan, pace: _Pace) -> float:
    fixed = plan.warmup + _CALIBRATION_BLOCKS
    whole = sum(_block_s(plan, case, pace) * (fixed + plan.repeats) for case in plan.cases)
    if plan.budget_s is None:
        return whole
    # Until these are done, the budget ends nothing.
    least = sum(_block_s(plan, case, pace) * (fixed + MIN_BUDGET_BLOCKS) for case in plan.cases)
    return min(whole, plan.budget_s + least)


def _block_s(plan: Plan, case: Case, pace: _Pace) -> float:
    rows = len(plan.implementations) + plan.control
    return rows * max(_SAMPLE_S, pace.calls * case.flops / pace.flops)
