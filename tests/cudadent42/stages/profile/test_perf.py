"""Reading what perf counted, and running it where it is installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from cudadent42.stages.profile import perf

OUTPUT = """# started on Sat

8000000;;instructions:u;1000;100.00;;
4000000;;cycles:u;1000;100.00;;
1000;;cache-misses:u;1000;100.00;;
<not supported>;;cache-references:u;0;100.00;;
"""


def test_counts_are_read_and_what_is_not_supported_is_named() -> None:
    counted = perf.parse(OUTPUT)
    assert counted.values == {"instructions": 8e6, "cycles": 4e6, "cache-misses": 1000}
    assert "not supported" in counted.missing["cache-references"]


def test_metrics_are_per_call() -> None:
    per_call = perf.metrics(perf.parse(OUTPUT), calls=10, bytes_min=1600)
    assert per_call["cpu_instructions"] == 8e5
    assert per_call["cpu_instructions_per_cycle"] == 2
    assert per_call["cpu_miss_bytes"] == 6400
    assert per_call["cpu_miss_bytes_share"] == 4


def test_nothing_counted_is_nothing_known() -> None:
    empty = perf.parse("")
    assert empty.values == {}
    assert set(empty.missing) == {event.partition(":")[0] for event in perf.EVENTS}
    assert perf.metrics(empty, calls=3, bytes_min=10) == {}


def test_counting_is_switched_on_by_the_program(tmp_path: Path) -> None:
    if shutil.which("perf") is None:
        pytest.skip("perf is not installed")
    program = f"""
import pathlib
folder = pathlib.Path({str(tmp_path)!r})
for word in ("enable", "disable"):
    with (folder / "control").open("w") as pipe: pipe.write(word + "\\n")
    with (folder / "ack").open() as pipe: assert pipe.readline().startswith("ack")
"""
    counted = perf.count([sys.executable, "-c", program], tmp_path, os.environ, timeout_s=30)
    names = {event.partition(":")[0] for event in perf.EVENTS}
    assert set(counted.values) | set(counted.missing) == names  # counted, or said why not


def test_a_program_that_fails_is_told(tmp_path: Path) -> None:
    if shutil.which("perf") is None:
        pytest.skip("perf is not installed")
    counted = perf.count([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, os.environ, timeout_s=30)
    assert counted.values == {}
    assert "failed" in counted.missing["cycles"]
