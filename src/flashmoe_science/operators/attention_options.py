"""``torch.ops.flashmoe_science.flash_attention_with_options`` and its backward pass: a window, a cap, sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashmoe_science.arguments import check_arguments
from flashmoe_science.errors import InputError
from flashmoe_science.gradients import SECOND_DERIVATIVES_OF_OPTIONS, Needs, with_contiguous_rows
from flashmoe_science.operators import attention_rules, folding
from flashmoe_science.operators.attention import check_fits, result_like
from flashmoe_science.operators.library import define
from flashmoe_science.operators.recording import below_autograd, is_recorded, record, reject_tangents
from flashmoe_science.varlen.dense_forward import check_sinks, forward
from flashmoe_science.varlen.dense_gradients import Options, Recorded, gradients
from flashmoe_science.varlen.options import check_softcap, check_window

ALL_NEEDED = (True, True, True, True)


def _checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    window: Sequence[int],
    softcap: float,
    softmax_scale: float | None,
) -> Options:
    """What is asked for. Raises InputError as `flash_attention` does."""
    symbolic = isinstance(softmax_scale, torch.SymFloat)
    check_arguments(query, key, value, None if symbolic else softmax_scale)
    if sinks is not None:
        check_sinks(sinks, query)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    return Options(check_window(tuple(window)), check_softcap(softcap), scale)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _checked(query, key, value, sinks, window, softcap, softmax_scale)
    output, lse = forward(query, key, value, sinks, options, True)
    assert lse is not None
    return output, lse


def _fake_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _checked(query, key, value, sinks, window, softcap, None)
    return result_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        *options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = below_autograd(FORWARD, query, key, value, sinks, *options)
        ctx.options = options
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[:4])
        if not any(needs) or (grad_output is None and grad_lse is None):
            return (None,) * 7
        *rows, lse, sinks = ctx.saved_tensors
        if sinks is not None:
            sinks = sinks.contiguous()
        query, key, value, output = with_contiguous_rows(*rows)
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        of_all = BACKWARD(
            *(grad_output, query, key, value, output, lse.contiguous(), sinks, grad_lse, *ctx.options, needs)
        )
        return *of_all, None, None, None


def _recorded_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = query, key, value, sinks
    reject_tangents("flash_attention with a window, softcap or sinks", *tensors)
    arguments = *tensors, window, softcap, softmax_scale
    recorded = is_recorded(*tensors)
    output, lse = record(_Forward, *arguments) if recorded else below_autograd(FORWARD, *arguments)
    return output, lse


def _reject_mapped_sinks(sinks: torch.Tensor | None, dimension: int | None) -> None:
    if sinks is not None and dimension is not None:
        raise InputError(
            "sinks are mapped by torch.func.vmap; expected the same ones for all: pass in_dims=None"
        )


def _vmapped_forward(
    mapping: folding.Mapping,
    dimensions: Sequence[int | None],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *options: Any,
) -> tuple[Any, Any]:
    _reject_mapped_sinks(sinks, dimensions[3] if len(dimensions) > 3 else None)
    size = mapping.batch_size
    folded = [
        folding.fold(tensor, dimension, size)
        for tensor, dimension in zip((query, key, value), dimensions, strict=False)
    ]
    output, lse = FORWARD(*folded, sinks, *options)
    return (folding.unfold(output, size), folding.unfold(lse, size)), (0, 0)


def _backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    needs: Sequence[bool] = ALL_NEEDED,
) -> tuple[torch.Tensor | None, ...]:
    options = _checked(query, key, value, sinks, window, softcap, softmax_scale)
    per_row = query.shape[:3], torch.float32
    like_query = query.shape, query.dtype
    check_fits(query, grad_output=(grad_output, *like_query), output=(output, *like_query))
    check_fits(query, lse=(lse, *per_row), grad_lse=(grad_lse, *per_row))
    *of_tensors, of_sinks = needs
    recorded = Recorded(query, key, value, output, lse, sinks)
    return gradients(grad_output, grad_lse, recorded, options, Needs(*of_tensors), of_sinks)


def _fake_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    needs: Sequence[bool] = ALL_NEEDED,
) -> tuple[torch.Tensor | None, ...]:
    of_tensors = [
        result_like(tensor) if needed else None
        for tensor, needed in zip((query, key, value), needs, strict=False)
    ]
    return *of_tensors, torch.empty_like(sinks) if needs[3] and sinks is not None else None


class _Backward(torch.autograd.Function):
    """The backward pass. Who differentiates it is told that this cannot be had."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return below_autograd(BACKWARD, *arguments)

    @staticmethod
    def backward(ctx: Any, *of_gradients: torch.Tensor | None) -> Any:
        raise InputError(SECOND_DERIVATIVES_OF_OPTIONS)


def _recorded_backward(*arguments: Any) -> Any:
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    reject_tangents("flash_attention's backward pass", *tensors)
    return record(_Backward, *arguments) if is_recorded(*tensors) else below_autograd(BACKWARD, *arguments)


def _vmapped_backward(
    mapping: folding.Mapping,
    dimensions: Sequence[int | None],
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    needs: Sequence[bool] = ALL_NEEDED,
) -> tuple[Any, Any]:
    _reject_mapped_sinks(sinks, dimensions[6] if len(dimensions) > 6 else None)
    if needs[3] and sinks is not None:
        raise InputError("sinks have no gradient for each element of torch.func.vmap; pass sinks.detach()")
    size = mapping.batch_size
    tensors = grad_output, query, key, value, output, lse
    folded = [
        folding.fold(tensor, dimension, size) for tensor, dimension in zip(tensors, dimensions, strict=False)
    ]
    of_lse = None if grad_lse is None else folding.fold(grad_lse, dimensions[7], size)
    results = BACKWARD(*folded, sinks, of_lse, window, softcap, softmax_scale, needs)
    return (
        tuple(None if each is None else folding.unfold(each, size) for each in results),
        tuple(None if each is None else 0 for each in results),
    )


FORWARD = define(
    "flash_attention_with_options(Tensor query, Tensor key, Tensor value, Tensor? sinks=None, int[2] window=[-1, -1],"
    " float softcap=0., float? softmax_scale=None) -> (Tensor output, Tensor lse)",
    cpu=_forward,
    cuda=_forward,
    fake=_fake_forward,
    recorded=_recorded_forward,
    flops=attention_rules.forward_flops,
    sharding=attention_rules.options_forward_sharding,
    kept=True,
)
"""`flashmoe_science.flash_attention` with its log-sum-exp; where it is causal, the window's right side is 0."""

BACKWARD = define(
    "flash_attention_with_options_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output,"
    " Tensor lse, Tensor? sinks=None, Tensor? grad_lse=None, int[2] window=[-1, -1], float softcap=0.,"
    " float? softmax_scale=None, bool[4] needs=[True, True, True, True])"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
    cpu=_backward,
    cuda=_backward,
    fake=_fake_backward,
    recorded=_recorded_backward,
    flops=attention_rules.options_backward_flops,
    sharding=attention_rules.options_backward_sharding,
)
"""Gradients of query, key, value and sinks; None for one that is not needed."""

folding.register("flash_attention_with_options", _vmapped_forward)
folding.register("flash_attention_with_options_backward", _vmapped_backward)
