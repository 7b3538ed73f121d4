"""How far a result lies from the float64 reference."""

from __future__ import annotations

import torch
from torch import Tensor

from cudadent42.model.records import ErrorNorms

_ROW_FLOOR = 1e-3
"""Rows whose RMS is below this share of the whole result's are measured against that instead of their own."""


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is infinite or NaN, by one pass; False too where the sum itself leaves the dtype's range."""
    return bool(torch.isfinite(tensor.sum()))


def error_norms(result: Tensor, reference: Tensor) -> ErrorNorms:
    """Largest, RMS and worst row's error over the elements where the reference and the result are finite.

    ``max`` and ``rms`` are relative to the reference's RMS, ``worst_row`` to each row's own.
    """
    if reference.ndim and reference.numel() and all_finite(reference) and all_finite(result):
        return _norms_of(result.double() - reference, reference, reference.numel(), reference.shape[-1])
    judged = torch.isfinite(reference) & torch.isfinite(result)
    if not bool(judged.any()):
        return ErrorNorms(0.0, 0.0, 0.0)
    error = torch.where(judged, result.double() - reference, 0.0)
    exact = torch.where(judged, reference, 0.0)
    return _norms_of(error, exact, judged.sum(), judged.sum(dim=-1).clamp(min=1))


def _norms_of(error: Tensor, exact: Tensor, judged: Tensor | int, judged_in_row: Tensor | int) -> ErrorNorms:
    """``judged``: how many entries count; the others are zero."""
    rms = float((exact.square().sum() / judged).sqrt())
    if rms == 0.0:
        largest = float(error.abs().max())
        worst = 0.0 if largest == 0.0 else torch.inf
        return ErrorNorms(worst, worst, worst)
    row_rms = (exact.square().sum(dim=-1) / judged_in_row).sqrt().clamp(min=_ROW_FLOOR * rms)
    row_error = (error.square().sum(dim=-1) / judged_in_row).sqrt()
    return ErrorNorms(
        max=float(error.abs().max()) / rms,
        rms=float((error.square().sum() / judged).sqrt()) / rms,
        worst_row=float((row_error / row_rms).max()),
    )
