"""benchmarks/models.py, with toys on the CPU: it races, keeps what it has, and goes on with what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers 5", allow_module_level=True)


def run(folder: Path, *cases: str) -> dict[str, Any]:
    chosen = [word for case in cases for word in ("--case", case)]
    fixed = ["--output", str(folder), "--tiny", "--device", "cpu", "--seconds", "0"]
    done = subprocess.run(
        [sys.executable, "benchmarks/models.py", *fixed, *chosen],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "DeviceError" in done.stderr or "no C++ compiler" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads((folder / "models.json").read_text(encoding="utf-8"))
    return document


def test_a_race_of_models(tmp_path: Path) -> None:
    first = run(tmp_path, "llama-training-8192")
    (row,) = first["cases"]
    assert row["report"] == ["2 Hugging Face attention taken"]
    assert row["outputs_apart"] < 0.05
    assert len(row["blocks_ms"]) >= 7
    assert all(set(block) == {"library", "ours", "library again"} for block in row["blocks_ms"])
    assert row["ratio"]["ci_low"] <= row["ratio"]["ratio"] <= row["ratio"]["ci_high"]

    second = run(tmp_path, "llama-training-8192", "qwen-few-1")
    assert second["cases"][0] == row
    report = second["cases"][1]["report"]
    assert sorted(report) == ["2 Hugging Face attention taken", "2 Hugging Face experts taken"]
    assert set(second["cases"][1]["screening_ms"]) == {"sdpa, grouped_mm", "sdpa, batched_mm"}
    assert "| qwen-few-1 |" in (tmp_path / "models.md").read_text(encoding="utf-8")


def test_steps_of_experts_with_the_loss_and_of_the_layers_alone(tmp_path: Path) -> None:
    whole, layers = run(tmp_path, "qwen-training-8192", "qwen-layers-training-8192")["cases"]
    for row in (whole, layers):
        assert {"2 Hugging Face attention taken", "2 Hugging Face experts taken"} <= set(row["report"])
        assert row["outputs_apart"] < 0.05
    assert whole["outputs_apart"] != layers["outputs_apart"]
