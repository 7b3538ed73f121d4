"""Estimates of a run's time, held against the runs that are on record."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from cudadent42.base.serialise import decode
from cudadent42.flows.duration import estimate_s
from cudadent42.model.records import Plan
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
MANIFESTS = sorted(RESULTS.rglob("manifest.json"))
TOO_LONG = 20
"""Times what it took: an estimate beyond that would refuse runs that cost nothing worth speaking of."""


@pytest.mark.parametrize("path", MANIFESTS, ids=[path.parent.name for path in MANIFESTS])
def test_no_run_on_record_took_longer_than_estimated(path: Path) -> None:
    manifest = json.loads(path.read_text())
    begun, ended = (datetime.fromisoformat(manifest[key]) for key in ("started", "ended"))
    took = (ended - begun).total_seconds()
    assert took < estimate_s(decode(Plan, manifest["plan"])) < TOO_LONG * took


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_more_work_takes_longer_and_a_budget_bounds_it(device: str) -> None:
    plan = make_plan(Choices("default"), device, registry)
    whole = estimate_s(plan)
    assert estimate_s(replace(plan, repeats=10 * plan.repeats)) > whole
    assert estimate_s(replace(plan, cases=plan.cases[:3])) < whole
    long = replace(plan, repeats=1000 * plan.repeats)
    assert estimate_s(replace(long, budget_s=60.0)) < whole + 60
    assert estimate_s(replace(plan, budget_s=1e5)) == whole
