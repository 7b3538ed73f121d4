"""Figures of experts that train, read from a run of steps, from texts and from a script's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from cudadent42.base.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
STEPS = ROOT / "benchmarks" / "results" / "2026-11-28-h200-moe-step-pairs"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import figure_training

    return figure_training


def test_a_rate_is_of_the_median_latency(figures: ModuleType) -> None:
    flops = 18 * 32768 * 8 * 2048 * 768
    assert figures.step_rate("qwen3-30b-32768")(STEPS) == pytest.approx(flops / 13.41107177734375 / 1e9)
    with pytest.raises(UsageError, match=r"has no layer qwen3-30b-1$"):
        figures.step_rate("qwen3-30b-1")(STEPS)


def test_memory_is_of_the_layer_and_peaks_are_over_the_smaller(figures: ModuleType, tmp_path: Path) -> None:
    layer = "qwen3-30b-32768"
    ways = (("cudadent42", 0.8, 4.5), ("grouped_mm", 3.8, 7.0), ("grouped_mm_compiled", 3.4, 5.0))
    rows = [
        {"case": layer, "implementation": way, "kept_gb": kept, "peak_gb": peak} for way, kept, peak in ways
    ]
    (tmp_path / "memory.json").write_text(
        json.dumps({"cases": [*rows, {"case": layer, "implementation": "liger", "left_out": "not there"}]})
    )
    hidden_states = 32768 * 2048 * 2e-9
    assert figures.kept_gigabytes(layer)(tmp_path) == pytest.approx((0.8 + hidden_states, 0.8))
    assert figures.peak_over_library(layer)(tmp_path) == pytest.approx(0.9)
    with pytest.raises(UsageError, match="does not have peak_gb of mixtral-8x7b-8192"):
        figures.peak_over_library("mixtral-8x7b-8192")(tmp_path)


def test_losses_are_compared_with_the_larger_of_the_library_s(figures: ModuleType, tmp_path: Path) -> None:
    def run(kernels: float, grouped_mm: float, loop: float) -> dict[str, object]:
        means = {"kernels": kernels, "grouped_mm": grouped_mm, "loop": loop}
        return {"apart": {way: {"mean": mean, "most": 10 * mean} for way, mean in means.items()}}

    runs = 5 * [run(0.009, 0.004, 0.01), run(0.006, 0.012, 0.01)]
    (tmp_path / "losses.json").write_text(json.dumps({"runs": runs, "steps": 200}))
    assert figures.losses_off(tmp_path) == pytest.approx((0.015 / 0.02, 0.09 / 0.12))
    (tmp_path / "losses.json").write_text(json.dumps({"runs": runs[:3], "steps": 200}))
    with pytest.raises(UsageError, match="not of 10 seeds"):
        figures.losses_off(tmp_path)
