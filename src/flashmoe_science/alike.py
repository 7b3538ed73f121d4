"""Whether tensors are like those of an earlier call, asked at every call: by PyTorch's own check, in C++.

PyTorch made it for its compiled code. It compares type, dispatch keys, dtype, device, sizes, strides and gradient in a
third of the time that a key of them takes in Python. It is not public: it is looked for when first needed, tried on
tensors that it must tell apart, and without it calls are right and slower. docs/kernels/launching.md has the times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Matches = Callable[..., bool]
"""Of an operation's tensors, in its order."""


def never(*tensors: torch.Tensor) -> bool:
    """Matches nothing."""
    return False


def no_call(*tensors: torch.Tensor) -> Any:
    """What is called where something `never` matched."""
    raise AssertionError("nothing matches before the first call")


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
    unrolled = {3: _of_three, 6: _of_six}.get(len(tensors), _without_nested)
    return unrolled(check)


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


def _of_six(check: Matches) -> Matches:
    """The same for a backward pass."""

    def like(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        gradient: torch.Tensor,
    ) -> bool:
        try:
            if (
                query.is_nested
                or key.is_nested
                or value.is_nested
                or output.is_nested
                or lse.is_nested
                or gradient.is_nested
            ):
                return False
        except AttributeError:  # no tensor
            return False
        return check(query, key, value, output, lse, gradient)

    return like


@functools.cache
def _tensor_guards() -> Any:
    """`TensorGuards` if it is there and tells tensors apart, else None."""
    guards_type = getattr(private_guards(), "TensorGuards", None)
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


def private_guards() -> Any:
    """Where PyTorch keeps what it made for its compiled code; None where it does not."""
    return getattr(getattr(torch._C, "_dynamo", None), "guards", None)
