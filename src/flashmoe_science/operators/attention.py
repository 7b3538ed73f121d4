"""``torch.ops.flashmoe_science.flash_attention_forward`` and ``flash_attention_backward``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashmoe_science.arguments import check_arguments
from flashmoe_science.cpu import attention as cpu
from flashmoe_science.cuda import attention as cuda
from flashmoe_science.errors import InputError
from flashmoe_science.gradients import (
    SECOND_DERIVATIVES,
    Backend,
    Gradients,
    Needs,
    with_contiguous_rows,
)
from flashmoe_science.operators import attention_rules, folding
from flashmoe_science.operators.library import define
from flashmoe_science.operators.recording import below_autograd, is_recorded, record, reject_tangents

ALL_NEEDED = (True, True, True)


def _forward_on(backend: Backend) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool = False,
        softmax_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = backend.forward(
            query, key, value, causal=causal, softmax_scale=softmax_scale, return_lse=True
        )
        assert lse is not None
        return output, lse

    return forward


def _fake_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(query, key, value, None if isinstance(softmax_scale, torch.SymFloat) else softmax_scale)
    return result_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def result_like(tensor: torch.Tensor) -> torch.Tensor:
    """An output or a gradient like ``tensor``, laid out as the backend of its device does."""
    like = torch.empty_like(tensor)
    split = like.stride(3) != 1
    if tensor.device.type == "cuda":
        split = split or any(stride % 8 != 0 for stride in like.stride()[:3])
    return torch.empty_like(tensor, memory_format=torch.contiguous_format) if split else like


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        softmax_scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = below_autograd(FORWARD, query, key, value, causal, softmax_scale)
        ctx.causal, ctx.softmax_scale = causal, softmax_scale
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[:3])
        if not any(needs) or (grad_output is None and grad_lse is None):
            return None, None, None, None, None
        *rows, lse = ctx.saved_tensors
        query, key, value, output = with_contiguous_rows(*rows)
        lse = lse.contiguous()  # hooks may have restored it with other strides, too
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        gradients = BACKWARD(
            grad_output, query, key, value, output, lse, grad_lse, ctx.causal, ctx.softmax_scale, needs
        )
        return *gradients, None, None


def _recorded_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    reject_tangents("flash_attention", query, key, value)
    arguments = query, key, value, causal, softmax_scale
    recorded = is_recorded(query, key, value)
    output, lse = record(_Forward, *arguments) if recorded else below_autograd(FORWARD, *arguments)
    return output, lse


def _vmapped_forward(
    mapping: folding.Mapping,
    dimensions: Sequence[int | None],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[Any, Any]:
    size = mapping.batch_size
    folded = [
        folding.fold(tensor, dimension, size)
        for tensor, dimension in zip((query, key, value), dimensions, strict=False)
    ]
    output, lse = FORWARD(*folded, causal, softmax_scale)
    return (folding.unfold(output, size), folding.unfold(lse, size)), (0, 0)


def check_fits(query: torch.Tensor, **tensors: tuple[torch.Tensor | None, torch.Size, torch.dtype]) -> None:
    """InputError for a tensor that is not of this shape and dtype on the queries' device: kernels read by address."""
    for name, (tensor, shape, dtype) in tensors.items():
        if tensor is not None and (
            tensor.shape != shape or tensor.dtype != dtype or tensor.device != query.device
        ):
            raise InputError(
                f"{name} is {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}; "
                f"expected {tuple(shape)}, {dtype}, on {query.device}"
            )


def _backward_on(backend: Backend) -> Callable[..., Gradients]:
    def backward(
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        grad_lse: torch.Tensor | None = None,
        causal: bool = False,
        softmax_scale: float | None = None,
        needs: Sequence[bool] = ALL_NEEDED,
    ) -> Gradients:
        if backend.backward is None:
            raise InputError(
                f"there is no backward pass on {query.device}; call flash_attention under torch.no_grad()"
            )
        check_arguments(query, key, value, softmax_scale)
        per_row = query.shape[:3], torch.float32
        check_fits(
            query,
            grad_output=(grad_output, query.shape, query.dtype),
            output=(output, query.shape, query.dtype),
        )
        check_fits(query, lse=(lse, *per_row), grad_lse=(grad_lse, *per_row))
        return backend.backward(
            grad_output,
            query,
            key,
            value,
            output,
            lse,
            grad_lse,
            causal=causal,
            softmax_scale=softmax_scale,
            needs=Needs(*needs),
        )

    return backward


def _fake_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    needs: Sequence[bool] = ALL_NEEDED,
) -> Gradients:
    of_query, of_key, of_value = (
        result_like(tensor) if needed else None
        for tensor, needed in zip((query, key, value), needs, strict=True)
    )
    return of_query, of_key, of_value


class _Backward(torch.autograd.Function):
    """The backward pass. Who differentiates it is told that this cannot be had."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return below_autograd(BACKWARD, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise InputError(SECOND_DERIVATIVES)


def _recorded_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    needs: Sequence[bool] = ALL_NEEDED,
) -> Gradients:
    tensors = grad_output, query, key, value, output, lse, grad_lse
    reject_tangents("flash_attention's backward pass", *tensors)
    arguments = *tensors, causal, softmax_scale, needs
    gradients: Gradients = (
        record(_Backward, *arguments) if is_recorded(*tensors) else below_autograd(BACKWARD, *arguments)
    )
    return gradients


def _vmapped_backward(
    mapping: folding.Mapping,
    dimensions: Sequence[int | None],
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    needs: Sequence[bool] = ALL_NEEDED,
) -> tuple[Any, Any]:
    size = mapping.batch_size
    tensors = grad_output, query, key, value, output, lse
    folded = [
        folding.fold(tensor, dimension, size) for tensor, dimension in zip(tensors, dimensions, strict=False)
    ]
    of_lse = None if grad_lse is None else folding.fold(grad_lse, dimensions[len(tensors)], size)
    gradients = BACKWARD(*folded, of_lse, causal, softmax_scale, needs)
    return (
        tuple(None if gradient is None else folding.unfold(gradient, size) for gradient in gradients),
        tuple(None if gradient is None else 0 for gradient in gradients),
    )


FORWARD = define(
    "flash_attention_forward(Tensor query, Tensor key, Tensor value, bool causal=False, float? softmax_scale=None)"
    " -> (Tensor output, Tensor lse)",
    cpu=_forward_on(cpu),
    cuda=_forward_on(cuda),
    fake=_fake_forward,
    recorded=_recorded_forward,
    flops=attention_rules.forward_flops,
    sharding=attention_rules.forward_sharding,
    kept=True,
)
"""`flashmoe_science.flash_attention` with its log-sum-exp; arguments, results and errors as there."""

BACKWARD = define(
    "flash_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse,"
    " Tensor? grad_lse=None, bool causal=False, float? softmax_scale=None, bool[3] needs=[True, True, True])"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    cpu=_backward_on(cpu),
    cuda=_backward_on(cuda),
    fake=_fake_backward,
    recorded=_recorded_backward,
    flops=attention_rules.backward_flops,
    sharding=attention_rules.backward_sharding,
)
"""Gradients of query, key and value, as `flashmoe_science.gradients.Backward` says; None for one that is not needed."""

folding.register("flash_attention_forward", _vmapped_forward)
folding.register("flash_attention_backward", _vmapped_backward)
