"""How DTensors pass through the operators without being gathered: by batch and by heads, or by tokens.

PyTorch's module for DTensors takes a second to import, and most processes have none of them; so the rules are
registered when somebody has imported it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

_BATCH, _HEADS = 0, 1
"""Dimensions of query, key, value, and of all that is like them or has a value for each of their rows."""
_TOKENS = 0


def register_where_used() -> None:
    """Register the rules if the process has DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        register()


@functools.cache
def register() -> None:
    """Register the rules. Nobody has to call it but who passes DTensors to ``torch.ops.flashmoe_science`` in inference
    mode, and imported `torch.distributed.tensor` later than this package.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    shardings: Any = DTensor._op_dispatcher.sharding_propagator
    for operator, rule in (
        (torch.ops.flashmoe_science.flash_attention_forward.default, _attention_forward),
        (torch.ops.flashmoe_science.flash_attention_backward.default, _attention_backward),
        (torch.ops.flashmoe_science.fused_moe.default, _fused_moe),
        (torch.ops.flashmoe_science.fused_moe_training.default, _fused_moe_training),
        (torch.ops.flashmoe_science.fused_moe_backward.default, _fused_moe_backward),
        (torch.ops.flashmoe_science.topk_routing.default, _topk_routing),
    ):
        wrap: Callable[[Any], Any] = register_sharding(operator)
        wrap(rule)
        # PyTorch says of a call what it said of the last one with such tensors, and compares other arguments from the
        # first whole number on. But which gradients are needed, or whether z is kept, decides what results there are.
        shardings.op_to_schema_info[operator] = RuntimeSchemaInfo(_first_option(operator), needs_pytree=True)


def _first_option(operator: Any) -> int:
    """The place of the first argument that is not always a tensor."""
    types = [str(argument.type) for argument in operator._schema.arguments]
    return next((number for number, kind in enumerate(types) if kind != "Tensor"), len(types))


Rule = list[tuple[list[Any], list[Any]]]
"""Each way that an operator accepts: placements of its results, and of its tensors."""


def _attention_forward(query: Any, key: Any, value: Any, *options: Any, **named: Any) -> Rule:
    return [_everywhere(placement, results=2, tensors=3) for placement in _of_attention(query, key, value)]


def _attention_backward(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    lse: Any,
    grad_lse: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    needs: Any = (True, True, True),
    **named: Any,
) -> Rule:
    tensors = 6 if grad_lse is None else 7
    return [
        (
            [placement if needed else None for needed in needs],
            [placement] * tensors,
        )
        for placement in _of_attention(query, key, value)
    ]


def _fused_moe(
    hidden_states: Any,
    w13: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: str = "silu",
    w13_layout: str = "concat",
    w13_bias: Any = None,
    w2_bias: Any = None,
    **named: Any,
) -> Rule:
    from torch.distributed.tensor import Replicate, Shard

    whole, tokens = Replicate(), Shard(_TOKENS)
    biases = [whole for bias in (w13_bias, w2_bias) if bias is not None]
    return [
        ([whole], [whole] * 5 + biases),
        ([tokens], [tokens, whole, whole, tokens, tokens, *biases]),
    ]


def _fused_moe_training(
    hidden_states: Any,
    w13: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    w13_bias: Any = None,
    w2_bias: Any = None,
    *options: Any,
    **named: Any,
) -> Rule:
    from torch.distributed.tensor import Replicate, Shard

    whole, tokens = Replicate(), Shard(_TOKENS)
    biases = [whole for bias in (w13_bias, w2_bias) if bias is not None]
    return [
        ([whole, whole], [whole] * 5 + biases),
        # The rows of z are each machine's own: no other order of tokens is taken from them.
        ([tokens, tokens], [tokens, whole, whole, tokens, tokens, *biases]),
    ]


def _fused_moe_backward(
    grad_output: Any,
    hidden_states: Any,
    w13: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    z: Any = None,
    w13_bias: Any = None,
    w2_bias: Any = None,
    activation: str = "silu",
    w13_layout: str = "concat",
    needs: Any = (True, True, True, True, True, True),
    **named: Any,
) -> Rule:
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, tokens, part = Replicate(), Shard(_TOKENS), Partial()

    def rule(of_tokens: Any, of_weights: Any) -> tuple[list[Any], list[Any]]:
        biases = [whole for bias in (w13_bias, w2_bias) if bias is not None]
        results = of_tokens, of_weights, of_weights, of_tokens, of_weights, of_weights
        given = [True, True, True, True, w13_bias is not None, w2_bias is not None]
        return (
            [
                placement if needed and there else None
                for placement, needed, there in zip(results, needs, given, strict=True)
            ],
            [of_tokens, of_tokens, whole, whole, of_tokens, of_tokens]
            + [of_tokens] * (z is not None)
            + biases,
        )

    return [rule(whole, whole), rule(tokens, part)]


def _topk_routing(
    logits: Any,
    k: int,
    scores: str = "softmax",
    renormalize: bool = True,
    correction_bias: Any = None,
    *options: Any,
    **named: Any,
) -> Rule:
    from torch.distributed.tensor import Replicate, Shard

    whole, tokens = Replicate(), Shard(_TOKENS)
    bias = [] if correction_bias is None else [whole]
    return [([whole, whole], [whole, *bias]), ([tokens, tokens], [tokens, *bias])]


def _everywhere(placement: Any, *, results: int, tensors: int) -> tuple[list[Any], list[Any]]:
    return [placement] * results, [placement] * tensors


def _of_attention(query: Any, key: Any, value: Any) -> list[Any]:
    """Placements that all tensors of a call may share: a head needs its key/value head on the same machine."""
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Any] = [Replicate(), Shard(_BATCH)]
    over = [
        query.mesh.size(dimension)
        for dimension in range(query.mesh.ndim)
        if any(tensor.placements[dimension] == Shard(_HEADS) for tensor in (query, key, value))
    ]
    if over and key.shape[_HEADS] % math.prod(over) == 0:
        placements.append(Shard(_HEADS))
    return placements
