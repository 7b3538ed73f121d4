"""How far a result lies from the float64 reference."""

from __future__ import annotations

import torch
from torch import Tensor

from cudadent42.model.records import ErrorNorms

_ROW_FLOOR = 1e-3
"""Rows whose RMS is below this share of the whole result's are measured against that instead of their own."""


def error_norms(result: Tensor, reference: Tensor) -> ErrorNorms:
    """Largest, RMS and worst row's error over the elements where the reference and the result are finite.

    ``max`` and ``rms`` are relative to the reference's RMS, ``worst_row`` to each row's own.
    """
    judged = torch.isfinite(reference) & torch.isfinite(result)
    if not bool(judged.any()):
        return ErrorNorms(0.0, 0.0, 0.0)
    error = torch.where(judged, result.double() - reference, 0.0)
    exact = torch.where(judged, reference, 0.0)
    count = judged.sum(dim=-1).clamp(min=1)
    rms = float((exact.square().sum() / judged.sum()).sqrt())
    if rms == 0.0:
        largest = float(error.abs().max())
        worst = 0.0 if largest == 0.0 else torch.inf
        return ErrorNorms(worst, worst, worst)
    row_rms = (exact.square().sum(dim=-1) / count).sqrt().clamp(min=_ROW_FLOOR * rms)
    row_error = (error.square().sum(dim=-1) / count).sqrt()
    return ErrorNorms(
        max=float(error.abs().max()) / rms,
        rms=float((error.square().sum() / judged.sum()).sqrt()) / rms,
        worst_row=float((row_error / row_rms).max()),
    )
