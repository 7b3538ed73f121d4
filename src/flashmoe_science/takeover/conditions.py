"""Which calls of attention the kernels take; for each other one the reason, as few words that name no sizes."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science.arguments import HEAD_DIM_STEP, MAX_HEAD_DIM
from flashmoe_science.torch_private import (
    forward_levels,
    function_mode,
    function_modes,
    is_recorded_by_jit,
    transform,
)

_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
_MIN_SCALE, _MAX_SCALE = 1e-37, 1e38
"""Within what `arguments.check_arguments` accepts, by a comparison that torch.compile traces."""


def why_not(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, *, grouped: bool
) -> str | None:
    """Why the kernels do not take attention over these tensors; None if they do.

    Args:
        query, key, value: anything that was passed; (batch, heads, seqlen, head_dim) where they are taken.
        scale: of the scores; None for 1 / sqrt(head_dim).
        grouped: several query heads may share a key head.
    """
    reason = why_not_plain(query, key, value)
    if reason is not None:
        return reason
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "not 4 dimensions"
    dtypes = _DTYPES.get(query.device.type)
    if dtypes is None:
        return f"device {query.device.type}"
    if key.device != query.device or value.device != query.device:
        return "more than one device"
    if query.dtype not in dtypes:
        return f"{_name(query.dtype)} on {query.device.type}"
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return "more than one dtype"
    return _why_not_shapes(query, key, value, grouped) or _why_not_scale(scale)


def why_not_plain(query: object, key: object, value: object) -> str | None:
    """Why these are not to be read as dense tensors, or the call is somebody else's to see; None if they are.

    Dispatch modes (selective checkpointing, FLOP counters) are no reason: they see the operator.
    """
    if is_dynamo_compiling():
        for each in (query, key, value):
            if not isinstance(each, torch.Tensor):
                return "not a tensor"
        return None
    if not (
        isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    ):
        return "not a tensor"
    if function_modes() and not _only_default_device():
        return "a torch function mode"
    if is_recorded_by_jit():
        return "torch.jit.trace"
    if transform() is not None:
        return "a transform of torch.func"
    if forward_levels._current_level >= 0:
        return "forward-mode differentiation"
    for tensor in (query, key, value):
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return "tensor subclass"
        if tensor.is_nested:
            return "nested tensor"
        if tensor.layout is not torch.strided:
            return "sparse tensor"
        if tensor.is_neg() or tensor.is_conj():
            return "negative bit"
    return None


def _only_default_device() -> bool:
    """Whether all modes are those of torch.set_default_device, which is nothing to attention."""
    from torch.utils._device import DeviceContext

    modes = (function_mode(index) for index in range(function_modes()))
    return all(type(mode) is DeviceContext for mode in modes)


def _why_not_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> str | None:
    batch, heads, seqlen_q, head_dim = query.shape
    _, kv_heads, seqlen_k, _ = key.shape
    if value.shape[3] != head_dim:
        return "head_dim of value differs"
    if key.shape[3] != head_dim:
        return "head_dim of key differs"
    if batch == 0 or heads == 0 or kv_heads == 0 or seqlen_q == 0 or seqlen_k == 0:
        return "an empty tensor"
    if key.shape[0] != batch or value.shape[0] != batch or value.shape[1] != kv_heads:
        return "shapes that broadcast"
    if value.shape[2] != seqlen_k:
        return "lengths of key and value differ"
    if heads != kv_heads and (not grouped or heads % kv_heads != 0):
        return "numbers of heads"
    if not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP != 0:
        return f"head_dim no multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
    for tensor in (query, key, value):
        if tensor.stride(3) != 1:
            return "rows not contiguous"
        if tensor.is_cuda and any(
            size > 1 and stride % 8 != 0
            for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        ):
            return "rows not aligned to 16 bytes"
    return None


def _why_not_scale(scale: object) -> str | None:
    if scale is None:
        return None
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        return "scale is no number"
    # PyTorch's CPU kernel gives NaN to a causal call whose scale is 0 or negative. It is asked for what it gives.
    return None if _MIN_SCALE <= scale <= _MAX_SCALE else "scale out of range"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
