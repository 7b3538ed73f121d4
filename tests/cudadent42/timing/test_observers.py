"""Memory of a call, and the conditions of a block."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cudadent42.model.records import Conditions
from cudadent42.stages.bench.conditions import STEAL_LIMIT, WAIT_LIMIT, ConditionWatch, flags
from cudadent42.stages.bench.gpu_state import throttle_words
from cudadent42.timing.memory import memory_mb

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")


def measured(call: str) -> float:
    """`memory_mb` of a function ``call`` on the CPU, in a process of its own, as a worker is: what other tests free or
    keep in this one would be counted with it."""
    program = f"import gc, torch\nfrom cudadent42.timing.memory import memory_mb\n{call}\nprint(memory_mb(call, 'cpu'))"
    source = str(Path(__file__).resolve().parents[3] / "src")
    environment = os.environ | {"PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert not done.stderr
    return float(done.stdout)


@linux
@pytest.mark.usefixtures("warm_texts")
def test_memory_counts_scratch_and_output() -> None:
    """30 MB of scratch under a 10 MB output; the scratch is gone when the call returns."""
    megabytes = measured("""
def call():
    scratch = torch.ones(7_500_000)
    return scratch[:2_500_000] * 2.0

call()  # the first call also pages in code
""")
    assert megabytes == pytest.approx(40.0, abs=4.0)  # huge pages round up by up to 2 MB each


@linux
@pytest.mark.usefixtures("warm_texts")
def test_memory_that_a_collection_frees_hides_nothing() -> None:
    """30 MB that only a cycle held, and a call in which the collector looks."""
    megabytes = measured("""
cycle = [torch.ones(7_500_000)]
cycle.append(cycle)
del cycle

def call():
    gc.collect()
    scratch = torch.ones(5_000_000)
    return scratch[:500_000] * 2.0
""")
    assert megabytes >= 20.0


@linux
def test_memory_is_never_less_than_the_output() -> None:
    kept = torch.zeros(2_500_000)
    assert memory_mb(lambda: kept, "cpu") >= 10.0


@linux
def test_conditions_of_a_block() -> None:
    watch = ConditionWatch(None)
    watch.start()
    time.sleep(0.05)
    conditions, _ = watch.stop("c/bf16", 4)
    assert (conditions.case, conditions.block) == ("c/bf16", 4)
    assert conditions.duration_s >= 0.05
    assert conditions.involuntary_switches >= 0
    assert conditions.wait_fraction >= 0.0
    assert 0.0 <= conditions.steal_fraction <= 1.0
    assert math.isnan(conditions.power_w)


QUIET = Conditions("c", 0, 1.0, 0, 0.0, 0.0, 0.1)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (QUIET, []),
        (replace(QUIET, wait_fraction=2 * WAIT_LIMIT), ["preempted"]),
        (replace(QUIET, steal_fraction=3 * STEAL_LIMIT), ["steal"]),
        (replace(QUIET, steal_fraction=3 * STEAL_LIMIT, duration_s=0.01), []),  # less than one tick
        (replace(QUIET, throttle_reasons="power cap"), ["throttled"]),
        (replace(QUIET, wait_fraction=math.nan, steal_fraction=math.nan), []),
    ],
)
def test_flags(conditions: Conditions, expected: list[str]) -> None:
    assert flags(conditions) == expected


def test_throttle_reasons_in_words() -> None:
    assert throttle_words(0x01) == ""  # idle is not throttling
    assert throttle_words(0x04 | 0x20) == "power cap,thermal limit"
