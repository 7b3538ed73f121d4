"""Exact attention on whichever device the tensors are."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science import autocast
from flashmoe_science.arguments import check_arguments, check_causal, check_flag
from flashmoe_science.autograd import differentiable_attention, record
from flashmoe_science.cpu import attention as cpu
from flashmoe_science.cuda import attention as cuda
from flashmoe_science.cuda.attention.forward import calls, repeated
from flashmoe_science.direct import are_direct, has_own_layout
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.gradients import Backend
from flashmoe_science.operators.attention import FORWARD
from flashmoe_science.operators.sharding import register_where_used
from flashmoe_science.torch_private import dispatch_modes, forward_levels
from flashmoe_science.varlen.dense import EVERYTHING
from flashmoe_science.varlen.dense import attend as attend_with_options

_Tensor = torch.Tensor
_autocast_is_on = autocast.is_on
_records = torch.is_grad_enabled


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    window: tuple[int, int] = EVERYTHING,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * query @ key^T) @ value, by tiles with an online softmax.

    Differentiable once by query, key, value and sinks, the log-sum-exp as well, on every device; it
    keeps query, key, value, output and log-sum-exp for that. Gradients have the same bits in every call.

    Args:
        query: (batch, heads, seqlen_q, head_dim); float32, bfloat16 or float16; any strides whose last is 1.
        key, value: (batch, kv_heads, seqlen_k, head_dim), of the same dtype and device. Query head h uses
            key/value head h // (heads // kv_heads).
        causal: query row i sees keys 0 to i + seqlen_k - seqlen_q (aligned bottom-right).
        softmax_scale: 1 / sqrt(head_dim) if None.
        return_lse: also return the log-sum-exp of the scaled scores.
        window: (left, right), how many keys a row sees before and after its position i + seqlen_k - seqlen_q beside
            that one; -1: all. Where causal is true, right is 0.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        sinks: (heads,) float32: for each head, a logit that takes part in the sum of the softmax and has no value.
            It is not in the log-sum-exp. On the CPU, gradients with a window or a cap are composed of PyTorch's
            operations, without a kernel of their own.

    Returns:
        The output, like query in shape, dtype and order of strides; with `return_lse` also the natural
        log-sum-exp, float32, (batch, heads, seqlen_q). A row that sees no key gives zeros and minus infinity.

    A key, value or row that is not finite and that a row does not see has no effect on that row's output. On Hopper
    GPUs it may still make gradients NaN where both lie in one tile at the diagonal: zero such padding, or set
    FLASHMOE_CUDA_BACKWARD=portable.

    Raises:
        InputError: arguments that do not fit together or that have no memory; a second derivative, one in forward mode.
        DeviceError: no kernel for this device, or nothing on the machine to compile one with.
        BuildError: the kernel did not compile.

    Reference: Dao et al., FlashAttention (2022), arXiv:2205.14135; Milakov and Gimelshein, Online normalizer
    calculation for softmax (2018), arXiv:1805.02867.

    Eager calls on plain tensors go straight to the kernel. Under torch.compile, torch.export, dispatch modes and
    transforms of torch.func, and for tensor subclasses, it is the operator
    ``torch.ops.flashmoe_science.flash_attention_forward``, and with a window, a cap or sinks
    ``torch.ops.flashmoe_science.flash_attention_with_options``. Under torch.autocast query, key and value are cast to
    its dtype.
    """
    try:
        plain = sinks is None and softcap == 0 and window == EVERYTHING
    except (ValueError, RuntimeError):
        plain = False  # an option that is no number: the checks say so
    if not plain:
        return attend_with_options(
            query,
            key,
            value,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            softmax_scale=softmax_scale,
            return_lse=return_lse,
        )
    if is_dynamo_compiling():
        return _dispatched(query, key, value, causal, softmax_scale, return_lse)
    if isinstance(query, _Tensor):
        backend: Backend | None
        if query.is_cuda:
            # The steady state: here, as the frame of `cuda.attention.forward` is a tenth of a microsecond of four. What
            # matches has the same type and dispatch keys, autocast's among them, and is direct but for a tangent and
            # for a mode that records: make_fx on real tensors leaves their keys alone.
            _, recent_causal, recent_scale, recent_lse, _, matches, call = calls.recent
            if (
                causal is recent_causal
                and return_lse is recent_lse
                and (
                    softmax_scale is recent_scale
                    # One that is computed anew for each call is another object of the same value.
                    or (type(softmax_scale) is float and softmax_scale == recent_scale)
                )
                and forward_levels._current_level < 0
                and not dispatch_modes()
                and matches(query, key, value)
            ):
                output, lse = call(query, key, value)
                return output if lse is None else (output, lse)
            if (
                _records()
                and (return_lse is False or return_lse is True)
                and forward_levels._current_level < 0
                and not dispatch_modes()
                and (again := repeated(query, key, value, causal, softmax_scale)) is not None
            ):
                recorded: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
                recorded = record(query, key, value, (again, cuda, causal, softmax_scale, return_lse))
                return recorded
            backend = cuda
        else:
            if forward_levels._current_level < 0 and not dispatch_modes():
                results: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
                results = cpu.repeated(query, key, value, causal, softmax_scale, return_lse)
                if results is not None:
                    return results
            backend = cpu if query.is_cpu else None
        if _autocast_is_on():
            query, key, value = autocast.cast(query, key, value)
        if not are_direct(query, key, value):
            if has_own_layout():
                check_arguments(query, key, value, softmax_scale)
            register_where_used()
            return _dispatched(query, key, value, check_causal(causal), softmax_scale, return_lse)
        # The backends check shapes and types once for each combination.
        if backend is not None:
            try:
                if (
                    (query.requires_grad or key.requires_grad or value.requires_grad)
                    and torch.is_grad_enabled()
                    and backend.backward is not None
                ):
                    output, lse = differentiable_attention(
                        backend,
                        query,
                        key,
                        value,
                        causal=check_causal(causal),
                        softmax_scale=softmax_scale,
                        return_lse=check_flag("return_lse", return_lse),
                        **({"recorded": True} if backend is cpu else {}),
                    )
                    return output if lse is None else (output, lse)
                more = {"repeatable": True} if backend is cpu else {}
                output, lse = backend.forward(
                    query,
                    key,
                    value,
                    causal=causal,
                    softmax_scale=softmax_scale,
                    return_lse=return_lse,
                    **more,
                )
            except (DeviceError, BuildError):
                raise
            except RuntimeError:
                # PyTorch's words about a layout without an operation: ours are clearer.
                check_arguments(query, key, value, softmax_scale)
                check_flag("return_lse", return_lse)
                raise
            return output if lse is None else (output, lse)
    check_arguments(query, key, value, softmax_scale)
    check_causal(causal)
    raise DeviceError(
        f"there is no kernel for {query.device}; expected tensors on cpu or cuda: move them with .to()"
    )


def _dispatched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """By way of the dispatcher. torch.compile traces this, so what is checked is checked by the operator."""
    if is_dynamo_compiling():
        query, key, value = autocast.cast(query, key, value)
    output, lse = FORWARD(query, key, value, causal, softmax_scale)
    return (output, lse) if return_lse else output
