"""Figures of attention's gradients: errors against float64, FlashAttention-3 by another run's table, training steps."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from figure_readers import finished, ratios_by_case

from cudadent42.base.errors import UsageError

CANDIDATE = "cudadent42"
RANDOM = ("random", "after timing")
"""Kinds of inputs of standard normal values; the others are hard on purpose."""

# ---------------------------------------------------------------- errors against float64


def errors_over_torch(
    dtype: str = "", *, files: str = "verify.json", variants: bool = True
) -> Callable[[Path], tuple[float, ...]]:
    """Worst element, worst row and RMS of the candidate's errors over PyTorch's own on the same random input: the most
    over the cells of a dtype, of the verifications in ``files``, with or without the candidate's variants.
    """

    def read(folder: Path) -> tuple[float, ...]:
        checks = [
            check
            for path in sorted(folder.glob(files))
            for check in json.loads(path.read_text(encoding="utf-8"))["cases"]
        ]
        judged = [
            (check["error"], check["reference_error"])
            for check in checks
            if _is_candidate(check["implementation"], variants)
            and check["input"] in RANDOM
            and check["case"].endswith(dtype)
        ]
        if not judged or not all(check["passed"] for check in checks):
            raise UsageError(f"{folder} has no verification of random inputs, or one that did not pass")
        return tuple(max(_ratio(*pair, norm) for pair in judged) for norm in ("max", "worst_row", "rms"))

    return read


def _is_candidate(implementation: str, variants: bool) -> bool:
    return implementation.startswith(CANDIDATE) if variants else implementation == CANDIDATE


def _ratio(ours: dict[str, float] | None, torchs: dict[str, float] | None, norm: str) -> float:
    if ours is None or torchs is None or torchs[norm] == 0.0:
        raise UsageError(f"PyTorch has no {norm} of an error to compare with")
    return ours[norm] / torchs[norm]


# ---------------------------------------------------------------- FlashAttention-3

TABLE = Path(__file__).with_name("fa3_backward.json")
"""Its source is in it. No wheel of FlashAttention-3 has a backward pass, so no run of the lab does."""
IN_ANY_ORDER, DETERMINISTIC, TABLE_CUDNN = "any_order", "deterministic", "cudnn"
CUDNN = "pytorch_cudnn"


@cache
def table() -> dict[str, dict[str, float]]:
    """TFLOP/s of each column, by the name of a case of the suite `backward`."""
    document = json.loads(TABLE.read_text(encoding="utf-8"))
    cells: dict[str, dict[str, float]] = {}
    for name, columns in document["cells"].items():
        for column, rates in columns.items():
            for keys, rate in zip(document["keys"], rates, strict=True):
                cells.setdefault(f"{name}-{keys}", {})[column] = rate
    return cells


def rates(folder: Path) -> dict[str, dict[str, float]]:
    """TFLOP/s of every implementation, by the name of the case."""
    run = finished(folder).run
    assert run.results is not None
    flops = {case.id: case.flops for case in run.plan.cases}
    reached: dict[str, dict[str, float]] = {}
    for case in run.results.cases:
        of_case = reached.setdefault(case.name, {})
        of_case[case.implementation] = flops[case.case_id] / case.latency_ms / 1e9
        of_case[case.baseline] = flops[case.case_id] / case.baseline_latency_ms / 1e9
    for case in run.results.others:
        reached[case.name][case.implementation] = flops[case.case_id] / case.latency_ms / 1e9
    return reached


def over_table(column: str, cells: int, *, scaled: bool = False) -> Callable[[Path], tuple[float, float]]:
    """Geometric mean and least, over the ``cells`` that a column of the table has, of the candidate's TFLOP/s over its.
    Scaled: over its times what cuDNN reached in the run over what it reached in the table.
    """
    return _over(column, cells, scaled=scaled, rivals=())


def over_table_and(rivals: Sequence[str], cells: int) -> Callable[[Path], tuple[float, float]]:
    """The same over the fastest of the run's rivals and, scaled, FlashAttention-3 in any order."""
    return _over(IN_ANY_ORDER, cells, scaled=True, rivals=rivals)


def _over(
    column: str, cells: int, *, scaled: bool, rivals: Sequence[str]
) -> Callable[[Path], tuple[float, float]]:
    def read(folder: Path) -> tuple[float, float]:
        ratios = []
        for name, reached in rates(folder).items():
            cell = table().get(name, {})
            if column not in cell:
                continue
            missing = [rival for rival in (CUDNN, *rivals) if rival not in reached]
            if missing:
                raise UsageError(f"{missing[0]} was not timed on {name}")
            of_table = cell[column] * (reached[CUDNN] / cell[TABLE_CUDNN] if scaled else 1.0)
            ratios.append(reached["cudadent42"] / max(of_table, *(reached[rival] for rival in rivals), 0.0))
        if len(ratios) != cells:
            raise UsageError(f"{folder} and the table share {len(ratios)} cells; expected {cells}")
        return statistics.geometric_mean(ratios), min(ratios)

    return read


# ---------------------------------------------------------------- training steps


def cells_below(limit: float, rivals: Sequence[str], cells: int) -> Callable[[Path], tuple[float, ...]]:
    """Geometric mean and least of `against`, and how many cells are below ``limit``."""

    def read(folder: Path) -> tuple[float, ...]:
        ratios = ratios_by_case(folder, rivals, cells)
        return statistics.geometric_mean(ratios), min(ratios), sum(ratio < limit for ratio in ratios)

    return read
