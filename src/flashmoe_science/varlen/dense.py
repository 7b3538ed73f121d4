"""`flash_attention` with a window, a cap or sinks: dense tensors, by the kernels of `attention_varlen`."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science import autocast
from flashmoe_science.arguments import (
    check_arguments,
    check_causal,
    check_dense,
    check_flag,
    reject_without_memory,
)
from flashmoe_science.cuda.varlen import dense as cuda
from flashmoe_science.direct import all_direct, has_own_layout
from flashmoe_science.errors import DeviceError, InputError
from flashmoe_science.gradients import SECOND_DERIVATIVES, Needs
from flashmoe_science.operators.recording import is_recorded, reject_tangents
from flashmoe_science.varlen.arguments import check_per_head
from flashmoe_science.varlen.attention import attention_varlen
from flashmoe_science.varlen.dense_gradients import Gradients, Options, Recorded, gradients
from flashmoe_science.varlen.options import check_softcap, check_window

EVERYTHING = (-1, -1)
"""The window that hides nothing."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
    softmax_scale: float | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Arguments, results and errors of `flashmoe_science.flash_attention`, which says what they mean.

    Differentiable once, and no operator of torch.compile: tracing it raises InputError.
    """
    if is_dynamo_compiling():
        raise InputError(
            "flash_attention with a window, softcap or sinks cannot be compiled yet; call it under "
            "torch.compiler.disable"
        )
    query, key, value = autocast.cast(query, key, value)
    check_arguments(query, key, value, softmax_scale)
    left, right = check_window(window)
    if check_causal(causal):
        right = 0
    softcap, return_lse = check_softcap(softcap), check_flag("return_lse", return_lse)
    if sinks is not None:
        _check_sinks(sinks, query)
    if not all_direct(query, key, value, sinks):
        if not has_own_layout():
            raise InputError(
                "flash_attention with a window, softcap or sinks takes no part in torch.func.vmap or torch.jit.trace "
                "yet; call attention_varlen, or this outside of them"
            )
        reject_tangents("flash_attention with a window, softcap or sinks", query, key, value, sinks)
        # The kernels read memory as it lies, which a lazy negation is not part of.
        query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()
        sinks = None if sinks is None else sinks.resolve_neg()
    reject_without_memory(query=query, key=key, value=value)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    options = Options((left, right), softcap, scale)
    output: torch.Tensor
    lse: torch.Tensor | None
    if is_recorded(query, key, value, sinks):
        output, lse = _Attention.apply(query, key, value, sinks, options)  # type: ignore[no-untyped-call]
    else:
        output, lse = _forward(query, key, value, sinks, options, return_lse)
    if not return_lse:
        return output
    assert lse is not None
    return output, lse


class _Attention(torch.autograd.Function):
    """Recorded by autograd: its inputs, output and log-sum-exp are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, lse = _forward(query, key, value, sinks, options, True)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_output is None and grad_lse is None:
            return (None,) * 5
        call = Recorded(*ctx.saved_tensors)
        if grad_output is None:
            grad_output = call.output.new_zeros(()).expand(call.output.shape)
        *of_tensors, of_sinks, _ = ctx.needs_input_grad
        arguments = grad_output, grad_lse, *call, ctx.options, Needs(*of_tensors), of_sinks
        if torch.is_grad_enabled():  # create_graph=True
            results: Gradients = _Gradients.apply(*arguments)  # type: ignore[no-untyped-call]
        else:
            results = _Gradients.forward(*arguments)
        return *results, None


class _Gradients(torch.autograd.Function):
    """The backward pass. Who differentiates it is told that this cannot be had."""

    @staticmethod
    def forward(grad_output: torch.Tensor, grad_lse: torch.Tensor | None, *others: Any) -> Gradients:
        *kept, options, needs, of_sinks = others
        return gradients(grad_output, grad_lse, Recorded(*kept), options, needs, of_sinks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *of_gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise InputError(SECOND_DERIVATIVES)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    options: Options,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    window, softcap, scale = options
    if scale <= 0:
        # The kernels' scale is positive; 0 keeps what infinite products make, NaN.
        query, scale = (-query, -scale) if scale else (query * 0, 1.0)
    if query.is_cuda:
        return cuda.forward(
            query,
            key,
            value,
            sinks,
            window=window,
            softcap=softcap,
            softmax_scale=scale,
            return_lse=return_lse,
        )
    if query.is_cpu:
        return _on_cpu(query, key, value, window, softcap, sinks, scale)
    raise DeviceError(
        f"there is no kernel for {query.device}; expected tensors on cpu or cuda: move them with .to()"
    )


def _check_sinks(sinks: object, query: torch.Tensor) -> None:
    check_dense(sinks=sinks)
    assert isinstance(sinks, torch.Tensor)
    if sinks.device != query.device:
        raise InputError(
            f"sinks is on {sinks.device} but query is on {query.device}; expected one device: move it with .to()"
        )
    check_per_head("sinks", sinks, query.shape[1], sequences=False)


def _on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch's keys are pages, one for each sequence; its query rows are packed by a copy where they are not."""
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    output = torch.zeros_like(query)
    if batch == 0 or seqlen_k == 0:
        return output, query.new_full((batch, heads, seqlen_q), -torch.inf, dtype=torch.float32)
    result = attention_varlen(
        query.transpose(1, 2).reshape(batch * seqlen_q, heads, head_dim),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cu_seqlens_q=torch.arange(0, (batch + 1) * seqlen_q, seqlen_q, dtype=torch.int32, device=query.device)
        if seqlen_q
        else torch.zeros(batch + 1, dtype=torch.int32, device=query.device),
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        block_table=torch.arange(batch, dtype=torch.int32, device=query.device)[:, None],
        seqused_k=torch.full((batch,), seqlen_k, dtype=torch.int32, device=query.device),
        causal=False,
        window=window,
        softcap=softcap,
        sinks=sinks,
        softmax_scale=softmax_scale,
        return_lse=True,
    )
    packed, lse = result
    output.copy_(packed.view(batch, seqlen_q, heads, head_dim).transpose(1, 2))
    return output, lse.view(batch, seqlen_q, heads).transpose(1, 2).contiguous()
