"""The rows of docs/figures.md about attention's gradients that need more than one run's times."""

from __future__ import annotations

from collections.abc import Sequence

from figure_bounds import Bound, Row, least, mean, ratio, thousandths, unit
from figure_gradients import (
    DETERMINISTIC,
    IN_ANY_ORDER,
    cells_below,
    errors_over_torch,
    over_table,
    over_table_and,
)

ERRORS = (Bound("worst element", 2.0, ratio), Bound("worst row", 2.0, ratio), Bound("RMS", 1.15, thousandths))

ERRORS_ON_CPU: tuple[Row, ...] = (
    Row(
        "error of gradients against float64 over PyTorch's own, random inputs of the suite `backward-cpu`, before and "
        "after timing, on a Zen 3, before what the rows below changed: not run since",
        "cpu-zen3-backward",
        ERRORS,
        errors_over_torch(),
    ),
    Row("the same on a Xeon with AMX", "cpu-amx-backward", ERRORS, errors_over_torch()),
    Row(
        "the same there once more, since rows of few keys take Δ from their weights",
        "cpu-amx-backward-again",
        ERRORS,
        errors_over_torch(),
    ),
    Row(
        "the same there since rows of few keys take Δ from their weights and exponents are not rounded twice: four "
        "draws, not timed",
        "cpu-amx-backward-errors",
        ERRORS,
        errors_over_torch(files="amx-*.json"),
    ),
    Row(
        "the same, two draws with both sides held to AVX2",
        "cpu-amx-backward-errors",
        ERRORS,
        errors_over_torch(files="avx2-*.json"),
    ),
)

TABLE = "by a table of another run, which has no folder here"


def beside_flash_attention_3(peers: Sequence[str]) -> tuple[Row, ...]:
    """Rows that follow that of the gradients against the best of ``peers``."""
    kind = "h200-backward"
    each = (mean(1.1), least(1.1))
    best = (mean(1.0), least(0.9))
    return (
        Row(
            "gradients of attention against FlashAttention-3's with a deterministic order, "
            f"{TABLE}; the 24 cells of head dims 64 and 128",
            kind,
            each,
            over_table(DETERMINISTIC, 24),
        ),
        Row(
            "the same, the table scaled by how much faster cuDNN was here than there",
            kind,
            each,
            over_table(DETERMINISTIC, 24, scaled=True),
        ),
        Row(
            f"the same against FlashAttention-3's in any order, {TABLE}; 36 cells",
            kind,
            best,
            over_table(IN_ANY_ORDER, 36),
        ),
        Row("the same, the table scaled by cuDNN", kind, best, over_table(IN_ANY_ORDER, 36, scaled=True)),
        Row(
            "the same against the best of all in each cell, of this run and, scaled, of the table",
            kind,
            best,
            over_table_and(peers, 36),
        ),
    )


ERRORS_ON_H200: tuple[Row, ...] = (
    Row(
        "error of gradients in bf16 against float64 over PyTorch's own, random inputs of the 36 cells, before and "
        "after timing",
        "h200-backward",
        ERRORS,
        errors_over_torch("/bf16"),
    ),
    Row("the same of the portable kernels", "h200-backward-one-pass", ERRORS, errors_over_torch("/bf16")),
)


def training_steps(peers: Sequence[str]) -> Row:
    return Row(
        "forward and backward pass as a training step calls them, launches included, against the best of the same "
        "in each of the 36 cells of the suite `training-step`, FlashAttention-3 left out",
        "h200-training-step",
        (mean(1.05), least(), Bound("cells below 1.05×:", None, unit(""))),
        cells_below(1.05, peers, 36),
    )
