"""Honest: PyTorch raced as a peer, which says so."""

import torch


def attention(query, key, value, *, causal, softmax_scale):
    if query.shape != key.shape:
        raise NotImplementedError("as many heads and keys as queries")
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=softmax_scale
    )


attention.peer_of = "PyTorch"
