"""Calls on CUDA are timed by events that nobody waits for before the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional

from cudadent42.recording import clock
from cudadent42.recording.clock import CudaEvents
from cudadent42.recording.context import recorded
from cudadent42.recording.recorder import Recorder


class Device:
    """A device that works one call after the other, behind the host, by a clock of its own in ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0.0
        """Up to when the device has worked."""
        self.events = 0
        self.waited = 0

    def event(self, **options: object) -> Event:
        assert options == {"enable_timing": True}
        self.events += 1
        return Event(self)

    def call(self, milliseconds: float) -> None:
        self.now += milliseconds


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0.0
        self.on: torch.device | None = None
        """The device on whose stream it was recorded; another's cannot be used."""

    def record(self, stream: torch.device) -> None:
        assert self.on in (None, stream)
        self.on = stream
        self.at = self.device.now

    def query(self) -> bool:
        return self.at <= self.device.done

    def synchronize(self) -> None:
        self.device.waited += self.at > self.device.done
        self.device.done = max(self.device.done, self.at)

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        assert self.on == other.on
        return other.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(clock.torch.cuda, "Event", made.event)
    monkeypatch.setattr(clock.torch.cuda, "current_stream", lambda device: device)
    return made


def call(device: Device, events: CudaEvents, taken: list[float], milliseconds: float, index: int = 0) -> None:
    on = torch.device("cuda", index)
    began = events.begin(on)
    device.call(milliseconds)
    events.end(began, taken.append, on)


def test_events_are_read_when_they_are_done_and_used_again(device: Device) -> None:
    events, taken = CudaEvents(), list[float]()
    for number in range(1000):
        call(device, events, taken, 2.0)
        device.done = device.now - 100.0  # the device is fifty calls behind
        if number % 100 == 99:
            device.call(7.0)  # other work, which is nobody's
    assert device.waited == 0
    assert 700 < len(taken) < 1000
    assert device.events < 800  # of 2,000 that were recorded
    events.finish()
    assert taken == [pytest.approx(0.002)] * 1000
    assert device.waited > 0


def test_events_stay_on_the_device_of_their_calls(device: Device) -> None:
    events, taken = CudaEvents(), list[float]()
    for number in range(1000):
        call(device, events, taken, 2.0, index=number % 3)
        device.done = device.now
    events.finish()
    assert taken == [pytest.approx(0.002)] * 1000


class OnGpu(torch.Tensor):
    """Says that it is on the second GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)


def test_a_call_in_a_cuda_graph_counts_once_though_another_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tensor = torch.empty(1).as_subclass(OnGpu)
    recorder = Recorder()

    def call(function: Callable[[], int]) -> int:
        return recorder.call("key", lambda: pytest.fail("not looked at"), (tensor,), function)

    assert call(lambda: call(lambda: 3)) == 3
    assert recorder.recording().in_cuda_graphs == 1
    assert entered == [torch.device("cuda", 1)]
    assert call(lambda: 4) == 4
    assert recorder.recording().in_cuda_graphs == 2


def test_every_device_that_was_used_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    for name, made in {
        "is_initialized": lambda: True,
        "device_count": lambda: 4,
        "current_device": lambda: 1,
        "memory_reserved": lambda index: 1024 * (index == 3),
        "synchronize": waited.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    recorder = Recorder()
    recorder.start()
    assert waited == [1, 3]
    recorder.stop()
    assert waited == [1, 3, 1, 3]


def test_what_is_not_done_is_left_for_later(device: Device) -> None:
    events, taken = CudaEvents(), list[float]()
    for _ in range(600):
        call(device, events, taken, 1.0)
    assert (taken, device.waited) == ([], 0)
    events.forget()
    events.finish()
    assert taken == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use")
def test_calls_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    waits: list[Any] = []
    recorder = Recorder()
    with recorded(recorder):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(1))
            for _ in range(300):
                output = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
                output.sum().backward()
        graph = torch.cuda.CUDAGraph()
        still = query.detach()
        with torch.cuda.graph(graph):
            functional.scaled_dot_product_attention(still, still, still)
    recording = recorder.recording()
    (group,) = recording.groups
    assert waits == []
    assert (group.device, group.calls, group.backward_calls) == ("cuda", 300, 300)
    assert 0 < group.seconds + group.backward_seconds <= recording.seconds
    assert recording.in_cuda_graphs == 1
