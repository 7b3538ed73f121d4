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


def test_what_is_kept_is_ours_and_of_the_long_layer(figures: ModuleType, tmp_path: Path) -> None:
    lines = [
        "qwen3 4096: ours 2.2 ms kept 0.10 GB eager 4.0 ms kept 0.47 GB; ratio to best 1.31 (x itself 0.02 GB more)",
        "qwen3 32768: ours 13.1 ms kept 0.81 GB eager 24.8 ms kept 3.76 GB; ratio 1.33 (x itself 0.13 GB more) [3s]",
    ]
    (tmp_path / "third.txt").write_text("\n".join(lines))
    assert figures.kept_gigabytes(tmp_path) == pytest.approx((0.94, 0.81))
    (tmp_path / "third.txt").write_text(lines[0])
    with pytest.raises(UsageError, match="has 0 times"):
        figures.kept_gigabytes(tmp_path)


def test_losses_are_compared_with_the_larger_of_the_library_s(figures: ModuleType, tmp_path: Path) -> None:
    def run(kernels: float, grouped_mm: float, loop: float) -> dict[str, object]:
        means = {"kernels": kernels, "grouped_mm": grouped_mm, "loop": loop}
        return {"apart": {way: {"mean": mean, "most": 10 * mean} for way, mean in means.items()}}

    runs = [run(0.009, 0.004, 0.01), run(0.006, 0.012, 0.01)]
    (tmp_path / "losses.json").write_text(json.dumps({"runs": runs}))
    assert figures.losses_off(tmp_path) == pytest.approx((0.015 / 0.02, 0.09 / 0.12))
