"""The profiled process: reading the driver's trace, and the whole path on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cudadent42.stages.profile.target import one_call


def event(name: str, start: float, duration: float = 5.0, **more: Any) -> dict[str, object]:
    arguments = {
        "grid": [132, 2, 1],
        "block": [384, 1, 1],
        "registers per thread": 168,
        "shared memory": 230608,
    }
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {**arguments, **more}}


def test_one_of_several_calls_is_taken_in_order_with_the_median_of_its_times() -> None:
    durations = [9.0, 50.0, 5.0, 30.0, 4.0, 20.0]  # of a, b, a, b, a, b
    events = [event(name, 10.0 * i, durations[i]) for i, name in enumerate(["a", "b"] * 3)]
    others = [{"cat": "cuda_runtime", "name": "launch", "ts": 0.5}]
    launches = one_call([*others, *reversed(events)], 3)
    assert [launch.kernel for launch in launches] == ["a", "b"]
    assert launches[0].grid_blocks == 264
    assert launches[0].block_threads == 384
    assert [launch.duration_s for launch in launches] == pytest.approx([5e-6, 30e-6])


def test_a_call_without_kernels_has_none() -> None:
    assert one_call([], 3) == ()


def test_a_profile_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real processes: times, ceilings, and counters as far as this machine has them."""
    from cudadent42.base.observer import Quiet
    from cudadent42.plan import Choices, make_plan
    from cudadent42.profiles import diagnose, store
    from cudadent42.registry import registry
    from cudadent42.stages.profile.collect import Wish, collect

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "own_clock"), prepend=os.pathsep)
    plan = make_plan(Choices(suite="small", cases=("tiny/bf16",)), "cpu", registry)
    profile = collect(Wish(plan, plan.cases[0], "pytorch"), tmp_path, None, Quiet())
    assert profile.latency_ms > 0
    assert profile.peaks["copy_gbps"] > 0
    counted = "cpu_instructions" in profile.metrics
    assert counted or any("not" in note and "counted" in note for note in profile.notes)
    diagnosis = diagnose(profile)
    store.write(tmp_path, profile, diagnosis)
    assert store.load_profile(tmp_path) == profile
    assert store.load_diagnosis(tmp_path) == diagnosis


def test_a_case_that_fails_is_told(tmp_path: Path) -> None:
    from cudadent42.base.errors import MachineNotReadyError
    from cudadent42.base.observer import Quiet
    from cudadent42.plan import Choices, make_plan
    from cudadent42.registry import registry
    from cudadent42.stages.profile.collect import Wish, collect

    plug_in = tmp_path / "broken.py"
    plug_in.write_text(
        "def attention(query, key, value, *, causal, softmax_scale):\n    raise ValueError('no')\n"
    )
    name = f"{plug_in}:attention"
    plan = make_plan(Choices(suite="small", cases=("tiny/bf16",), implementations=(name,)), "cpu", registry)
    with pytest.raises(MachineNotReadyError, match="ValueError: no"):
        collect(Wish(plan, plan.cases[0], name), tmp_path, None, Quiet())
