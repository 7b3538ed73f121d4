"""Whether a call may go past PyTorch's dispatcher, straight to the kernel: the fast path of eager code.

The kernels read memory behind PyTorch's back. What PyTorch keeps beside it (a negative bit, a tangent, the tensor that
a subclass or a transform wraps) they would miss, and a mode that counts, selects or records would see nothing. Such
calls go through the operators of `flashmoe_science.operators`. The test is part of every call, so it asks as little as
it can.
"""

from __future__ import annotations

import torch

from flashmoe_science.torch_private import dispatch_modes, forward_levels, is_recorded_by_jit, transform

_Tensor = torch.Tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def are_direct(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether these may be read where they lie, with nobody watching. False also for what is no tensor."""
    return (
        (
            type(query) is type(key) is type(value) is _Tensor
            or (type(query) in _PLAIN and type(key) in _PLAIN and type(value) in _PLAIN)
        )
        and forward_levels._current_level < 0
        and not (dispatch_modes() or is_recorded_by_jit() or query.is_neg() or key.is_neg() or value.is_neg())
        and transform() is None
    )


def all_direct(*tensors: torch.Tensor | None) -> bool:
    """The same for any number of tensors, some of which may be None."""
    if (
        forward_levels._current_level >= 0
        or dispatch_modes()
        or is_recorded_by_jit()
        or transform() is not None
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
    return transform() is None and not is_recorded_by_jit()
