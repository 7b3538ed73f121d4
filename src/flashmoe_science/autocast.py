"""torch.autocast: a public function casts its tensors itself, as PyTorch's own do in the dispatcher."""

from __future__ import annotations

from typing import Any

import torch

is_on = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast is on for any device: one call, where this torch has it."""


def cast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in the dtype of autocast on the first one's device; as they are where it is off there.

    float64 stays, as in PyTorch, and so does what is no tensor.
    """
    first = tensors[0]
    if not isinstance(first, torch.Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        tensor.to(dtype)
        if isinstance(tensor, torch.Tensor)
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        else tensor
        for tensor in tensors
    )
