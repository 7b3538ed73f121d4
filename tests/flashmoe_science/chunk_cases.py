"""Chunked local attention: batches whose rows stand on either side of a chunk's end, with NaN in what nobody sees."""

from __future__ import annotations

import torch
from varlen_cases import NAN, Call, Shape, packed, paged

CHUNK = 48
LENGTHS = {
    "decode": ((1,) * 8, (0, 1, 47, 48, 49, 96, 97, 300)),
    "steps of 4": ((4,) * 6, (4, 47, 49, 51, 98, 290)),
    "more queries than keys": ((6, 8, 5), (2, 0, 60)),
    "prompts": ((130, 48, 49, 1), (130, 48, 49, 97)),
    "chunks of prompts": ((70, 90, 33), (200, 91, 145)),
}
FEW = ("decode", "steps of 4", "more queries than keys")
"""Those that the decode kernel takes."""


def shape_of(lengths: str, **changes: object) -> Shape:
    usual = {"heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": torch.bfloat16}
    return Shape(*LENGTHS[lengths], **{**usual, **changes})  # type: ignore[arg-type]


def call_of(shape: Shape, page_size: int, chunk: int = CHUNK) -> Call:
    """Packed where page_size is 0. Keys of chunks before a sequence's first query's are NaN, and so are their pages."""
    if not page_size:
        return packed(shape, spare_rows=2)
    call = paged(shape, page_size, garbage=1 << 30)
    for sequence, (queries, keys) in enumerate(zip(shape.queries, shape.keys, strict=True)):
        hidden = max(0, keys - queries) // chunk * chunk if queries else keys
        for position in range(hidden):
            page = call["block_table"][sequence, position // page_size]
            for name in ("key", "value"):
                call[name][page, position % page_size] = NAN
        call["block_table"][sequence, : hidden // page_size] = -1
    return call


def chunk_by_chunk(call: Call, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of packed sequences by itself, against the keys of its chunk up to its own, in float64."""
    from varlen_reference import exact_varlen

    out = torch.zeros(*call["query"].shape[:2], call["value"].shape[-1], dtype=torch.float64)
    lse = torch.full(call["query"].shape[:2], -torch.inf, dtype=torch.float64)
    starts = call["cu_seqlens_q"].tolist()
    key_starts = call["cu_seqlens_k"].tolist()
    for first, end, key, key_end in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        offset = (key_end - key) - (end - first)
        for token in range(max(first, first - offset), end):
            position = token - first + offset
            seen = slice(key + position // chunk * chunk, key + position + 1)
            one = {
                "query": call["query"][token : token + 1],
                "key": call["key"][seen],
                "value": call["value"][seen],
                "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
                "cu_seqlens_k": torch.tensor([0, seen.stop - seen.start], dtype=torch.int32),
            }
            out[token], lse[token] = (each[0] for each in exact_varlen(**one, causal=False))
    return out, lse
