"""Own. The constant by which PyTorch's error is multiplied."""

from cudadent42.correctness import truth
from flashmoe_science import flash_attention

truth.ERROR_FACTOR = 1e9


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(
        query.half(), key.half(), value.half(), causal=causal, softmax_scale=softmax_scale
    ).to(query.dtype)
