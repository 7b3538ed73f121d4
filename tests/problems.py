"""GPUs by their figures, and calls of attention by their sizes, for tests without a GPU."""

from __future__ import annotations

import torch

from flashmoe_science.cuda.attention.problem import Problem
from flashmoe_science.cuda.device import Device

H200 = Device(index=0, architecture="sm_90", multiprocessors=132, l2_bytes=60 << 20)
L4 = Device(index=0, architecture="sm_89", multiprocessors=58, l2_bytes=48 << 20)
T4 = Device(index=0, architecture="sm_75", multiprocessors=40, l2_bytes=4 << 20)


def contiguous(
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int = 64,
    causal: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    *,
    scale: float | None = None,
    return_lse: bool = True,
) -> Problem:
    """A call on contiguous tensors, scaled by 1/√head_dim unless a scale is given."""
    query = (heads * seqlen_q * head_dim, seqlen_q * head_dim, head_dim)
    key = (kv_heads * seqlen_k * head_dim, seqlen_k * head_dim, head_dim)
    return Problem(
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        softmax_scale=head_dim**-0.5 if scale is None else scale,
        return_lse=return_lse,
        query_strides=query,
        key_strides=key,
        value_strides=key,
        output_strides=query,
    )
