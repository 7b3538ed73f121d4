"""Shares of the sweeps of a planted configuration, and the one file that is made of them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> Any:
    """Both scripts."""
    sys.path.append(str(BENCHMARKS))
    try:
        import merge_tuning
        import tuning
    finally:
        sys.path.remove(str(BENCHMARKS))
    return tuning, merge_tuning


def share(tuning: Any, *seeds: int, **provenance: Any) -> dict[str, Any]:
    sweeps = [
        tuning.Sweep(
            seed,
            (f"COST={tuning.PLANTED}, UNUSED=0",),
            1,
            arm_blocks=60,
            exhaustive_blocks=378,
            timed_blocks=120,
            exhaustive_timed_blocks=560,
            seconds=1.0,
        )
        for seed in seeds
    ]
    about = {
        "revision": "a",
        "changed_source": False,
        "machine": "m",
        "facts": {"load": seeds[0]},
        **provenance,
    }
    return {"provenance": about, "sweeps": [asdict(each) for each in sweeps], "kills": []}


def test_shares_become_one_file_in_the_order_of_their_seeds(benchmarks: Any, tmp_path: Path) -> None:
    tuning, merge_tuning = benchmarks
    said = merge_tuning.merge([share(tuning, 2, 3), share(tuning, 0)], tmp_path)
    document = json.loads((tmp_path / "tuning.json").read_text())
    assert [each["seed"] for each in document["sweeps"]] == [0, 2, 3]
    assert document["summary"] == said
    assert (said["sweeps"], said["planted_installed"]) == (3, 3)
    assert said["blocks_share"] == pytest.approx(60 / 378)
    assert said["timed_share"] == pytest.approx(120 / 560)
    assert document["provenance"]["shares"] == 2


@pytest.mark.parametrize("other", [{"revision": "b"}, {"machine": "n"}, {"changed_source": True}])
def test_shares_of_other_sources_or_machines_are_refused(
    benchmarks: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    tuning, merge_tuning = benchmarks
    with pytest.raises(SystemExit, match=f"differ in {next(iter(other))}"):
        merge_tuning.merge([share(tuning, 0), share(tuning, 1, **other)], tmp_path)


def test_a_sweep_counts_once(benchmarks: Any, tmp_path: Path) -> None:
    tuning, merge_tuning = benchmarks
    with pytest.raises(SystemExit, match="sweeps 1 are in more than one share"):
        merge_tuning.merge([share(tuning, 0, 1), share(tuning, 1, 2)], tmp_path)


def test_a_configuration_that_was_not_planted_counts_as_none(benchmarks: Any) -> None:
    tuning, _ = benchmarks
    wrong = tuning.Sweep(0, ("COST=100, UNUSED=1",), 1, 60, 378, 120, 560, 1.0)
    both = tuning.Sweep(1, (f"COST={tuning.PLANTED}, UNUSED=0",), 0, 60, 378, 120, 560, 1.0)
    assert tuning.summary([wrong, both], ())["planted_installed"] == 0
    assert tuning.summary([wrong, both], ())["others_installed"] == 1
