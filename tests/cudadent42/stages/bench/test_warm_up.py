"""How long a stage works before it times anything."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest

from cudadent42.base.serialise import dumps
from cudadent42.model.events import Event, StageDone
from cudadent42.model.records import BenchReport, Plan, Sample
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.stages.bench import measurement
from cudadent42.timing.processor_time import Kin
from cudadent42.worker import child
from cudadent42.worker.child import Request

CASE = AttentionCase("one", "fp32", 1, 2, 2, 64, 64, 32)
PLAN = Plan("test", "cpu", (CASE,), "pytorch", ("pytorch",), 10, 1, seed=2)
SAMPLE = Sample(CASE.id, "pytorch", 0, 0, 1.0, 1, 0.0, 0.0)


def test_a_process_that_measured_just_now_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "START_WARM_UP_S", 1.0)
    monkeypatch.setattr(measurement, "AGAIN_WARM_UP_S", 0.1)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert measurement.start_warm_up_s(None) == 1.0
    assert measurement.start_warm_up_s(now - measurement.STILL_WARM_S / 2) == 0.1
    assert measurement.start_warm_up_s(now - measurement.STILL_WARM_S) == 1.0


class Requests:
    """A channel with these requests, after which the parent is gone."""

    def __init__(self, *requests: Request) -> None:
        self.lines = deque(dumps(request, indent=None) for request in requests)
        self.events: list[Event] = []

    def next_line(self) -> str:
        if not self.lines:
            raise EOFError
        return self.lines.popleft()

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def note(self, doing: object) -> None:
        """Nobody reads it."""

    def fresh_seed(self) -> int:
        return 1


def test_a_worker_tells_a_measurement_when_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float | None] = []

    def measure(plan: Plan, *arguments: Any, last_measured_s: float | None, **named: Any) -> BenchReport:
        """The first one has nothing to time, and the process stays cold."""
        told.append(last_measured_s)
        return BenchReport((SAMPLE,) if len(told) > 1 else ())

    monkeypatch.setattr(measurement, "measure", measure)
    monkeypatch.setattr(child, "_watch", lambda plan, kin: None)
    monkeypatch.setattr(child, "add_folder", lambda: None)
    channel = Requests(*[Request("bench", PLAN)] * 4)
    began = time.monotonic()
    with pytest.raises(EOFError):
        child.serve(channel, Kin(None))  # type: ignore[arg-type]
    first, second, third, fourth = told
    assert first is None
    assert second is None
    assert third is not None
    assert fourth is not None
    assert began <= third <= fourth <= time.monotonic()
    assert channel.events == [StageDone("bench")] * 4
