"""The steady state: recognising a call like the last one, allocating its results, launching.

Every line here runs in every call, so the two dearest steps use functions that PyTorch made for its own compiled
code: one C++ check of type, dtype, device, sizes, strides and gradient (a third of the time of building and hashing a
key of them in Python) and an allocation that bypasses the dispatcher (half the time of `empty_like`). Neither is
public. Both are looked for when first needed, the check is tried on tensors that it must tell apart, and without them
calls are right and slower. docs/kernels/launching.md has the times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.cuda.launch import Launch
from flashmoe_science.errors import InputError

Matches = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

# Missing from CPU builds of torch, where nothing gets as far as calling them.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def never(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Matches nothing."""
    return False


def matcher(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Matches:
    """Whether three tensors are three like these, and not one tensor given twice.

    Like: same Python type, dtype, device, sizes and strides, in the same inference and autocast mode, none
    requiring a gradient. Holds no reference to the tensors. `never` where this torch has no such check, or another one.
    """
    guards = _tensor_guards()
    # Tensors that require a gradient may only be used under no_grad(), which the check does not look at.
    if guards is None or query.requires_grad or key.requires_grad or value.requires_grad:
        return never
    check: Matches = guards(query, key, value, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@functools.cache
def _tensor_guards() -> Any:
    """`TensorGuards` if it is there and tells tensors apart, else None."""
    found = getattr(_private(), "TensorGuards", None)
    if found is None:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        like, *others = (torch.empty(2, 3, device="cpu") for _ in range(3))
        different = (
            torch.empty(2, 4, device="cpu"),
            torch.empty(3, 2, device="cpu").t(),
            torch.empty(2, 3, device="cpu", dtype=torch.float16),
            torch.empty(2, 3, device="meta"),
            torch.empty(2, 3, device="cpu", requires_grad=True),
            None,
        )
        try:
            check = found(like, *others, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            works = check(like, *others) is True and not any(
                check(*changed)
                for one in different
                for changed in ((one, *others), (like, one, others[1]), (like, others[0], one))
            )
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
    return found if works else None


def _private() -> Any:
    return getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def cuda_allocator() -> Allocate:
    """Uninitialised tensors on the current device, from (sizes, strides, dtype)."""
    found: Allocate | None = getattr(_private(), "_empty_strided_cuda", None)
    return found if found is not None else _allocate


def _allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")


def prepare(output: torch.Tensor, return_lse: bool, launch: Launch, device: int, allocate: Allocate) -> Call:
    """The call itself, for tensors that match those that `launch` was planned for.

    Args:
        output: sizes, strides and dtype of the result (batch, heads, seqlen_q, head_dim).
        device: current when the call is made.
    """
    sizes, strides, dtype = tuple(output.shape), tuple(output.stride()), output.dtype
    batch, heads, seqlen_q, _ = sizes
    lse_sizes, lse_strides = (batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1)
    stream_of, float32 = raw_stream, torch.float32

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query_address, key_address, value_address = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if (query_address | key_address | value_address) & 15:
            raise InputError(_misaligned(query, key, value))
        output = allocate(sizes, strides, dtype)
        if return_lse:
            lse = allocate(lse_sizes, lse_strides, float32)
            stream = stream_of(device)
            launch(query_address, key_address, value_address, output.data_ptr(), lse.data_ptr(), stream)
            return output, lse
        launch(query_address, key_address, value_address, output.data_ptr(), 0, stream_of(device))
        return output, None

    return call


def _misaligned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    tensors = {"query": query, "key": key, "value": value}
    name = next(name for name, tensor in tensors.items() if tensor.data_ptr() % 16)
    return f"{name} does not start at a multiple of 16 bytes (a view at an odd offset); pass {name}.clone()"
