"""Whether a call may go past PyTorch's dispatcher, straight to the kernel: the fast path of eager code.

The kernels read memory behind PyTorch's back. What PyTorch keeps beside it (a negative bit, a tangent, the tensor that
a subclass or a transform wraps) they would miss, and a mode that counts, selects or records would see nothing. Such
calls go through the operators of `flashmoe_science.operators`. The test is part of every call, so it asks as little as
it can.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

_Tensor = torch.Tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_recorded_by_jit = torch._C._is_tracing
dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def are_direct(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether these may be read where they lie, with nobody watching. False also for what is no tensor."""
    return (
        (
            type(query) is type(key) is type(value) is _Tensor
            or (type(query) in _PLAIN and type(key) in _PLAIN and type(value) in _PLAIN)
        )
        and forward_ad._current_level < 0
        and not (
            dispatch_modes() or _is_recorded_by_jit() or query.is_neg() or key.is_neg() or value.is_neg()
        )
        and _transform() is None
    )


def all_direct(*tensors: torch.Tensor | None) -> bool:
    """The same for any number of tensors, some of which may be None."""
    if (
        forward_ad._current_level >= 0
        or dispatch_modes()
        or _is_recorded_by_jit()
        or _transform() is not None
    ):
        return False
    for tensor in tensors:  # a generator takes longer than what it asks
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg()):
            break
    else:
        return True
    return False


def has_own_layout() -> bool:
    """Whether tensors of a call that is not direct lie in memory as they say. Under vmap they are slices of what does,
    and while torch.jit.trace records, their sizes are tensors.
    """
    return _transform() is None and not _is_recorded_by_jit()
