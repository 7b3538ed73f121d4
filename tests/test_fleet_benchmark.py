"""What the record of a simulated fleet says of the world that was invented."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    sys.path.append(str(BENCHMARKS))
    try:
        import fleet
    finally:
        sys.path.remove(str(BENCHMARKS))
    return fleet


def test_a_record_says_what_befell_its_own_fleets(benchmark: Any) -> None:
    """It once had the world of no part: none was lost an hour, where a hundred were."""
    budgets = benchmark.budgets(1)
    assert budgets["passed"] == 0
    assert budgets["nature"]["lost_per_hour"] == benchmark.BUDGETS_NATURE.lost_per_hour > 0
    large = benchmark.large(gpus=4, cases=2, arms=12)
    assert large["state_is_the_journal_s"]
    assert large["nature"]["lost_per_hour"] > 0
    assert large["nature"]["gains"] == {}
