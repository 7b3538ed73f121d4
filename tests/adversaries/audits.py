"""How the tests put a candidate before the audit: with the claim that a run would have made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab import CASE, plan_for

from cudadent42.audit.stage import Audited, audit
from cudadent42.model.records import Comparison, Results, TimerKind, Verdict


def claim(names: Sequence[str], baseline_ms: float, own_ms: float) -> Results:
    """Each of ``names`` called faster on the one case."""
    ratio = baseline_ms / own_ms
    rows = tuple(
        Comparison(
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
        for name in names
    )
    return Results("pytorch", names[0], ratio, ratio, ratio, Verdict.FASTER, 0.02, math.nan, rows)


def equal(names: Sequence[str], baseline_ms: float) -> Results:
    """Each as fast as the baseline."""
    results = claim(names, baseline_ms, baseline_ms)
    rows = tuple(replace(row, verdict=Verdict.EQUAL) for row in results.cases)
    return replace(results, cases=rows, verdict=Verdict.EQUAL)


def audited(
    names: Sequence[str],
    log: Path,
    *,
    results: Results,
    sealed: bool = False,
    timer: TimerKind = TimerKind.CPU,
) -> Audited:
    """Each in processes of its own; they begin as forks of one that has imported PyTorch, which takes seconds."""
    plan = plan_for(names, timer)
    return audit(plan, results, log=log, measured_s=1.0, sealed=sealed)
