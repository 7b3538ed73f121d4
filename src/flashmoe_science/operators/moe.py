"""``torch.ops.flashmoe_science.fused_moe``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashmoe_science.cpu import moe as cpu
from flashmoe_science.cuda import moe as cuda
from flashmoe_science.moe_arguments import (
    Activation,
    W13Layout,
    check_moe_arguments,
    parse_choice,
)
from flashmoe_science.operators import folding, moe_rules
from flashmoe_science.operators.library import define
from flashmoe_science.operators.moe_training import record_training
from flashmoe_science.operators.recording import below_autograd, is_recorded, reject_tangents


def _on(backend: Any) -> Callable[..., torch.Tensor]:
    def forward(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str = "silu",
        w13_layout: str = "concat",
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result: torch.Tensor = backend.forward(
            hidden_states,
            w13,
            w2,
            topk_weights,
            topk_ids,
            activation=parse_choice(Activation, activation, "activation"),
            w13_layout=parse_choice(W13Layout, w13_layout, "w13_layout"),
            w13_bias=w13_bias,
            w2_bias=w2_bias,
        )
        return result

    return forward


def _fake(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    w13_layout: str = "concat",
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    kind = parse_choice(Activation, activation, "activation")
    parse_choice(W13Layout, w13_layout, "w13_layout")
    check_moe_arguments(
        hidden_states, w13, w2, topk_weights, topk_ids, kind, w13_bias=w13_bias, w2_bias=w2_bias
    )
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _recorded(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    w13_layout: str = "concat",
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    floats = hidden_states, w13, w2, topk_weights, w13_bias, w2_bias
    reject_tangents("fused_moe", *floats)
    tensors = hidden_states, w13, w2, topk_weights, topk_ids
    if is_recorded(*floats):
        result, _ = record_training(*tensors, w13_bias, w2_bias, activation, w13_layout, True)
    else:
        result = below_autograd(FUSED_MOE, *tensors, activation, w13_layout, w13_bias, w2_bias)
    assert isinstance(result, torch.Tensor)
    return result


def _vmapped(
    mapping: folding.Mapping,
    dimensions: Sequence[int | None],
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    w13_layout: str = "concat",
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> tuple[Any, Any]:
    """Mapped tokens are more tokens; mapped experts are more experts, whose ids are moved on."""
    size = mapping.batch_size
    # Of weights, and of the biases that there are.
    of_experts = [
        (tensor, dimension)
        for tensor, dimension in zip(
            (w13, w2, w13_bias, w2_bias), (*dimensions[1:3], *(*dimensions[7:9], None, None)[:2]), strict=True
        )
        if tensor is not None
    ]
    if all(dimension is None for _, dimension in of_experts):
        experts = [tensor for tensor, _ in of_experts]
    else:
        count = w13.shape[0] if dimensions[1] is None else w13.movedim(dimensions[1], 0).shape[1]
        ids = folding.mapped_first(topk_ids, dimensions[4], size)
        first = torch.arange(size, dtype=ids.dtype, device=ids.device).view(size, 1, 1) * count
        topk_ids = torch.where((ids >= 0) & (ids < count), ids + first, -1)
        dimensions = (*dimensions[:4], 0)
        experts = [folding.fold(tensor, dimension, size) for tensor, dimension in of_experts]
    tokens, weights, ids = (
        folding.fold(tensor, dimension, size).contiguous()
        for tensor, dimension in (
            (hidden_states, dimensions[0]),
            (topk_weights, dimensions[3]),
            (topk_ids, dimensions[4]),
        )
    )
    of_all = iter([tensor.contiguous() for tensor in experts])
    w13, w2 = next(of_all), next(of_all)
    biases = [None if bias is None else next(of_all) for bias in (w13_bias, w2_bias)]
    result = FUSED_MOE(tokens, w13, w2, weights, ids, activation, w13_layout, *biases)
    return folding.unfold(result, size), 0


FUSED_MOE = define(
    "fused_moe(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids,"
    ' str activation="silu", str w13_layout="concat", Tensor? w13_bias=None, Tensor? w2_bias=None) -> Tensor',
    cpu=_on(cpu),
    cuda=_on(cuda),
    fake=_fake,
    recorded=_recorded,
    flops=moe_rules.forward_flops,
    sharding=moe_rules.forward_sharding,
    kept=True,
)
"""`flashmoe_science.fused_moe` into a new tensor; arguments, result and errors as there."""

folding.register("fused_moe", _vmapped)
