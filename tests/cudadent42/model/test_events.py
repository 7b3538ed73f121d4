from __future__ import annotations

import math

import pytest

from cudadent42.model.events import (
    BenchLog,
    BlockMeasured,
    CaseVerified,
    Event,
    Message,
    Progress,
    Skipped,
    StageDone,
    StageFailed,
    WorkerLost,
    from_line,
    to_line,
)
from cudadent42.model.records import Conditions, ErrorNorms, Sample, VerifiedCase

NORMS = ErrorNorms(1e-3, 2e-4, math.inf)
VERIFIED = VerifiedCase("a/bf16", "ours", "random", NORMS, NORMS, NORMS, False, "line\nbreak")
BLOCK = BlockMeasured(
    (Sample("a/bf16", "ours", 0, 1, 0.5, 3, math.inf, 1.5, "steal"),),
    Conditions("a/bf16", 0, 0.01, 1, 0.0, 0.0, 0.5, power_w=700.0),
)
EVENTS: list[Event] = [
    Progress("bench", 1, 24, "a/bf16", 0.25),
    CaseVerified(VERIFIED),
    BLOCK,
    Skipped("bench", "a/bf16", "reason"),
    Message("text"),
    WorkerLost("a/bf16/ours", "signal 11"),
    StageDone("verify"),
    StageFailed("bad plan", 2),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_one_line_there_and_back(event: Event) -> None:
    line = to_line(event)
    assert "\n" not in line
    assert from_line(line) == event


@pytest.mark.parametrize(
    "line", ["", "hello", "[]", '{"event": "Unheard"}', '{"event": "Message", "data": {}}']
)
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"not an event|Expecting value|'text' is missing"):
        from_line(line)


def test_bench_log_keeps_what_it_has_at_any_moment() -> None:
    log = BenchLog()
    for event in EVENTS:
        log.add(event)
    log.add(Skipped("verify", "b/bf16/ours", "another stage"))
    report = log.report()
    assert report.samples == BLOCK.samples
    assert report.conditions == (BLOCK.conditions,)
    assert report.skipped == {"a/bf16": "reason"}
    assert report.rechecked == (VERIFIED,)
