from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from cudadent42.timing import quiet
from cudadent42.timing.quiet import USUAL, quiet_readings
from cudadent42.timing.timers import Reading

RESULT = torch.zeros(1)


def reader(latencies: Iterator[float]) -> Reading:
    return Reading(next(latencies), 1, RESULT, 0)


def test_disturbed_readings_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 0.59 ms that takes 7.9 ms in two of three readings, as its threads wait for their partner."""
    waited = iter(
        seconds for reading in range(100) for seconds in (float(reading), reading + (reading % 3 > 0))
    )
    monkeypatch.setattr(quiet, "waited_s", lambda: next(waited))
    latencies = iter([0.59, 7.9, 7.9] * 20)
    result = quiet_readings(lambda: reader(latencies), 5)
    assert [each.latency_ms for each in result.readings] == [0.59] * 5
    assert result.taken == 13


def test_a_machine_without_a_quiet_moment_gives_none_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter(float(number) for number in range(1000))
    monkeypatch.setattr(quiet, "waited_s", lambda: next(waited))
    result = quiet_readings(lambda: reader(iter([7.9])), 5)
    assert result.readings == ()
    assert result.taken == 5 * USUAL.most_for_one
    assert result.reason().startswith("other work took the processors away in 50 of 50 readings; repeat")


def test_where_nothing_is_told_every_reading_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "waited_s", lambda: math.nan)
    assert len(quiet_readings(lambda: reader(iter([1.0] * 5)), 5).readings) == 5


def test_what_takes_long_is_given_up_after_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter(float(number) for number in range(1000))
    monkeypatch.setattr(quiet, "waited_s", lambda: next(waited))
    hopeless = quiet_readings(lambda: "taken", 5, quiet.Patience(most_s=-1.0, fewest=3))
    assert hopeless.readings == ()
    assert hopeless.taken == 3
