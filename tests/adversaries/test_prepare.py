"""What is published as an `Implementation` may prepare ahead of the clock, and not compute there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import lab
import pytest
import torch

from cudadent42.correctness.guards import guarded
from cudadent42.integrity.refill import FreshInputs
from cudadent42.integrity.watch import Watch
from cudadent42.model.events import Event
from cudadent42.model.implementations import Call
from cudadent42.model.integrity import Breach, Finding
from cudadent42.operations import numerics
from cudadent42.operations.attention.implementations import prepare_sdpa
from cudadent42.operations.attention.inputs import AttentionInputs
from cudadent42.stages.bench.checks import Checks
from cudadent42.timing.timers import ClockTimer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def computes_ahead(inputs: AttentionInputs) -> Call:
    output = prepare_sdpa(lab.CASE, inputs)()
    return lambda: output


def copies_ahead(inputs: AttentionInputs) -> Call:
    own = replace(inputs, query=inputs.query.clone())
    return prepare_sdpa(lab.CASE, own)


def looks_ahead(inputs: AttentionInputs) -> Call:
    return prepare_sdpa(lab.CASE, inputs)


@pytest.mark.parametrize(
    ("prepare", "breaches"),
    [
        (computes_ahead, {Breach.KEPT_RESULT}),
        (copies_ahead, {Breach.WRONG_WHILE_TIMED}),
        (looks_ahead, set()),
    ],
)
def test_what_was_prepared_of_values_is_wrong_when_they_change(
    prepare: object, breaches: set[Breach]
) -> None:
    findings: list[Finding] = []
    events: list[Event] = []
    watch = Watch()
    watch.begin({"pytorch"}, findings.append)
    plan = lab.plan_for(["mine"])
    checks = Checks(plan, watch, events.append, lambda: secrets.randbits(63))
    sets, _ = guarded(numerics(lab.CASE).input_sets(lab.CASE, 0, 3, "cpu"))
    inputs = FreshInputs(lab.CASE, sets)
    checks.refill(inputs)
    timer = ClockTimer(None)
    mine = timer.calibrate([prepare(each) for each in sets], 4)  # type: ignore[operator]
    base = timer.calibrate([prepare_sdpa(lab.CASE, each) for each in sets], 4)
    checks.refill(inputs)
    checks.after_block(lab.CASE, inputs, {"pytorch": base(), "mine": mine()}, counted=True)
    assert {each.breach for each in findings} == breaches
    assert ("small/fp32/mine" in checks.wrong) == bool(breaches)
