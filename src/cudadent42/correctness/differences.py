"""How far two results of one dtype are apart that may both be right: a look that is cheap, and that decides nothing."""

from __future__ import annotations

import torch

GROSS = 0.1
"""Root mean square of the difference from the reference, as a share of the reference's. Rounding gives a tenth of it at
the most, in fp16 and bf16 too; a result of other inputs, or of none, gives 1 and more."""

ROUNDINGS = 32
"""The same in roundings of the dtype. In fp32 two kernels that add in other orders differ by some; what is computed in
fp16 or TF32 inside, by thousands."""


def most_difference(dtype: torch.dtype) -> float:
    """Of two results of a dtype, as ``GROSS``: beyond it, float64 has to say whose is wrong."""
    return min(GROSS, ROUNDINGS * torch.finfo(dtype).eps)
