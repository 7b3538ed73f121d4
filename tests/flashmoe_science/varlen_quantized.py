"""What is asked of attention over a cache of FP8: at most a tenth more than the error of an ideal kernel."""

from __future__ import annotations

import torch
from varlen_cases import Call
from varlen_reference import exact_varlen


def assert_as_exact_as_ideal(
    out: torch.Tensor, lse: torch.Tensor | None, call: Call, wide: Call, **options: object
) -> None:
    """``call`` has the cache before it was quantised, ``wide`` in float64 after, as `varlen_cases.quantized` makes it.

    An ideal kernel computes in float64 with the second, and rounds its result once. Errors are those against float64
    with the first. Beside it, what the kernel adds to quantisation: at most twice what weights in 16 bits add.
    """
    dtype = call["query"].dtype
    exact, _ = exact_varlen(**call, **options)  # type: ignore[arg-type]
    ideal, lse_of_wide = exact_varlen(**wide, **options)  # type: ignore[arg-type]
    rounded, _ = exact_varlen(**wide, **options, rounded_to=dtype)  # type: ignore[arg-type]
    ours = out.cpu().double()
    assert out.dtype == dtype
    assert torch.equal(ours.isnan(), ideal.isnan())
    if ours.numel():
        assert _rms(ours - exact) <= 1.1 * _rms(ideal.to(dtype).double() - exact) + 1e-7
        assert _rms(ours - ideal) <= 2 * _rms(rounded.to(dtype).double() - ideal) + 1e-7
    if lse is not None:
        torch.testing.assert_close(lse.cpu().double(), lse_of_wide, rtol=2e-6, atol=2e-5, equal_nan=True)


def _rms(error: torch.Tensor) -> torch.Tensor:
    return error.square().mean().sqrt()
