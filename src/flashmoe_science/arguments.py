"""What every backend asks of the arguments of attention. Checked once for each combination of shapes."""

from __future__ import annotations

import math
import numbers

import numpy as np
import torch

from flashmoe_science.errors import InputError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8


def check_dense(**tensors: object) -> None:
    """Raise InputError, with what to do, unless these are dense tensors of one device."""
    device: torch.device | None = None
    first = ""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
        if tensor.is_nested:
            raise InputError(f"{name} is a nested tensor; expected a dense one: concatenate its parts")
        if tensor.layout is not torch.strided:
            raise InputError(f"{name} has layout {tensor.layout}; expected a dense tensor: call .to_dense()")
        if tensor.is_complex():
            raise InputError(f"{name} has dtype {tensor.dtype}; expected real numbers: use .real")
        if not first:
            first, device = name, tensor.device
        if tensor.device != device:
            raise InputError(f"{name} is on {tensor.device} but {first} is on {device}; move it with .to()")


def check_arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float | None
) -> None:
    """Raise InputError, with what to do, unless the arguments make sense together.

    Expected: query (batch, heads, seqlen_q, head_dim), key and value (batch, kv_heads, seqlen_k, head_dim),
    one dtype and device, heads a multiple of kv_heads, last dimension contiguous.
    """
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
        if tensor.is_nested:  # asking it for its shape raises
            raise InputError(f"{name} is a nested tensor; expected a dense one: pad its parts to one length")
        if tensor.dim() != 4:
            raise InputError(
                f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; "
                "expected 4, (batch, heads, seq, head_dim): add the missing ones with unsqueeze"
            )
        if tensor.layout is not torch.strided:
            raise InputError(f"{name} has layout {tensor.layout}; expected a dense tensor: call .to_dense()")
        if tensor.dtype not in DTYPES:
            raise InputError(
                f"{name} has dtype {tensor.dtype}; expected float32, bfloat16 or float16: use .to()"
            )
        if tensor.dtype != query.dtype:
            raise InputError(
                f"{name} is {tensor.dtype} but query is {query.dtype}; expected one dtype: convert with .to()"
            )
        if tensor.device != query.device:
            raise InputError(
                f"{name} is on {tensor.device} but query is on {query.device}; "
                "expected one device: move it with .to()"
            )
    batch, heads, _, head_dim = query.shape
    if key.shape != value.shape:
        raise InputError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in shape; "
            "expected the same (batch, kv_heads, seqlen_k, head_dim)"
        )
    if key.shape[0] != batch:
        raise InputError(f"query has batch {batch} but key has {key.shape[0]}; expected the same")
    if key.shape[3] != head_dim:
        raise InputError(f"query has head_dim {head_dim} but key has {key.shape[3]}; expected the same")
    kv_heads = key.shape[1]
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise InputError(
            f"{heads} query heads cannot share {kv_heads} key/value heads; "
            "expected the first to be a multiple of the second"
        )
    if not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
        raise InputError(
            f"head_dim is {head_dim}; expected a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}: "
            + (
                "call PyTorch's scaled_dot_product_attention"
                if head_dim > MAX_HEAD_DIM
                else "pad query, key and value with zeros, and give softmax_scale"
            )
        )
    for name, tensor in named.items():
        if tensor.numel() and tensor.stride(3) != 1:
            raise InputError(
                f"the last dimension of {name} is not contiguous (stride {tensor.stride(3)}); "
                "call .contiguous() on it"
            )
    if softmax_scale is not None and not is_finite(softmax_scale):
        raise InputError(
            f"softmax_scale is {shown(softmax_scale)}; expected a finite number or None for 1/sqrt(head_dim)"
        )
    if softmax_scale is not None and not _fits_float32(float(softmax_scale)):
        raise InputError(
            f"softmax_scale is {softmax_scale!r}, which float32 does not hold; expected 0 or a magnitude between "
            "1e-38 and 2e38: scale query or key instead"
        )


def check_causal(causal: object) -> bool:
    """`causal` as a Python bool; InputError unless it is a bool already, Python's or NumPy's."""
    return check_flag("causal", causal)


def check_flag(name: str, flag: object) -> bool:
    """A flag as a Python bool; InputError unless it is a bool already, Python's or NumPy's."""
    if isinstance(flag, (bool, np.bool_)):
        return bool(flag)
    raise InputError(f"{name} is {shown(flag)}; expected True or False")


def shown(value: object) -> str:
    """A value in a message of one line: its beginning, or what it is."""
    text = "" if isinstance(value, (torch.Tensor, np.ndarray)) else repr(value)
    if not text or "\n" in text:
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def reject_gradients(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise InputError if autograd would record this call, which only `flash_attention` lets it do."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise InputError(
            "an argument requires a gradient, and a backend's forward is not recorded; call "
            "flashmoe_science.flash_attention, or this under torch.no_grad()"
        )


def reject_without_memory(**named: torch.Tensor) -> None:
    """Raise InputError if a tensor that is not empty has no memory, as in torch's FakeTensorMode."""
    for name, tensor in named.items():
        if tensor.numel() and not tensor.data_ptr():
            raise InputError(
                f"{name} has no memory (a {type(tensor).__name__}); "
                "kernels cannot be traced: call on real tensors, outside FakeTensorMode"
            )


def _fits_float32(scale: float) -> bool:
    """Whether the kernels' scale, which takes scores to powers of two, is zero or a normal float32."""
    float32 = torch.finfo(torch.float32)
    return scale == 0 or float32.tiny <= abs(scale) * math.log2(math.e) <= float32.max


def is_finite(number: object) -> bool:
    """Whether it is a real number that float holds."""
    try:
        return isinstance(number, numbers.Real) and math.isfinite(float(number))
    except OverflowError:
        return False
