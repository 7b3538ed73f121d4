"""Attention as autograd records eager calls of it, around the forward and backward pass of any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science.errors import InputError
from flashmoe_science.gradients import SECOND_DERIVATIVES, Backend, Gradients, Needs
from flashmoe_science.operators.attention import BACKWARD
from flashmoe_science.torch_private import is_batched


def differentiable_attention(
    backend: Backend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool = True,
    **of_forward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The backend's output and log-sum-exp, both differentiable once by query, key and value.

    Kept for the backward pass: query, key, value, output and log-sum-exp.

    Args:
        return_lse: if False, None takes the log-sum-exp's place: as no result, autograd keeps it in less time.
        of_forward: what else the backend's forward pass takes.
    """

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
        return backend.forward(
            query, key, value, causal=causal, softmax_scale=softmax_scale, return_lse=True, **of_forward
        )

    options = forward, backend, causal, softmax_scale, return_lse
    results: Any = _Attention.apply(query, key, value, options)  # type: ignore[no-untyped-call]
    output, lse = results if return_lse else (results, None)
    return output, lse


Options = tuple[
    Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Any, ...]], Backend, bool, float | None, bool
]
"""The forward pass, which gives output and log-sum-exp; the backend; causal, softmax_scale and return_lse."""
_ALL = Needs(True, True, True)
_EACH_TENSOR = (*_ALL, False)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        output, lse = options[0](query, key, value)
        ctx.options = options
        # Detached: of a result that is kept, autograd makes a new tensor for each backward pass. Changes in place are
        # seen all the same.
        ctx.save_for_backward(query, key, value, output.detach(), lse)
        # Else each call whose log-sum-exp is not used would fill a tensor with zeros.
        ctx.set_materialize_grads(False)
        return (output, lse) if options[-1] else output

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_output is None and grad_lse is None:
            return None, None, None, None
        query, key, value, output, lse = ctx.saved_tensors
        if grad_output is None:
            grad_output = output.new_zeros(()).expand(output.shape)
        tensors = (grad_output, query, key, value, output, lse, grad_lse)
        _, backend, causal, softmax_scale, _ = ctx.options
        # Of a small call this frame is a part that shows: what is the same each time is not made anew.
        needed = ctx.needs_input_grad
        needs = _ALL if needed == _EACH_TENSOR else Needs(*needed[:3])
        if is_dynamo_compiling():  # compiled autograd, of a call that was eager
            gradients = BACKWARD(*tensors, causal, softmax_scale, tuple(needs))
            return *gradients, None
        try:
            if torch.is_grad_enabled():  # under create_graph=True
                gradients = _Gradients.apply(*tensors, backend, causal, softmax_scale, needs)  # type: ignore[no-untyped-call]
            else:
                gradients = backend.backward(
                    *tensors, causal=causal, softmax_scale=softmax_scale, needs=needs
                )
        except RuntimeError:
            if not any(tensor is not None and is_batched(tensor) for tensor in (grad_output, grad_lse)):
                raise
            gradients = BACKWARD(*tensors, causal, softmax_scale, tuple(needs))  # one after the other
        of_query, of_key, of_value = gradients
        return of_query, of_key, of_value, None


record: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply
"""`differentiable_attention` of query, key, value and `Options`, where no transform of torch.func has wrapped them:
`Function.apply` looks for one before it does the same. The output, if asked for with the log-sum-exp.
"""


class _Gradients(torch.autograd.Function):
    """The backward pass. Who differentiates it is told that this cannot be had."""

    @staticmethod
    def forward(*arguments: Any) -> Gradients:
        *tensors, backend, causal, softmax_scale, needs = arguments
        gradients: Gradients = backend.backward(
            *tensors, causal=causal, softmax_scale=softmax_scale, needs=needs
        )
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise InputError(SECOND_DERIVATIVES)
