"""What form a result may have, before it is looked at."""

from __future__ import annotations

import torch
from torch import Tensor


def parts_of(output: object) -> tuple[object, ...]:
    """A call returns a tensor, or several."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def wrong_kind(output: object) -> str:
    """A subclass may compute when it is looked at, after the clock has stopped; so only plain tensors with memory of
    their own count. Empty where all is well."""
    for part in parts_of(output):
        if type(part) is not Tensor and type(part) is not torch.nn.Parameter and isinstance(part, Tensor):
            return (
                f"returned a {type(part).__name__}, a subclass of Tensor that may compute when it is read; "
                "expected a plain Tensor"
            )
        if isinstance(part, Tensor) and part.layout is not torch.strided:
            return f"returned a tensor of layout {part.layout}; expected one that lies in memory"
    return ""
