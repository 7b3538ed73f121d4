"""The steady state: recognising a call like the last one, allocating its results, launching.

Every line here runs in every call, so the two most expensive steps use functions that PyTorch made for its own
compiled code. One is a C++ check of type, dtype, device, sizes, strides and gradient, which takes a third of the time
of building and hashing a key of them in Python. The other is an allocation that bypasses the dispatcher, in half the
time of `empty_like`. Neither is public. Both are looked for when first needed, the check is tried on tensors that it
must tell apart, and without them calls are right and slower. docs/kernels/launching.md has the times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cuda.launch import LaunchPlan
from flashmoe_science.errors import InputError

Matches = Callable[..., bool]
"""Of an operation's tensors, in its order."""
Call = Callable[..., tuple[Any, ...]]
"""An operation's results from its tensors: tensors, or None for one that is not asked for."""
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

# Missing from CPU builds of torch, where nothing gets as far as calling them.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def never(*tensors: torch.Tensor) -> bool:
    """Matches nothing."""
    return False


def matcher(*tensors: torch.Tensor, under_no_grad: bool = False) -> Matches:
    """Whether tensors are like these, and not one tensor given twice.

    Like: same Python type, dtype, device, sizes and strides, in the same inference and autocast mode, none
    requiring a gradient. Holds no reference to the tensors. `never` where this torch has no such check, or another one.

    Args:
        under_no_grad: it is only asked where nothing is recorded, so those may require a gradient that did.
    """
    check = dense_matcher(*tensors, under_no_grad=under_no_grad)
    if check is never:
        return never
    return _of_three(check) if len(tensors) == 3 else _without_nested(check)


def dense_matcher(*tensors: torch.Tensor, under_no_grad: bool = False) -> Matches:
    """`matcher` for tensors of which whoever asks knows that none `is_nested`.

    PyTorch's check asks for strides first, and where a nested tensor has none that ends the process.
    """
    guards = _tensor_guards()
    # Tensors that require a gradient may only be used under no_grad(), which the check does not look at.
    if guards is None or (not under_no_grad and any(tensor.requires_grad for tensor in tensors)):
        return never
    check: Matches = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    kind = tensors[0].device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        # The check sees that autocast is on, not what it casts to.
        dtype, dtype_of = torch.get_autocast_dtype(kind), torch.get_autocast_dtype
        return lambda *tensors: check(*tensors) and dtype_of(kind) is dtype
    return check


def _without_nested(check: Matches) -> Matches:
    def like(*tensors: torch.Tensor) -> bool:
        try:
            for tensor in tensors:
                if tensor.is_nested:
                    return False
        except AttributeError:  # no tensor
            return False
        return check(*tensors)

    return like


def _of_three(check: Matches) -> Matches:
    """The same without a loop, and without tuples of arguments."""

    def like(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        try:
            if query.is_nested or key.is_nested or value.is_nested:
                return False
        except AttributeError:  # no tensor
            return False
        return check(query, key, value)

    return like


@functools.cache
def _tensor_guards() -> Any:
    """`TensorGuards` if it is there and tells tensors apart, else None."""
    guards_type = getattr(_private(), "TensorGuards", None)
    if guards_type is None:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        like, *others = (torch.empty(2, 3, dtype=torch.float32, device="cpu") for _ in range(3))
        different = (
            torch.empty(2, 4, dtype=torch.float32, device="cpu"),
            torch.empty(3, 2, dtype=torch.float32, device="cpu").t(),
            torch.empty(2, 3, device="cpu", dtype=torch.float16),
            torch.empty(2, 3, dtype=torch.float32, device="meta"),
            torch.empty(2, 3, dtype=torch.float32, device="cpu", requires_grad=True),
            None,
        )
        try:
            check = guards_type(like, *others, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            works = check(like, *others) is True and not any(
                check(*changed)
                for one in different
                for changed in ((one, *others), (like, one, others[1]), (like, others[0], one))
            )
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
    return guards_type if works else None


def _private() -> Any:
    return getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def cuda_allocator() -> Allocate:
    """Uninitialised tensors on the current device, from (sizes, strides, dtype)."""
    allocate: Allocate | None = getattr(_private(), "_empty_strided_cuda", None)
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
