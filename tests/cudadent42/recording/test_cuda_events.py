"""Calls on CUDA are timed by events that nobody waits for before the end."""

from __future__ import annotations

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

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.at <= self.device.done

    def synchronize(self) -> None:
        self.device.waited += self.at > self.device.done
        self.device.done = max(self.device.done, self.at)

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        return other.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(clock.torch.cuda, "Event", made.event)
    return made


def call(device: Device, events: CudaEvents, taken: list[float], milliseconds: float) -> None:
    began = events.begin()
    device.call(milliseconds)
    events.end(began, taken.append)


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
