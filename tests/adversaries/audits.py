"""How the tests put a candidate before the audit: with the claim that a run would have made of it."""

from __future__ import annotations

import math
from pathlib import Path

from lab import CASE, plan_for

from cudadent42.audit.stage import Audited, audit
from cudadent42.model.records import Comparison, Results, TimerKind, Verdict


def claim(name: str, baseline_ms: float, own_ms: float) -> Results:
    """``name`` called faster on the one case."""
    ratio = baseline_ms / own_ms
    row = Comparison(
        CASE.name,
        CASE.dtype,
        name,
        "pytorch",
        ratio,
        ratio,
        ratio,
        Verdict.FASTER,
        own_ms,
        baseline_ms,
        8,
    )
    return Results("pytorch", name, ratio, ratio, ratio, Verdict.FASTER, 0.02, math.nan, (row,))


def audited(name: str, log: Path, *, results: Results, sealed: bool = False) -> Audited:
    plan = plan_for([name], TimerKind.CPU)
    return audit(plan, results, log=log, measured_s=1.0, sealed=sealed)
