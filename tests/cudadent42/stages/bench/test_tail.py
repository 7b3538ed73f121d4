"""Work after the stop event of a call, told from what others do on the same GPU."""

from __future__ import annotations

import pytest

from cudadent42.integrity.refill import FreshInputs
from cudadent42.integrity.watch import Watch
from cudadent42.model.integrity import Breach, Finding
from cudadent42.model.records import Plan
from cudadent42.operations import numerics
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.stages.bench.checks import Checks
from cudadent42.timing.timers import Reading

CASE = AttentionCase("tiny", "fp32", 1, 1, 1, 4, 4, 8)


@pytest.mark.parametrize(
    ("own_ms", "baseline_ms", "is_unjoined"),
    [(0.005, 0.005, False), (2.0, 0.005, True), (2.0, 1.5, False), (9.0, 1.5, True)],
)
def test_a_tail_counts_beside_the_baseline_s(own_ms: float, baseline_ms: float, is_unjoined: bool) -> None:
    plan = Plan("tail", "cpu", (CASE,), "pytorch", ("pytorch", "mine.py:mine"), 8, 0, 0)
    watch = Watch()
    findings: list[Finding] = []
    watch.begin({"pytorch"}, findings.append)
    checks = Checks(plan, watch, lambda event: None, lambda: 1)
    sets = numerics(CASE).input_sets(CASE, 0, 1, "cpu")
    output = numerics(CASE).pytorch(CASE, sets[0])
    readings = {
        name: Reading(1.0, 1, output.clone(), 0, tail_ms)
        for name, tail_ms in (("pytorch", baseline_ms), ("mine.py:mine", own_ms))
    }
    checks.after_block(CASE, FreshInputs(CASE, sets), readings, counted=True)
    assert ({each.breach for each in findings} == {Breach.UNJOINED_WORK}) is is_unjoined
