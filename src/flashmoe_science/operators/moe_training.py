"""``torch.ops.flashmoe_science.fused_moe_training`` and ``fused_moe_backward``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashmoe_science.cpu import moe_training as cpu
from flashmoe_science.cuda.moe import training as cuda
from flashmoe_science.errors import InputError
from flashmoe_science.moe_arguments import (
    Activation,
    W13Layout,
    check_moe_arguments,
    check_moe_gradient_arguments,
    parse_choice,
)
from flashmoe_science.moe_gradients import SECOND_DERIVATIVES, MoeBackend, MoeNeeds, MoeTensors
from flashmoe_science.operators import folding, moe_rules
from flashmoe_science.operators.library import define
from flashmoe_science.operators.recording import below_autograd, is_recorded, record, reject_tangents

ALL_NEEDED = (True, True, True, True, True, True)
Gradients = tuple[torch.Tensor | None, ...]
"""As `flashmoe_science.moe_gradients.MoeGradients`."""


def _forward_on(backend: MoeBackend) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def forward(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        activation: str = "silu",
        w13_layout: str = "concat",
        keep_z: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = parse_choice(Activation, activation, "activation")
        layout = parse_choice(W13Layout, w13_layout, "w13_layout")
        check_moe_arguments(
            hidden_states, w13, w2, topk_weights, topk_ids, kind, w13_bias=w13_bias, w2_bias=w2_bias
        )
        tensors = MoeTensors(hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias)
        output, z = backend.forward(
            tensors,
            activation=kind,
            w13_layout=layout,
            keep_z=keep_z,
        )
        return output, _no_z(w13) if z is None else z

    return forward


def _no_z(w13: torch.Tensor) -> torch.Tensor:
    """In the place of z where it was not kept: an operator's result is a tensor."""
    return w13.new_empty((0, w13.shape[1]))


def _fake_forward(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    w13_layout: str = "concat",
    keep_z: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = parse_choice(Activation, activation, "activation")
    layout = parse_choice(W13Layout, w13_layout, "w13_layout")
    check_moe_arguments(
        hidden_states, w13, w2, topk_weights, topk_ids, kind, w13_bias=w13_bias, w2_bias=w2_bias
    )
    backend: MoeBackend = cuda if hidden_states.device.type == "cuda" else cpu
    tokens, k = topk_ids.shape
    kept = keep_z and backend.keeps_z(hidden_states, w13, w2, topk_ids, activation=kind, w13_layout=layout)
    return (
        torch.empty_like(hidden_states, memory_format=torch.contiguous_format),
        hidden_states.new_empty((tokens * k, w13.shape[1])) if kept else _no_z(w13),
    )


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, z = below_autograd(TRAINING, *arguments)
        ctx.activation, ctx.w13_layout = arguments[7:9]
        ctx.save_for_backward(*arguments[:5], z, *arguments[5:7])
        ctx.mark_non_differentiable(z)
        ctx.set_materialize_grads(False)
        return output, z

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None, grad_z: torch.Tensor | None) -> Any:
        of_five_and_biases = ctx.needs_input_grad[:7]
        needs = (*of_five_and_biases[:4], *of_five_and_biases[5:])
        if grad_output is None or not any(needs):
            return (None,) * 10
        gradients = BACKWARD(grad_output, *ctx.saved_tensors, ctx.activation, ctx.w13_layout, needs)
        return *gradients[:4], None, *gradients[4:], None, None, None


