"""A mixture of experts as autograd records eager calls of it, around the forward and backward pass of any backend."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science.errors import InputError
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import (
    NO_MAIN_GRADIENTS,
    SECOND_DERIVATIVES,
    MainGradients,
    MoeBackend,
    MoeGradients,
    MoeNeeds,
    MoeTensors,
)
from flashmoe_science.operators.moe_training import BACKWARD
from flashmoe_science.torch_private import is_batched

_NOT_TENSORS = 5


def differentiable_moe(
    backend: MoeBackend,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    recompute: bool = False,
    main: MainGradients = NO_MAIN_GRADIENTS,
) -> torch.Tensor:
    """The backend's output, differentiable once by every tensor but topk_ids.

    Kept for the backward pass: the tensors themselves and z, or without z where ``recompute`` says so. The backward
    pass adds gradients of weights to the buffers of ``main``, and autograd gets none of these weights.
    """
    result: torch.Tensor = _Moe.apply(  # type: ignore[no-untyped-call]
        hidden_states,
        w13,
        w2,
        topk_weights,
        topk_ids,
        w13_bias,
        w2_bias,
        backend,
        activation,
        w13_layout,
        not recompute,
        main,
    )
    return result


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        backend: MoeBackend,
        activation: Activation,
        w13_layout: W13Layout,
        keep_z: bool,
        main: MainGradients,
    ) -> torch.Tensor:
        tensors = MoeTensors(hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias)
        output, z = backend.forward(tensors, activation=activation, w13_layout=w13_layout, keep_z=keep_z)
        ctx.backend, ctx.activation, ctx.w13_layout, ctx.main = backend, activation, w13_layout, main
        ctx.save_for_backward(*tensors.five, z, w13_bias, w2_bias)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        nothing = (None,) * _NOT_TENSORS
        if grad_output is None:
            return (None,) * 7 + nothing
        hidden_states, w13, w2, weights, *_, with_w13_bias, with_w2_bias = ctx.needs_input_grad[:7]
        needs = MoeNeeds(hidden_states, w13, w2, weights, with_w13_bias, with_w2_bias)
        arguments = (grad_output, *ctx.saved_tensors)
        main = MainGradients(ctx.main.w13 if w13 else None, ctx.main.w2 if w2 else None)
        if is_dynamo_compiling():  # compiled autograd, of a call that was eager
            given = MoeGradients(*BACKWARD(*arguments, ctx.activation.value, ctx.w13_layout.value, needs))
            gradients = main.take(given)
        else:
            options = ctx.backend, ctx.activation, ctx.w13_layout, needs, main
            # Gradients are enabled under create_graph=True.
            once: Any = _Gradients.apply if torch.is_grad_enabled() else _Gradients.forward
            try:
                gradients = MoeGradients(*once(*arguments, *options))
            except RuntimeError:
                if not is_batched(grad_output):
                    raise
                if main != NO_MAIN_GRADIENTS:
                    raise InputError(
                        "main_gradients take one gradient of the output at a time; leave them out, or is_grads_batched"
                    ) from None
                each = BACKWARD(*arguments, ctx.activation.value, ctx.w13_layout.value, needs)
                gradients = MoeGradients(*each)  # one after the other
        *of_tensors, of_w13_bias, of_w2_bias = gradients
        return *of_tensors, None, of_w13_bias, of_w2_bias, *nothing


class _Gradients(torch.autograd.Function):
    """The backward pass, as in `autograd`."""

    @staticmethod
    def forward(
        grad_output: torch.Tensor,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        z: torch.Tensor | None,
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        backend: MoeBackend,
        activation: Activation,
        w13_layout: W13Layout,
        needs: MoeNeeds,
        main: MainGradients,
    ) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            backend.backward(
                grad_output,
                MoeTensors(hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias),
                z,
                activation=activation,
                w13_layout=w13_layout,
                needs=needs,
                main=main,
            )
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor | None, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise InputError(SECOND_DERIVATIVES)
