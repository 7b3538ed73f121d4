"""Floating-point operations of the operators, for `torch.utils.flop_counter` and what reckons with it.

A multiply and an add are two. As PyTorch does for its own attention, a causal mask does not lower the count, nor does
the softmax raise it: a utilisation is comparable with that of ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from flashmoe_science.operators.attention import BACKWARD, FORWARD
from flashmoe_science.operators.listed_keys import LISTED_KEYS
from flashmoe_science.operators.moe import FUSED_MOE
from flashmoe_science.operators.moe_quantized import FUSED_MOE_QUANTIZED
from flashmoe_science.operators.moe_training import BACKWARD as MOE_BACKWARD
from flashmoe_science.operators.moe_training import TRAINING

Shape = Sequence[int]


def _one_product(query: Shape, key: Shape) -> int:
    """Scores, or anything of their size times head_dim."""
    batch, heads, seqlen_q, head_dim = query
    return 2 * batch * heads * seqlen_q * key[2] * head_dim


def attention_forward(query: Shape, key: Shape, value: Shape, *options: Any, **named: Any) -> int:
    """Two products. Keys that a list leaves out are counted, as what a mask hides is."""
    return 2 * _one_product(query, key)


def attention_backward(
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


def fused_moe(
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


def fused_moe_backward(
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


def fused_moe_quantized(
    hidden_states: Shape,
    w13: Shape,
    w2: Shape,
    topk_weights: Shape,
    topk_ids: Shape,
    *options: Any,
    **named: Any,
) -> int:
    """As `fused_moe`; sizes of packed weights are taken from the tokens and the rows."""
    tokens, chosen = topk_ids
    hidden = hidden_states[1]
    intermediate = w2[2] * hidden // w13[2]
    return 2 * tokens * chosen * hidden * (w13[1] + intermediate)


register_flop_formula(FORWARD.overloadpacket)(attention_forward)
register_flop_formula(BACKWARD.overloadpacket)(attention_backward)
register_flop_formula(LISTED_KEYS.overloadpacket)(attention_forward)
register_flop_formula(FUSED_MOE.overloadpacket)(fused_moe)
register_flop_formula(TRAINING.overloadpacket)(fused_moe)
register_flop_formula(MOE_BACKWARD.overloadpacket)(fused_moe_backward)
register_flop_formula(FUSED_MOE_QUANTIZED.overloadpacket)(fused_moe_quantized)
