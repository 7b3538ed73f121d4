"""Figures of attention's gradients, read from verifications, from a run and from another's table."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import ModuleType

import pytest

from cudadent42.base.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "benchmarks" / "results" / "2026-11-29-h200-backward"
STEPS = ROOT / "benchmarks" / "results" / "2026-11-29-h200-training-step"
PEERS = ("pytorch", "pytorch_cudnn", "pytorch_flash", "flash_attn_cute")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import figure_gradients

    return figure_gradients


def check(
    case: str,
    implementation: str,
    kind: str,
    ours: tuple[float, float, float],
    torchs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    *,
    passed: bool = True,
) -> dict[str, object]:
    names = ("max", "worst_row", "rms")
    return {
        "case": case,
        "implementation": implementation,
        "input": kind,
        "error": dict(zip(names, ours, strict=True)),
        "reference_error": dict(zip(names, torchs, strict=True)),
        "passed": passed,
    }


def write(folder: Path, *checks: dict[str, object], name: str = "verify.json") -> Path:
    (folder / name).write_text(json.dumps({"cases": checks}))
    return folder


def test_errors_are_the_most_of_random_inputs(figures: ModuleType, tmp_path: Path) -> None:
    there = write(
        tmp_path,
        check("a/bf16", "cudadent42", "random", (1.5, 0.5, 1.0), (1.0, 0.25, 1.0)),
        check("b/bf16", "cudadent42[portable]", "after timing", (0.9, 1.0, 1.1)),
        check("a/fp32", "cudadent42", "random", (3.0, 3.0, 3.0)),
        check("a/bf16", "pytorch", "random", (9.0, 9.0, 9.0)),
        check("negative_scale/bf16", "cudadent42", "negative_scale", (8.0, 8.0, 8.0)),
    )
    assert figures.errors_over_torch("/bf16")(there) == pytest.approx((1.5, 2.0, 1.1))
    assert figures.errors_over_torch()(there) == pytest.approx((3.0, 3.0, 3.0))


def test_errors_of_several_draws(figures: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, check("a/bf16", "cudadent42", "random", (1.5, 0.5, 1.0)), name="amx-0.json")
    write(tmp_path, check("a/bf16", "cudadent42", "random", (0.5, 0.7, 1.2)), name="amx-1.json")
    assert figures.errors_over_torch(files="amx-*.json")(tmp_path) == pytest.approx((1.5, 0.7, 1.2))


def test_a_verification_that_did_not_pass_is_no_figure(figures: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no verification of random inputs"):
        figures.errors_over_torch()(tmp_path)
    good = check("a/bf16", "cudadent42", "random", (1.0, 1.0, 1.0))
    bad = check("a/bf16", "pytorch", "random", (1.0, 1.0, 1.0), passed=False)
    with pytest.raises(UsageError, match="did not pass"):
        figures.errors_over_torch()(write(tmp_path, good, bad))
    without = check("a/bf16", "cudadent42", "random", (1.0, 1.0, 1.0), (0.0, 1.0, 1.0))
    with pytest.raises(UsageError, match="no max of an error"):
        figures.errors_over_torch()(write(tmp_path, without))


def test_the_table_has_the_cells_of_the_suite(figures: ModuleType) -> None:
    assert set(figures.table()) == set(figures.rates(RUN))
    deterministic = {name for name, cell in figures.table().items() if "deterministic" in cell}
    assert deterministic == {name for name in figures.table() if not name.startswith("d256")}
    assert figures.table()["d128-causal-1024"] == {"cudnn": 296, "any_order": 322, "deterministic": 276}


def test_ratios_to_the_table(figures: ModuleType) -> None:
    rates, cell = figures.rates(RUN)["d64-causal-16384"], figures.table()["d64-causal-16384"]
    here = rates["cudadent42"]
    assert here == pytest.approx(568, abs=1)
    least = figures.over_table("deterministic", 24)(RUN)[1]
    assert least == pytest.approx(here / cell["deterministic"])
    scaled = figures.over_table("deterministic", 24, scaled=True)(RUN)[1]
    assert scaled == pytest.approx(here / rates["pytorch_cudnn"] / (cell["deterministic"] / cell["cudnn"]))
    with pytest.raises(UsageError, match="share 24 cells; expected 36"):
        figures.over_table("deterministic", 36)(RUN)


def test_the_best_of_all_is_no_slower_than_any(figures: ModuleType) -> None:
    both = figures.over_table_and(PEERS, 36)(RUN)
    alone = figures.over_table("any_order", 36, scaled=True)(RUN)
    assert all(one <= other for one, other in zip(both, alone, strict=True))
    with pytest.raises(UsageError, match="nobody was not timed on"):
        figures.over_table_and(("nobody",), 36)(RUN)


def test_cells_below_a_limit_are_counted(figures: ModuleType) -> None:
    ratios = figures.ratios_by_case(STEPS, PEERS, 36)
    mean, least, below = figures.cells_below(1.05, PEERS, 36)(STEPS)
    assert (mean, least) == pytest.approx((statistics.geometric_mean(ratios), min(ratios)))
    assert below == sum(ratio < 1.05 for ratio in ratios) == 7