def record_training(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`TRAINING` of these arguments, all of them, as autograd records it."""
    output, z = record(_Forward, *arguments)
    return output, z


def _recorded_forward(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    w13_layout: str = "concat",
    keep_z: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    floats = hidden_states, w13, w2, topk_weights, w13_bias, w2_bias
    reject_tangents("fused_moe", *floats)
    arguments = (
        *(hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias),
        *(activation, w13_layout, keep_z),
    )
    if is_recorded(*floats):
        return record_training(*arguments)
    output, z = below_autograd(TRAINING, *arguments)
    return output, z


def _backward_on(backend: MoeBackend) -> Callable[..., Gradients]:
    def backward(
        grad_output: torch.Tensor,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        z: torch.Tensor | None = None,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        activation: str = "silu",
        w13_layout: str = "concat",
        needs: Sequence[bool] = ALL_NEEDED,
    ) -> Gradients:
        kind = parse_choice(Activation, activation, "activation")
        layout = parse_choice(W13Layout, w13_layout, "w13_layout")
        given = MoeTensors(hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias)
        tensors = given.contiguous()
        check_moe_arguments(*tensors.five, kind, w13_bias=tensors.w13_bias, w2_bias=tensors.w2_bias)
        kept = z.contiguous() if z is not None and z.shape[0] == topk_ids.numel() else None
        check_moe_gradient_arguments(
            tensors.hidden_states, tensors.w13, grad_output=grad_output, z=kept, slots=topk_ids.numel()
        )
        return tuple(
            backend.backward(
                grad_output,
                tensors,
                kept,
                activation=kind,
                w13_layout=layout,
                needs=_needs(needs, w13_bias, w2_bias),
            )
        )

    return backward


def _needs(needs: Sequence[bool], w13_bias: torch.Tensor | None, w2_bias: torch.Tensor | None) -> MoeNeeds:
    asked = MoeNeeds(*needs)
    return asked._replace(
        w13_bias=asked.w13_bias and w13_bias is not None, w2_bias=asked.w2_bias and w2_bias is not None
    )


def _fake_backward(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    z: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    w13_layout: str = "concat",
    needs: Sequence[bool] = ALL_NEEDED,
) -> Gradients:
    tensors = hidden_states, w13, w2, topk_weights, w13_bias, w2_bias
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if needed and tensor is not None
        else None
        for tensor, needed in zip(tensors, needs, strict=True)
    )


class _Backward(torch.autograd.Function):
    """The backward pass, as in `autograd`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return below_autograd(BACKWARD, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise InputError(SECOND_DERIVATIVES)


def _recorded_backward(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    z: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    w13_layout: str = "concat",
    needs: Sequence[bool] = ALL_NEEDED,
) -> Gradients:
    floats = grad_output, hidden_states, w13, w2, topk_weights, z, w13_bias, w2_bias
    reject_tangents("fused_moe's backward pass", *floats)
    arguments = (
        *(grad_output, hidden_states, w13, w2, topk_weights, topk_ids, z, w13_bias, w2_bias),
        *(activation, w13_layout, needs),
    )
    gradients: Gradients = (
        record(_Backward, *arguments) if is_recorded(*floats) else below_autograd(BACKWARD, *arguments)
    )
    return gradients


TRAINING = define(
    "fused_moe_training(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids,"
    ' Tensor? w13_bias=None, Tensor? w2_bias=None, str activation="silu", str w13_layout="concat", bool keep_z=True)'
    " -> (Tensor output, Tensor z)",
    cpu=_forward_on(cpu),
    cuda=_forward_on(cuda),
    fake=_fake_forward,
    recorded=_recorded_forward,
    flops=moe_rules.forward_flops,
    sharding=moe_rules.training_sharding,
    kept=True,
)
"""`flashmoe_science.fused_moe` with what its backward pass needs: z, or no rows where it is not kept."""

BACKWARD = define(
    "fused_moe_backward(Tensor grad_output, Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights,"
    " Tensor topk_ids, Tensor? z=None, Tensor? w13_bias=None, Tensor? w2_bias=None,"
    ' str activation="silu", str w13_layout="concat", bool[6] needs=[True, True, True, True, True, True])'
    " -> (Tensor grad_hidden_states, Tensor grad_w13, Tensor grad_w2, Tensor grad_topk_weights,"
    " Tensor grad_w13_bias, Tensor grad_w2_bias)",
    cpu=_backward_on(cpu),
    cuda=_backward_on(cuda),
    fake=_fake_backward,
    recorded=_recorded_backward,
    flops=moe_rules.backward_flops,
    sharding=moe_rules.backward_sharding,
)
"""The gradients, as `flashmoe_science.moe_gradients.MoeBackward` says; None for one that is not needed."""


def _one_by_one(operator: Callable[..., Any]) -> folding.Rule:
    """torch.func.vmap: a call for each, as each has a sorted order and gradients of its own."""

    def rule(mapping: folding.Mapping, dimensions: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        calls = [
            operator(
                *(
                    argument.select(dimension, index).contiguous() if isinstance(dimension, int) else argument
                    for argument, dimension in zip(arguments, dimensions, strict=True)
                )
            )
            for index in range(mapping.batch_size)
        ]
        results = tuple(None if each[0] is None else torch.stack(each) for each in zip(*calls, strict=True))
        return results, tuple(None if result is None else 0 for result in results)

    return rule


folding.register("fused_moe_training", _one_by_one(TRAINING))
folding.register("fused_moe_backward", _one_by_one(BACKWARD))
