"""Honest: a setting of its own, made when it is imported."""

import torch

from flashmoe_science import flash_attention

torch.backends.cuda.enable_flash_sdp(False)


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
