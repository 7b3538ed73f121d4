"""Queries, keys and the tables that rotate them, as models of transformers make and lay them out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    batch: int = 2
    tokens: int = 5
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    one_table: bool = False
    """Of half a head, as GPT-OSS has it."""
    shared: bool = False
    """Whether all sequences have the same positions."""
    joined: bool = False
    """Whether queries and keys are views of one projection."""

    def make(self, dtype: torch.dtype, device: str = "cpu") -> Tensors:
        generator = torch.Generator().manual_seed(self.tokens)

        def projected(heads: int) -> torch.Tensor:
            return torch.randn(self.batch, self.tokens, heads, self.head_dim, generator=generator)

        if self.joined:
            whole = projected(self.heads + 2 * self.kv_heads).to(device, dtype)
            query, key, _ = whole.split((self.heads, self.kv_heads, self.kv_heads), 2)
        else:
            query, key = (projected(heads).to(device, dtype) for heads in (self.heads, self.kv_heads))
        positions = torch.randint(
            0, 4096, (1 if self.shared else self.batch, self.tokens), generator=generator
        )
        frequencies = 10000 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = positions[..., None] * frequencies
        if not self.one_table:
            angles = torch.cat((angles, angles), -1)
        cosine, sine = (each.to(device, dtype) for each in (angles.cos(), angles.sin()))
        return query.transpose(1, 2), key.transpose(1, 2), cosine, sine


CASES = {
    "heads of two sequences": Case(),
    "one token": Case(batch=1, tokens=1, heads=32, kv_heads=4, head_dim=128),
    "heads that no group divides": Case(heads=5, kv_heads=1, tokens=3),
    "one table for both halves": Case(one_table=True),
    "shared positions": Case(shared=True),
    "one projection": Case(joined=True, head_dim=96),
    "more than a block": Case(batch=1, tokens=33, heads=8, kv_heads=8, head_dim=32),
}


def exact(tensors: Tensors, inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, element by element."""
    query, key, cosine, sine = (each.double().cpu() for each in tensors)
    half = query.shape[3] // 2
    turn = -1.0 if inverse else 1.0
    results = []
    for each in (query, key):
        result = torch.empty_like(each)
        for i in range(half):
            x, y = each[..., i], each[..., half + i]
            j = half + i if cosine.shape[2] == 2 * half else i
            c, s, c2, s2 = (table[:, None, :, k] for k in (i, j) for table in (cosine, sine))
            if inverse:  # the transposed matrix
                s, s2 = s2, s
            result[..., i] = x * c - turn * y * s
            result[..., half + i] = y * c2 + turn * x * s2
        results.append(result)
    return results[0], results[1]


def composed(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """As models of transformers compute it."""
    query, key, cosine, sine = tensors
    half = query.shape[3] // 2
    if cosine.shape[2] == half:
        cosine, sine = torch.cat((cosine, cosine), -1), torch.cat((sine, sine), -1)
    cosine, sine = cosine[:, None], sine[:, None]

    def rotated(each: torch.Tensor) -> torch.Tensor:
        turned = torch.cat((-each[..., half:], each[..., :half]), -1)
        return (each * cosine) + (turned * sine)

    return rotated(query), rotated(key)
