"""On a GPU: the driver's trace, ceilings, ablations, and counters where they are open."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cudadent42.base.observer import Quiet
from cudadent42.plan import Choices, make_plan
from cudadent42.preflight import ncu_install
from cudadent42.preflight.ncu_install import Permission
from cudadent42.profiles import Profile, diagnose
from cudadent42.profiles.records import Source
from cudadent42.registry import registry
from cudadent42.stages.build import build_for
from cudadent42.stages.profile.collect import Wish, collect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def profile(
    folder: Path, case: str, *, counters: bool, ablate: bool | None = None, suite: str = "hopper"
) -> Profile:
    plan = make_plan(Choices(suite=suite, cases=(case,)), "cuda:0", registry)
    built = build_for(plan, lambda done, total, what: None)
    wish = Wish(plan, plan.cases[0], "cudadent42", counters=counters, ablate=ablate)
    return collect(wish, folder, built, Quiet())


def test_without_counters(tmp_path: Path) -> None:
    measured = profile(tmp_path, "d128-causal-4096", counters=False)
    assert measured.source is Source.MODEL
    assert measured.launches
    assert measured.peaks["bf16_gflops"] > measured.peaks["fp32_gflops"]
    assert 0 < measured.metrics["roof_share"] < 1.2
    assert diagnose(measured).bound != "unknown"
    if torch.cuda.get_device_capability() == (9, 0):
        assert {one.part for one in measured.ablations} == {"exponentials", "mask", "loads"}
        assert all(one.saved_low <= one.saved <= one.saved_high for one in measured.ablations)
        assert measured.resources is not None


def test_parts_of_the_portable_kernel_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_KERNEL", "portable")
    measured = profile(tmp_path, "d128-causal-4096", counters=False, ablate=True)
    assert measured.kernel == "attention_portable"
    assert {one.part for one in measured.ablations} == {"exponentials", "mask", "loads"}
    assert measured.resources is not None


@pytest.mark.parametrize(
    ("suite", "case", "parts"),
    [
        ("backward", "d64-causal-1024", {"exponentials", "mask", "loads", "sums"}),
        ("backward", "d128-causal-1024", {"exponentials", "mask", "loads", "sums"}),
        ("backward", "d128-causal-16384", {"exponentials", "mask", "loads", "sums"}),
        ("backward", "d128-full-512", {"exponentials", "loads", "sums"}),
        ("backward", "d128-full-4096", {"exponentials", "loads", "sums"}),
        ("backward", "d256-causal-1024", {"exponentials", "mask", "loads"}),
        ("backward-short", "d64-causal-197", {"exponentials", "mask", "loads"}),
    ],
)
def test_parts_of_the_backward_kernels_are_left_out(
    tmp_path: Path, suite: str, case: str, parts: set[str]
) -> None:
    """They build without spilling, and they end."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs take the portable kernels")
    measured = profile(tmp_path, case, counters=False, ablate=True, suite=suite)
    assert {one.part for one in measured.ablations} == {*parts, "query_gradient", "key_value_gradients"}
    assert all(one.saved_low <= one.saved <= one.saved_high for one in measured.ablations)


def test_parts_of_the_portable_backward_kernels_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_BACKWARD", "portable")
    measured = profile(tmp_path, "d128-causal-1024", counters=False, ablate=True, suite="backward")
    parts = {"exponentials", "mask", "loads", "query_gradient", "key_value_gradients"}
    assert {one.part for one in measured.ablations} == parts


def test_with_counters(tmp_path: Path) -> None:
    if ncu_install.find() is None or ncu_install.permission() is Permission.CLOSED:
        pytest.skip("Nsight Compute is not installed, or the counters are closed")
    measured = profile(tmp_path, "d128-full-1024", counters=True)
    if measured.source is Source.MODEL:
        pytest.skip(f"no counters: {measured.notes}")
    assert measured.metrics["time_s"] > 0
    assert measured.metrics["tensor_share"] > 0.1
    assert (tmp_path / measured.report).is_file()
    assert not math.isnan(diagnose(measured).bound_share)
