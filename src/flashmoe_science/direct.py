"""Whether a tensor's memory may be read directly: whether it holds the numbers that PyTorch would compute with.

The kernels read memory behind PyTorch's back. What PyTorch keeps beside it (a negative bit, a tangent, the tensor that
a subclass or a transform wraps) they would miss, and a recorder would record nothing. Each such call is refused. The
test is part of every call, so it asks as little as it can.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from flashmoe_science.errors import InputError

_Tensor = torch.Tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_recorded_by_jit = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def are_direct(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether these may be read; where not, `reject_intercepted` says whether and why."""
    return (
        type(query) is type(key) is type(value) is _Tensor
        and forward_ad._current_level < 0
        and not _dispatch_modes()
        and not _is_recorded_by_jit()
        and _transform() is None
        and not (query.is_neg() or key.is_neg() or value.is_neg())
    )


def check_direct(tensors: tuple[torch.Tensor | None, ...], names: tuple[str, ...]) -> None:
    """The same for any number of tensors, some of which may be None; raises what `reject_intercepted` does."""
    if (
        forward_ad._current_level < 0
        and not _dispatch_modes()
        and not _is_recorded_by_jit()
        and _transform() is None
    ):
        for tensor in tensors:
            if tensor is not None and (type(tensor) is not _Tensor or tensor.is_neg()):
                break
        else:
            return
    reject_intercepted(**dict(zip(names, tensors, strict=True)))


def reject_intercepted(**named: torch.Tensor | None) -> None:
    """Raise InputError if a tensor's memory does not hold its numbers, or the call is being recorded.

    What is no tensor is left to the checks of arguments.
    """
    if _is_recorded_by_jit():
        raise InputError(
            "torch.jit.trace cannot record this kernel; call it on real tensors, outside of the trace"
        )
    if _dispatch_modes() and _is_recorded_by_mode():
        raise InputError(
            "make_fx and torch.export cannot record this kernel; call it on real tensors, outside of what is recorded"
        )
    for name, tensor in named.items():
        # A fake tensor has an error of its own, where it is asked for its memory; an empty one needs none.
        if not isinstance(tensor, torch.Tensor) or _is_fake(tensor):
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
            raise InputError(
                f"{name} is inside a transform of torch.func (vmap, grad, jvp, functionalize), which does not reach "
                "this kernel; call it outside of the transform, with the batch as a dimension"
            )
        if type(tensor) not in _PLAIN and _has_dispatch(tensor):
            raise InputError(
                f"{name} is a {type(tensor).__name__}, whose memory need not hold its numbers; "
                "pass the plain tensor that it stands for"
            )
        if tensor.is_nested or tensor.layout is not torch.strided:
            continue
        if tensor.is_neg() or tensor.is_conj():
            raise InputError(
                f"{name} has its negative or conjugate bit set, so its memory holds other numbers; "
                "pass .resolve_neg().resolve_conj()"
            )
        if tensor._is_zerotensor():
            raise InputError(f"{name} is a zero tensor without memory; pass .clone()")
        if forward_ad._current_level >= 0 and _tangent(tensor) is not None:
            raise InputError(
                f"{name} has a forward-mode tangent, and this kernel has no forward-mode derivative; "
                "detach() it, or use PyTorch's own operation"
            )


def _is_recorded_by_mode() -> bool:
    """Whether a mode that records operators is on. Those that count or log them see less, but change nothing."""
    key = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(each) is not None for each in (key.PROXY, key.FUNCTIONAL))


def _tangent(tensor: torch.Tensor) -> torch.Tensor | None:
    unpack: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] = forward_ad.unpack_dual
    return unpack(tensor)[1]


def _has_dispatch(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)
