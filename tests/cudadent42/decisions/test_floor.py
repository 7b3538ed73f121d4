"""What a machine cannot do is not a measurement."""

from __future__ import annotations

import math

import pytest

from cudadent42.decisions.compare import compare
from cudadent42.decisions.floor import TOLERANCE, floor_ms
from cudadent42.model.records import Plan, Refusal, Sample, TimerKind, Verdict
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.timing.limits import cpu_limits, cuda_limits

LONG = AttentionCase("long", "bf16", 1, 8, 8, 1024, 1024, 64)
DECODE = AttentionCase("decode", "bf16", 8, 8, 8, 1, 65536, 64)
PLAN = Plan("test", "cuda:0", (LONG,), "pytorch", ("pytorch", "ours"), 12, 0, seed=0)
PEAKS = {"fp32_gflops": 50_000.0, "bf16_gflops": 800_000.0, "copy_gbps": 4_000.0}
LIMITS = PEAKS | cuda_limits(PEAKS, 50 << 20)


def test_operations_at_the_peak_of_the_fastest_unit() -> None:
    assert floor_ms(LONG, LIMITS) == pytest.approx(LONG.flops / 800e12 * 1e3 / TOLERANCE)


def test_bytes_that_the_cache_cannot_hold() -> None:
    expected = (DECODE.bytes_min - (50 << 20)) / 4e12 * 1e3 / TOLERANCE
    assert floor_ms(DECODE, LIMITS) == pytest.approx(expected)
    assert floor_ms(DECODE, LIMITS | {"cache_bytes": 1e12}) < expected


def test_without_peaks_there_is_no_floor() -> None:
    assert floor_ms(LONG, {}) == floor_ms(LONG, {"cache_bytes": 1.0}) == 0.0


@pytest.mark.parametrize(
    ("ours", "refused"),
    [(1.01, None), (0.99, Refusal.IMPOSSIBLE), (0.0, Refusal.IMPOSSIBLE), (-1.0, Refusal.IMPOSSIBLE)],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_below_the_floor_is_refused(ours: float, refused: Refusal | None, swapped: bool) -> None:
    """Whichever side it is."""
    floor = floor_ms(LONG, LIMITS)
    latencies = {"pytorch": 5.0 * floor, "pytorch_control": 5.0 * floor, "ours": ours * floor}
    if swapped:
        latencies = {"pytorch": ours * floor, "pytorch_control": ours * floor, "ours": 5.0 * floor}
    samples = [
        Sample(LONG.id, name, block, index, latency * (1 + block * 1e-6), 1, math.nan, 0.0)
        for block in range(12)
        for index, (name, latency) in enumerate(latencies.items())
    ]
    results = compare(PLAN, samples, {}, LIMITS)
    assert results.cases[0].refused is results.refused is refused
    assert (results.verdict is Verdict.UNDECIDED) == (refused is not None)
    assert results.cases[0].floor_ms == floor


def test_processor_time_is_that_of_one_core() -> None:
    plan = Plan("test", "cpu", (LONG,), "pytorch", ("pytorch", "ours"), 12, 0, seed=0)
    peaks = {"fp32_gflops": 200.0, "copy_gbps": 20.0}
    call = cpu_limits(plan, peaks, 2)
    processor = cpu_limits(Plan(**{**vars(plan), "timer": TimerKind.CPU}), peaks, 2)
    assert call["limit_gflops"] >= 2 * processor["limit_gflops"] >= 200.0
    assert call["limit_gbps"] == 20.0
    assert "limit_gbps" not in processor
    assert cpu_limits(plan, {}, 2) == {}
