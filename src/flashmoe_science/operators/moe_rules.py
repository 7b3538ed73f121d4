"""What PyTorch asks about the operators of experts: floating-point operations, and how DTensors pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashmoe_science.operators.flops import Shape
from flashmoe_science.operators.sharding import Rule

_TOKENS = 0


def forward_flops(
    hidden_states: Shape,
    w13: Shape,
    w2: Shape,
    topk_weights: Shape,
    topk_ids: Shape,
    *options: Any,
    **named: Any,
) -> int:
    """Two products for each token and each of its choices; those of no expert here are counted, too."""
    tokens, chosen = topk_ids
    return 2 * tokens * chosen * (w13[1] * w13[2] + w2[1] * w2[2])


def backward_flops(
    grad_output: Shape,
    hidden_states: Shape,
    w13: Shape,
    w2: Shape,
    topk_weights: Shape,
    topk_ids: Shape,
    z: Shape | None = None,
    w13_bias: Shape | None = None,
    w2_bias: Shape | None = None,
    activation: str = "silu",
    w13_layout: str = "concat",
    needs: Sequence[bool] = (True, True, True, True, True, True),
    **named: Any,
) -> int:
    """Four products where all gradients are needed, twice the forward's; one more where z is computed again."""
    tokens, chosen = topk_ids
    first, second = w13[1] * w13[2], w2[1] * w2[2]
    of_hidden, of_w13, of_w2, of_weights, of_w13_bias, _ = needs
    kept = z is not None and z[0] == tokens * chosen
    through_z = of_hidden or of_w13 or of_w13_bias
    depth = first * (of_hidden + of_w13 + (not kept)) + second * (of_w2 + (through_z or of_weights))
    return 2 * tokens * chosen * depth


def forward_sharding(
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


def training_sharding(
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


def backward_sharding(
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
