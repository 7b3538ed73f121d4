"""CUDA's timers on a real GPU, on a kernel that writes twice what it reads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cudadent42.model.records import CacheState, Plan
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.stages.bench.gpu_state import open_gpu_state
from cudadent42.timing import cuda_timers
from cudadent42.timing.cuda_timers import (
    EVENT_MAX_CALLS,
    EVENT_MIN_CALLS,
    CudaEventTimer,
    CudaGraphTimer,
    CudaQueueTimer,
    median,
)
from cudadent42.timing.flush import cache_bytes, flush_for
from cudadent42.timing.memory import memory_mb

DEVICE = "cuda:0"


def test_median() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


class Doubler:
    """Writes twice its input of ``elements`` floats to a new tensor."""

    def __init__(self, elements: int, value: float) -> None:
        self.source = torch.full((elements,), value, device=DEVICE)

    def __call__(self) -> Tensor:
        return self.source * 2.0


class OnTheHost:
    """A call that owns memory: a peer's copy of the page table, say."""

    def __init__(self) -> None:
        self.table = torch.zeros(4)

    def __call__(self) -> Tensor:
        return self.table


def test_what_calls_own_lives_as_long_as_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed and used by others, it is read by replays all the same."""

    def capture(calls: Sequence[OnTheHost], copies: int, device: str) -> cuda_timers.Captured:
        return cuda_timers.Captured(None, calls[0](), tuple(calls))  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_timers, "_event_pair", lambda: (None, None))
    monkeypatch.setattr(cuda_timers, "capture", capture)
    monkeypatch.setattr(CudaGraphTimer, "_replay", lambda timer, graph: (1.0, 0.0))
    call = OnTheHost()
    alive = weakref.ref(call)
    read = CudaGraphTimer(DEVICE, None).calibrate([call])
    del call
    gc.collect()
    assert alive() is not None
    assert read().latency_ms > 0
    del read
    gc.collect()
    assert alive() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnGpu:
    def test_a_graph_reads_what_its_calls_own_when_they_are_gone(self) -> None:
        read = CudaGraphTimer(DEVICE, None).calibrate([Doubler(1000, 3.0)])
        torch.full((1000,), float("nan"), device=DEVICE)  # where the source would have been
        assert float(read().output[0]) == 6.0

    def test_event_timer_counts_its_calls(self) -> None:
        reading = CudaEventTimer(DEVICE, None).calibrate([Doubler(1000, float(i)) for i in range(3)])()
        assert EVENT_MIN_CALLS <= reading.inner <= EVENT_MAX_CALLS
        assert 0.001 < reading.latency_ms < 1.0
        assert float(reading.output[0]) == 2.0 * reading.input_set

    def test_graph_of_many_calls_shows_gpu_time_alone(self) -> None:
        calls = [Doubler(1000, float(i)) for i in range(3)]
        graph = CudaGraphTimer(DEVICE, None).calibrate(calls)()
        event = CudaEventTimer(DEVICE, None).calibrate(calls)()
        assert graph.latency_ms < event.latency_ms
        assert float(graph.output[0]) == 2.0 * graph.input_set

    def test_queued_calls_show_gpu_time_alone(self) -> None:
        calls = [Doubler(1000, float(i)) for i in range(3)]
        queued = CudaQueueTimer(DEVICE, None).calibrate(calls)()
        event = CudaEventTimer(DEVICE, None).calibrate(calls)()
        assert queued.latency_ms < event.latency_ms
        assert float(queued.output[0]) == 2.0 * queued.input_set

    def test_a_call_that_waits_for_the_gpu_cannot_be_queued(self) -> None:
        doubler = Doubler(1000, 1.0)

        def call() -> Tensor:
            output = doubler()
            torch.cuda.synchronize(DEVICE)
            return output

        with pytest.raises(RuntimeError, match="could not be queued"):
            CudaQueueTimer(DEVICE, None).calibrate([call])

    def test_both_timers_agree_on_long_kernels(self) -> None:
        calls = [Doubler(100_000_000, 1.0)]
        graph = CudaGraphTimer(DEVICE, None).calibrate(calls)()
        event = CudaEventTimer(DEVICE, None).calibrate(calls)()
        assert graph.latency_ms == pytest.approx(event.latency_ms, rel=0.2)

    def test_cold_reads_take_longer(self) -> None:
        case = AttentionCase("c", "bf16", 1, 1, 1, 8, 8, 64)
        plan = Plan("t", DEVICE, (case,), "pytorch", ("pytorch",), 1, 0, 0, cache=CacheState.COLD)
        call = Doubler(cache_bytes(DEVICE) // 4 // 4, 1.0)
        warm = CudaGraphTimer(DEVICE, None).calibrate([call])()
        cold = CudaGraphTimer(DEVICE, flush_for(plan)).calibrate([call])()
        assert cold.latency_ms > warm.latency_ms

    def test_memory_is_the_allocator_s_peak(self) -> None:
        source = torch.ones(1 << 20, device=DEVICE)

        def call() -> Tensor:
            scratch = source.repeat(3)
            return scratch[: 1 << 20] + 1.0

        assert memory_mb(call, DEVICE) == pytest.approx(16 * (1 << 20) / 1e6, rel=0.01)

    def test_state_of_the_gpu(self) -> None:
        state, problem = open_gpu_state(DEVICE)
        if state is None:
            pytest.skip(problem)
        reading = state.read()
        assert 100 < reading.sm_clock_mhz < 5000
        assert 5 < reading.power_w < 2000
        assert 5 < reading.temperature_c < 110
