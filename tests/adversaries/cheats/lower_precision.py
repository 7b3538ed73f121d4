"""10. Less precision inside than the inputs have: fp16 for fp32.

Source: deep-reinforce, hacks and defenses.
"""

from flashmoe_science import flash_attention


def attention(query, key, value, *, causal, softmax_scale):
    half = (tensor.half() for tensor in (query, key, value))
    return flash_attention(*half, causal=causal, softmax_scale=softmax_scale).to(query.dtype)
