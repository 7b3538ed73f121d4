"""What PyTorch asks about attention's operators: floating-point operations, and how DTensors pass through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flashmoe_science.operators.flops import Shape
from flashmoe_science.operators.sharding import Rule

_BATCH, _HEADS = 0, 1
"""Dimensions of query, key, value, and of all that is like them or has a value for each of their rows."""


def _one_product(query: Shape, key: Shape) -> int:
    """Scores, or anything of their size times head_dim."""
    batch, heads, seqlen_q, head_dim = query
    return 2 * batch * heads * seqlen_q * key[2] * head_dim


def forward_flops(query: Shape, key: Shape, value: Shape, *options: Any, **named: Any) -> int:
    """Two products. Keys that a list leaves out are counted, as what a mask hides is."""
    return 2 * _one_product(query, key)


def backward_flops(
    grad_output: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    output: Shape,
    lse: Shape,
    grad_lse: Shape | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    needs: Sequence[bool] = (True, True, True),
    **named: Any,
) -> int:
    """Five products where all gradients are needed, 2.5 times the forward's; the scores are among them."""
    of_scores = needs[0] or needs[1]
    return (1 + of_scores + sum(needs)) * _one_product(query, key)


def forward_sharding(query: Any, key: Any, value: Any, *options: Any, **named: Any) -> Rule:
    return [_everywhere(placement, results=2, tensors=3) for placement in _of_attention(query, key, value)]


def backward_sharding(
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


def options_backward_flops(
    grad_output: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    output: Shape,
    lse: Shape,
    sinks: Shape | None = None,
    grad_lse: Shape | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    needs: Sequence[bool] = (True, True, True, True),
    **named: Any,
) -> int:
    """As `backward_flops`; a gradient of sinks is one sum."""
    *of_tensors, _ = needs
    return (1 + (needs[0] or needs[1]) + sum(of_tensors)) * _one_product(query, key) if any(of_tensors) else 0


def options_forward_sharding(
    query: Any, key: Any, value: Any, sinks: Any = None, *options: Any, **named: Any
) -> Rule:
    return [
        ([placement] * 2, [placement] * 3 + _of_sinks(placement, sinks))
        for placement in _of_attention(query, key, value)
    ]


def options_backward_sharding(
    grad_output: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    lse: Any,
    sinks: Any = None,
    grad_lse: Any = None,
    window: Any = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    needs: Any = (True, True, True, True),
    **named: Any,
) -> Rule:
    """A gradient of sinks is a sum over the batch, of which a machine with a part of it has a part."""
    from torch.distributed.tensor import Partial, Shard

    rules = []
    for placement in _of_attention(query, key, value):
        of_sinks = Partial() if placement == Shard(_BATCH) else (*_of_sinks(placement, sinks), placement)[0]
        results = [
            each if needed else None for each, needed in zip([placement] * 3 + [of_sinks], needs, strict=True)
        ]
        if sinks is None:
            results[3] = None
        tensors = [placement] * 6 + _of_sinks(placement, sinks) + ([] if grad_lse is None else [placement])
        rules.append((results, tensors))
    return rules


def _of_sinks(placement: Any, sinks: Any) -> list[Any]:
    """Of (heads,), where there are any."""
    from torch.distributed.tensor import Replicate, Shard

    if sinks is None:
        return []
    return [Shard(0) if placement == Shard(_HEADS) else Replicate()]


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
