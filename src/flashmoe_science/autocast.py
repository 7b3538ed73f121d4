"""torch.autocast: a public function casts its tensors itself, as PyTorch's own do in the dispatcher."""

from __future__ import annotations

from typing import Any

import torch

is_on = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast is on for any device: one call, where this torch has it."""

_DEVICES = ("cpu", "cuda")
"""PyTorch raises an error of its own when asked about autocast on some others, such as meta."""


def cast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in the dtype of autocast on the first one's device; as they are where it is off there.

    float64 stays, as in PyTorch, and so do what is no tensor and what is on a device without our kernels.
    """
    first = tensors[0]
    kind = first.device.type if isinstance(first, torch.Tensor) else ""
    if kind not in _DEVICES or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(dtype)
        if isinstance(tensor, torch.Tensor)
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        else tensor
        for tensor in tensors
    )
