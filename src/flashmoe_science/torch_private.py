"""What every call asks of PyTorch for which PyTorch has no public name, and what stands in where a version lacks it.

A stand-in says that somebody watches: a call then goes through PyTorch's dispatcher, or is refused, and is never wrong.
It is chosen once, at import: with the names there, a call costs nothing more. What is used of PyTorch in private
elsewhere is listed, with reasons, in ``tests/flashmoe_science/test_private_names.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad

is_recorded_by_jit: Callable[[], bool] = (
    getattr(torch._C, "_is_tracing", None) or torch.jit.is_tracing  # type: ignore[attr-defined]
)
"""Whether torch.jit.trace records."""

dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
"""How many modes see each operator."""

function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
"""How many modes see each function."""

function_mode: Callable[[int], object] = getattr(torch._C, "_get_function_stack_at", lambda index: None)
"""One of them."""

transform: Callable[[], object] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: True
)
"""The transform of torch.func that is being run; None for none."""

is_batched: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", lambda tensor: False
)
"""Whether this is several tensors under ``torch.autograd.grad(is_grads_batched=True)``, an older vmap that is no
transform of torch.func. Without the name, PyTorch's words about it stay."""

forward_levels: Any = (
    forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=0)
)
"""Its ``_current_level`` is below 0 where no tensor can have a tangent. An attribute: a frame would cost more than all
that is asked."""

flash_is_allowed: Callable[[], bool] = getattr(
    torch._C, "_get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled
)
"""Whether the user lets scaled_dot_product_attention choose FlashAttention."""

math_is_allowed: Callable[[], bool] = getattr(
    torch._C, "_get_math_sdp_enabled", torch.backends.cuda.math_sdp_enabled
)
"""Whether the user lets it choose PyTorch's operations, which take every call."""

cudnn_is_allowed: Callable[[], bool] = getattr(
    torch._C, "_get_cudnn_sdp_enabled", torch.backends.cuda.cudnn_sdp_enabled
)
"""Whether the user lets it choose cuDNN."""

efficient_is_allowed: Callable[[], bool] = getattr(
    torch._C, "_get_mem_efficient_sdp_enabled", torch.backends.cuda.mem_efficient_sdp_enabled
)
"""Whether the user lets it choose the memory-efficient kernels."""
