"""benchmarks/compiled_stack.py, with toys on the CPU: the same layers, compiled and not, each through the kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers 5", allow_module_level=True)


def test_compiled_layers_meet_eager_ones(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path), "--tiny", "--device", "cpu", "--seconds", "0"]
    done = subprocess.run(
        [sys.executable, "benchmarks/compiled_stack.py", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "DeviceError" in done.stderr or "no C++ compiler" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    cases = json.loads((tmp_path / "compiled.json").read_text(encoding="utf-8"))["cases"]
    assert [case["tokens"] for case in cases] == [32, 64]
    for case in cases:
        assert case["outputs_apart"] < 0.02
        # Four layers in eager code, and four places of one graph: none goes elsewhere.
        assert sorted(case["report"]) == [
            "4 Hugging Face attention (traced by torch.compile) taken",
            "4 Hugging Face attention taken",
        ]
        assert all(set(block) == {"eager", "compiled", "eager again"} for block in case["blocks_ms"])
        assert case["ratio"]["ci_low"] <= case["ratio"]["ratio"] <= case["ratio"]["ci_high"]
