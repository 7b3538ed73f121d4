"""benchmarks/serving.py, with toys on the CPU: every way to read a cache is right, and ratios are of what was timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_every_way_to_read_a_cache_is_right(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path), "--tiny", "--device", "cpu", "--seconds", "0", "--share", "0/5"]
    done = subprocess.run(
        [sys.executable, "benchmarks/serving.py", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if "DeviceError" in done.stderr or "no C++ compiler" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    races = json.loads((tmp_path / "serving.json").read_text(encoding="utf-8"))["races"]
    assert len({race["part"] for race in races}) > 3
    for race in races:
        ours = {name for name in race["errors"] if not name.startswith(("fa3", "flashinfer"))}
        assert ours <= set(race["us"]), race["refused"]
        assert all(race["errors"][name] < 0.01 for name in ours)
        for ratio in race["ratios"]:
            assert {ratio["time_of"], ratio["over"]} <= set(race["us"])
            assert ratio["ci_low"] <= ratio["ratio"] <= ratio["ci_high"]
