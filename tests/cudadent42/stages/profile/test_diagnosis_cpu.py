"""The diagnosis on a CPU: no sentence from a disturbed time, none for every kernel alike, and no going in circles."""

from __future__ import annotations

import dataclasses
import math

import pytest

from cudadent42.profiles import Profile, diagnose
from cudadent42.profiles.records import SCHEMA_VERSION, Ablation, Source

SLOW = Profile(
    schema_version=SCHEMA_VERSION,
    case="tiny/bf16",
    implementation="cudadent42",
    device="cpu",
    device_name="",
    architecture="",
    kernel="",
    source=Source.MODEL,
    flops=1e8,
    bytes_min=1e6,
    dtype="fp32",
    latency_ms=2.0,
    metrics={},
    peaks={"fp32_gflops": 200.0, "copy_gbps": 20.0},
)
PARTS = tuple(Ablation(part, 1.9, 2.0, 0.01, -0.01, 0.02) for part in ("exponentials", "loads"))


def test_a_disturbed_time_is_no_diagnosis() -> None:
    reason = "other work took the processors away in 110 of 110 readings; repeat on a quiet machine"
    disturbed = dataclasses.replace(SLOW, latency_ms=math.nan, missing={"roof_share": reason})
    diagnosis = diagnose(disturbed)
    assert diagnosis.causes == ()
    assert reason in diagnosis.summary
    assert "%" not in diagnosis.summary
    assert reason in diagnosis.next_step


def test_the_first_step_is_not_advised_a_second_time() -> None:
    before = diagnose(SLOW)
    assert before.causes[0].rule == "cpu-below-roof"
    assert "--ablate" in before.next_step
    after = diagnose(dataclasses.replace(SLOW, ablations=PARTS))
    assert after.causes[0].rule == "cpu-below-roof-ablated"
    assert "--ablate" not in after.next_step
    assert "OMP_NUM_THREADS=1" in after.next_step


@pytest.mark.parametrize("implementation", ["pytorch", "mine.py:attention"])
def test_parts_are_not_left_out_of_what_has_none(implementation: str) -> None:
    diagnosis = diagnose(dataclasses.replace(SLOW, implementation=implementation))
    assert diagnosis.causes[0].rule == "cpu-below-roof-of-others"
    assert "--ablate" not in diagnosis.next_step


def test_what_a_machine_cannot_count_is_not_asked_of_it_again() -> None:
    """Most virtual machines have no counters, and nothing that their user can get gives them any."""
    reason = "perf says not supported (a virtual machine may have no counters)"
    near_the_roof = dataclasses.replace(SLOW, latency_ms=0.8, missing={"cpu_cache-misses": reason})
    asked = diagnose(near_the_roof)
    assert asked.causes == ()
    assert asked.next_step == f"To know more, profile again where nothing is missing: {reason}"
