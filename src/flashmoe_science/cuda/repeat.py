"""The steady state: a call like the last one, recognised by `flashmoe_science.alike`, allocates and launches.

Every line here runs in every call, so the two most expensive steps use functions that PyTorch made for its own
compiled code. One is the C++ check of `flashmoe_science.alike`. The other is an allocation that bypasses the
dispatcher, in half the time of `empty_like`, where this torch has it. docs/kernels/launching.md has the times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashmoe_science.alike import private_guards
from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cuda.launch import LaunchPlan
from flashmoe_science.errors import InputError

Call = Callable[..., tuple[Any, ...]]
"""An operation's results from its tensors: tensors, or None for one that is not asked for."""
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

# Missing from CPU builds of torch, where nothing gets as far as calling them.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def cuda_allocator() -> Allocate:
    """Uninitialised tensors on the current device, from (sizes, strides, dtype)."""
    allocate: Allocate | None = getattr(private_guards(), "_empty_strided_cuda", None)
    return allocate if allocate is not None else _allocate


def _allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")


class Layout(NamedTuple):
    """Of a result."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def layout_of(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def prepare(
    inputs: Mapping[str, int],
    results: Sequence[Layout | None],
    plan: LaunchPlan,
    device: int,
    allocate: Allocate,
) -> Call:
    """The call itself, for tensors that match those that ``plan`` was made for.

    Args:
        inputs: name of each tensor, and the bytes at a multiple of which it has to start.
        results: what is allocated; None for one that is not asked for, of which the launch gets address 0.
        device: current when the call is made.
    """
    launch, stream_of, alignments = plan.launch, raw_stream, tuple(inputs.values())
    workspace_sizes = (plan.workspace_bytes,) if plan.workspace_bytes else None

    def call(*tensors: torch.Tensor) -> tuple[Any, ...]:
        addresses = [tensor.data_ptr() for tensor in tensors]
        if 0 in addresses:
            # A fake tensor looks like the real one that this was planned for.
            reject_without_memory(**dict(zip(inputs, tensors, strict=True)))
        for address, alignment in zip(addresses, alignments, strict=True):
            if address % alignment:
                raise InputError(misaligned(inputs, tensors))
        outputs = tuple(None if result is None else allocate(*result) for result in results)
        addresses += [0 if output is None else output.data_ptr() for output in outputs]
        if workspace_sizes is not None:
            # Freed when this returns: what the allocator puts there next on this stream comes after the launches.
            workspace = allocate(workspace_sizes, (1,), torch.uint8)
            addresses.append(workspace.data_ptr())
        launch(*addresses, stream_of(device))
        return outputs

    return call


def misaligned(inputs: Mapping[str, int], tensors: Sequence[torch.Tensor]) -> str:
    """What to do about the first tensor that does not start where it has to."""
    name, alignment = next(
        (name, alignment)
        for (name, alignment), tensor in zip(inputs.items(), tensors, strict=True)
        if tensor.data_ptr() % alignment
    )
    return f"{name} does not start at a multiple of {alignment} bytes (a view at an odd offset); pass {name}.clone()"
