"""How many input sets keep a call's inputs out of the last-level cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cudadent42.model.records import CacheState, Plan, VerifyReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.moe.case import MoeCase
from cudadent42.stages.bench.measurement import measure
from cudadent42.suites.loader import load_suite
from cudadent42.timing import flush
from cudadent42.timing.flush import INPUT_SETS, MOST_SETS, ROTATION_FACTOR, input_sets
from cudadent42.timing.timers import ClockTimer

CASE = AttentionCase("small", "fp32", 1, 2, 2, 64, 64, 32)
LARGE = replace(CASE, name="large", seqlen_q=4096, seqlen_k=4096)
PLAN = Plan("test", "cpu", (CASE,), "pytorch", ("pytorch", "cudadent42"), 2, 0, seed=3)
ROTATED = replace(PLAN, cache=CacheState.ROTATED)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> int:
    size = 10 * CASE.memory_bytes(1)
    monkeypatch.setattr(flush, "cache_bytes", lambda device: size)
    return size


@pytest.mark.parametrize("state", [CacheState.WARM, CacheState.COLD])
def test_few_sets_where_nobody_asks_for_more(state: CacheState) -> None:
    assert input_sets(replace(PLAN, cache=state), CASE) == INPUT_SETS


def test_sets_together_take_a_few_times_the_cache(cache: int) -> None:
    count = input_sets(ROTATED, CASE)
    assert count == 10 * ROTATION_FACTOR
    assert CASE.bytes_min * (count - 1) < ROTATION_FACTOR * cache <= CASE.bytes_min * count


def test_what_a_call_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long cache with a window, and of one in FP8, beside which the same keys lie in 16 bits."""
    monkeypatch.setattr(flush, "cache_bytes", lambda device: 60 << 20)
    cases = {case.name: case for case in load_suite("decode-paged").shapes}
    for name in ("1x8k", "8x1k", "window-128-sinks-64x8k"):
        case = cases[name]
        count = input_sets(replace(ROTATED, cases=(case,)), case)
        assert count * case.bytes_min >= ROTATION_FACTOR * (60 << 20), name
        assert INPUT_SETS < count < MOST_SETS, name
    narrow = next(case for case in load_suite("decode-fp8").shapes if case.name == "1x8k")
    assert input_sets(ROTATED, narrow) * narrow.bytes_min >= ROTATION_FACTOR * (60 << 20)


def test_large_inputs_need_no_more_sets() -> None:
    assert input_sets(ROTATED, LARGE) == INPUT_SETS


def test_sets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "cache_bytes", lambda device: 1 << 40)
    assert input_sets(ROTATED, CASE) == MOST_SETS
    experts = MoeCase("experts", "bf16", 1, 64, 32, 4, 2)
    assert input_sets(replace(ROTATED, cases=(experts,)), experts) == MOST_SETS


def test_only_a_cold_cache_is_written_over() -> None:
    assert flush.flush_for(PLAN) is None
    assert flush.flush_for(ROTATED) is None
    assert flush.flush_for(replace(PLAN, cache=CacheState.COLD)) is not None


def test_a_window_has_every_set_of_a_rotated_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudadent42.timing.timers.calls_for_window", lambda *_: 2)
    made: list[int] = []

    def call_of(index: int) -> torch.Tensor:
        made.append(index)
        return torch.tensor(index)

    read = ClockTimer(None).calibrate([lambda i=i: call_of(i) for i in range(INPUT_SETS + 4)])  # type: ignore[misc]
    assert read().inner == INPUT_SETS + 4
    assert made[1:] == list(range(INPUT_SETS + 4)), "the first is not timed"


def test_a_run_rotates_over_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudadent42.timing.timers.calls_for_window", lambda *_: 1)
    threads = torch.get_num_threads()
    try:
        report = measure(ROTATED, VerifyReport(()), emit=lambda event: None)
    finally:
        torch.set_num_threads(threads)
    assert {sample.inner for sample in report.samples} == {10 * ROTATION_FACTOR}
