"""How the operators take part in autograd.

An operator's kernel for the dispatcher's key Autograd runs once for each level of torch.func's transforms, with that
level's tensors, as PyTorch's own do. `torch.autograd.Function.apply` refuses to run there; the part of it that records
one level does not (`torch._functorch` uses it in the same way).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from flashmoe_science.errors import InputError
from flashmoe_science.operators.sharding import register_where_used
from flashmoe_science.torch_private import forward_levels, transform


def is_recorded(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records a call with these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def record(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``, at the level of transforms that is being run."""
    if transform() is None:
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    from torch._functorch.utils import (
        enable_single_level_autograd_function,  # a call without a transform needs none
    )

    with enable_single_level_autograd_function():
        # `Function.apply` itself is what refuses.
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def below_autograd(operator: Callable[..., Any], *arguments: Any) -> Any:
    """The operator's results without autograd's key: what its kernel for that key ends in."""
    register_where_used()
    with torch._C._AutoDispatchBelowAutograd():
        if transform() is None:
            return operator(*arguments)
        # A Function's forward runs with gradients switched off, but the levels below record on their own account.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return operator(*arguments)


def reject_tangents(operation: str, *tensors: torch.Tensor | None) -> None:
    """Raise InputError if a tensor has a tangent: no operator here has a forward-mode derivative."""
    if forward_levels._current_level < 0:
        return
    unpack: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual
    for tensor in tensors:
        if tensor is not None and unpack(tensor).tangent is not None:
            raise InputError(
                f"{operation} has no forward-mode derivative; detach() the tensors, or use PyTorch's own operation"
            )
