"""Outputs of the last timed calls are judged; what is a little over a bound is timed again on other values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cudadent42.integrity.watch import Watch
from cudadent42.model.records import BenchReport, Plan, VerifyReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.stages.bench.checks import Checks, random_seed
from cudadent42.stages.bench.measurement import AFTER_TIMING, measure

CANDIDATES = """
import math
from torch.nn.functional import scaled_dot_product_attention as sdpa

class Alternating:
    # Right on one of every so many fillings of its inputs, a little off on the others.
    def __init__(self, period, right_at):
        self.period, self.right_at = period, right_at
        self.seen = {}

    def __call__(self, q, k, v, *, causal, softmax_scale):
        value, count = self.seen.get(q.data_ptr(), (math.nan, 0))
        first = float(q[0, 0, 0, 0])
        if first != value:
            count += 1
            self.seen[q.data_ptr()] = first, count
        off = count % self.period != self.right_at
        return a_little_off(q, k, v) if off else sdpa(q, k, v, is_causal=causal, scale=softmax_scale)

def a_little_off(q, k, v):
    # One entry of the largest row is off by 1.2 bounds.
    result, exact = sdpa(q, k, v), sdpa(q.double(), k.double(), v.double())
    bound = 2 * (result - exact).abs().max() + 2 * 2**-23 * exact.square().mean().sqrt()
    row = int(exact.square().mean(-1).argmax())
    result.view(-1, result.shape[-1])[row, 0] = exact.view(-1, result.shape[-1])[row, 0] + 1.2 * bound
    return result

even, odd = Alternating(2, 1), Alternating(2, 0)
zero, one, two = [Alternating(3, each) for each in range(3)]

def attention(q, k, v, *, causal, softmax_scale):
    return a_little_off(q, k, v)
"""

CASE = AttentionCase("small", "fp32", 1, 2, 2, 64, 64, 32)


def bench(*names: str) -> BenchReport:
    plan = Plan("test", "cpu", (CASE,), "pytorch", ("pytorch", *names), 8, 1, seed=3)
    threads = torch.get_num_threads()
    try:
        return measure(plan, VerifyReport(()), emit=lambda event: None)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "candidates.py"
    path.write_text(CANDIDATES)
    return path


def test_what_is_off_on_some_values_is_decided_by_others(file: Path) -> None:
    report = bench(f"{file}:even", f"{file}:odd")
    judged = [each for each in report.rechecked if each.implementation != "pytorch"]
    assert [each.input for each in judged] == [AFTER_TIMING] * 2
    assert all(each.passed for each in judged), [each.detail for each in judged]
    (marginal,) = [each for each in judged if each.detail]
    assert "on another draw of values; on the one before: max error" in marginal.detail


def test_a_third_draw_decides_what_was_off_on_two(file: Path) -> None:
    report = bench(*(f"{file}:{name}" for name in ("zero", "one", "two")))
    judged = [each for each in report.rechecked if each.implementation != "pytorch"]
    assert len(judged) == 3
    assert all(each.passed for each in judged), [each.detail for each in judged]
    assert sum("and on the values before: max error" in each.detail for each in judged) == 1


def test_what_is_off_on_all_fails(file: Path) -> None:
    name = f"{file}:attention"
    report = bench(name)
    (judged,) = [each for each in report.rechecked if each.implementation == name]
    assert not judged.passed
    assert "and on the values before: max error" in judged.detail
    assert f"{CASE.id}/{name}" in report.skipped


def test_the_block_that_is_checked_is_none_that_is_verified_anyway() -> None:
    plan = Plan("test", "cpu", (CASE,), "pytorch", ("pytorch",), 14, 1, seed=3)
    checks = Checks(plan, Watch(), lambda event: None, random_seed)
    assert {checks.chosen(range(6)) for _ in range(300)} == set(range(6))
    assert {checks.chosen(range(6, 14)) for _ in range(300)} == set(range(6, 13))
    assert checks.chosen(range(13, 14)) == 13
    assert checks.chosen(range(0)) == -1
