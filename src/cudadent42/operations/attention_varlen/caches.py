"""Keys or values of a batch where a call finds them: packed or in pages, in the case's dtype or in FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cudadent42.operations.attention_varlen.case import VarlenCase

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of FP8
_EXPECTED = 4.5
"""Largest magnitude that a scale for many keys is made for. Normal values beyond it become the largest of FP8."""
_HEADS_DIFFER = 0.25
"""Scales of heads lie up to this share above that of all, so that taking another head's is seen."""
_SMALLEST_SCALE = 2.0**-100  # of a key of zeros


class Cache(NamedTuple):
    """What does not hold a key is NaN, scales of keys included."""

    stored: Tensor
    """(keys, kv_heads, dim), or (pages, page_size, kv_heads, dim), where dim is that of keys or that of values."""
    scale: Tensor | None = None
    """float32, of FP8: (), (kv_heads,), or ``stored.shape[:-1]``."""
    wide: Tensor | None = None
    """``stored`` in FP8 times its scale, in 16 bits."""

    @classmethod
    def of(cls, case: VarlenCase, rows: Tensor, slots: Tensor) -> Cache:
        """With rows (keys, kv_heads, dim) at these slots."""
        if not case.page_size and not case.fp8_scales:
            return cls(rows)
        _, heads, dim = rows.shape
        shape: tuple[int, ...] = (len(rows), heads, dim)
        if case.page_size:
            shape = (sum(case.pages), case.page_size, heads, dim)
        wide = torch.full(shape, torch.nan, dtype=rows.dtype, device=rows.device)
        cache = cls(wide)
        if case.fp8_scales:
            cache = cls(wide.to(FP8), _scales(case.fp8_scales, shape, rows.device), wide)
        cache.write(slots, rows)
        return cache

    @property
    def rows(self) -> Tensor:
        """``stored`` as (slots, kv_heads, dim): a view."""
        return self.stored.view(-1, *self.stored.shape[-2:])

    @property
    def wide_rows(self) -> Tensor:
        """The same keys in the case's dtype."""
        wide = self.stored if self.wide is None else self.wide
        return wide.view(-1, *wide.shape[-2:])

    def write(self, slots: Tensor, rows: Tensor) -> list[Tensor]:
        """Rows (keys, kv_heads, dim) go to these slots, quantised where the cache is. Returns what they are in."""
        if self.scale is None or self.wide is None:
            self.rows[slots] = rows
            return [self.stored]
        written = [self.stored, self.wide]
        scale = self.scale
        if scale.dim() > 1:
            written.append(scale)
            scale = (rows.float().abs().amax(-1) / _LARGEST).clamp(min=_SMALLEST_SCALE)
            self.scale.view(-1, scale.shape[-1])[slots] = scale
        codes = (rows.float() / scale[..., None]).clamp(-_LARGEST, _LARGEST).to(FP8)
        self.rows.view(torch.uint8)[slots] = codes.view(torch.uint8)
        self.wide_rows[slots] = (codes.float() * scale[..., None]).to(rows.dtype)
        return written

    def exact(self, slots: Tensor, head: int) -> Tensor:
        """What lies there, in float64: (keys, dim)."""
        rows = self.rows[slots, head].double()
        if self.scale is None:
            return rows
        scale = self.scale.double()
        if scale.dim() > 1:
            return rows * scale.view(-1, scale.shape[-1])[slots, head, None]
        return rows * (scale[head] if scale.dim() else scale)


def _scales(kind: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    usual = _EXPECTED / _LARGEST
    heads = shape[-2]
    if kind == "all":
        return torch.tensor(usual, dtype=torch.float32, device=device)
    if kind == "head":
        return torch.linspace(usual, (1 + _HEADS_DIFFER) * usual, heads, dtype=torch.float32, device=device)
    return torch.full(shape[:-1], torch.nan, dtype=torch.float32, device=device)
