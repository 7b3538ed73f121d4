"""PyTorch's libraries, made ready for what is captured.

A mask of many queries is read before it is taken, and under capture nobody can read it: PyTorch's own kernel is
recorded then. Its libraries (cuDNN, cuBLAS) make a handle at a thread's first call, which a capture does not survive.
Without the takeover the call before the capture is that first one.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from flashmoe_science.torch_private import (
    cudnn_is_allowed,
    dispatch_modes,
    efficient_is_allowed,
    math_is_allowed,
)

_ROWS, _HEAD_DIM = 16, 64
"""Of a call that every backend takes."""


class _Thread(threading.local):
    """Handles are a thread's own."""

    def __init__(self) -> None:
        self.ready: set[tuple[object, ...]] = set()


_thread = _Thread()


def make_ready(device: torch.device, dtype: torch.dtype) -> None:
    """PyTorch's own attention under a mask, on a few rows, at this thread's first call for a device and dtype.

    It is called again where others of PyTorch's kernels are allowed than before. Raises nothing: the call at hand does
    not need it.
    """
    # Where others than PyTorch's operations are asked for, there may be no kernel at all for a mask. A mode would take
    # this call for one of the model's: a counter would count it, selective checkpointing give its output to another.
    if not math_is_allowed() or dispatch_modes():
        return
    chosen = device, dtype, cudnn_is_allowed(), efficient_is_allowed()
    if chosen in _thread.ready or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    _thread.ready.add(chosen)
    # Memory that is full, or operations that are not deterministic where nothing else is allowed.
    with contextlib.suppress(RuntimeError):
        rows = torch.zeros(1, 1, _ROWS, _HEAD_DIM, dtype=dtype, device=device)
        mask = torch.ones(_ROWS, _ROWS, dtype=torch.bool, device=device)
        torch._C._nn.scaled_dot_product_attention(rows, rows, rows, mask)
