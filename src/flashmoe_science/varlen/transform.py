"""What happens to rows between a model's projections and a cache: norm, rotary embedding, quantisation. In float32."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmoe_science.errors import InputError

LARGEST = 448.0
"""Of torch.float8_e4m3fn."""
_SMALLEST_SCALE = 2.0**-100
"""Of a row of zeros."""


class Rotary(NamedTuple):
    """Rotary embedding: pairs of elements are turned by an angle that grows with the position.

    Reference: Su et al., RoFormer (2021), arXiv:2104.09864.
    """

    cos_sin: torch.Tensor
    """(positions, rotary_dim) floating: cosines of rotary_dim / 2 angles, then their sines. Elements of a head from
    rotary_dim on are not turned.
    """
    positions: torch.Tensor
    """(tokens,) int32 or int64."""
    interleaved: bool = False
    """Pairs are elements 2i and 2i + 1; else i and i + rotary_dim / 2."""


def transformed(
    name: str, rows: torch.Tensor, weight: torch.Tensor | None, rotary: Rotary | None, eps: float
) -> torch.Tensor:
    """(tokens, heads, head_dim), normed by its weight and rotated, in float32 unless neither is asked for.

    Raises InputError for a weight or an embedding that does not fit.
    """
    if weight is None and rotary is None:
        return rows
    check_transform(name, rows, weight, rotary)
    result = rows.float()
    if weight is not None:
        result = result * torch.rsqrt(result.square().mean(-1, keepdim=True) + eps) * weight.float()
    return result if rotary is None else _rotated(result, rotary)


def _rotated(rows: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cos_sin, positions, interleaved = rotary
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[positions.long()].float()[:, None].chunk(2, -1)
    turned, rest = rows[..., :rotary_dim], rows[..., rotary_dim:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, rest], -1)


def check_transform(
    name: str, rows: torch.Tensor, weight: torch.Tensor | None, rotary: Rotary | None
) -> None:
    """InputError unless rows (tokens, heads, head_dim) can be normed by the weight and rotated."""
    if weight is not None and tuple(weight.shape) != rows.shape[-1:]:
        raise InputError(f"{name}_norm has shape {tuple(weight.shape)}; expected ({rows.shape[-1]},)")
    if rotary is None:
        return
    cos_sin, positions, _ = rotary
    rotary_dim = cos_sin.shape[-1] if cos_sin.dim() else 0
    if cos_sin.dim() != 2 or rotary_dim % 2 or rotary_dim > rows.shape[-1]:
        raise InputError(
            f"cos_sin has shape {tuple(cos_sin.shape)}; expected (positions, rotary_dim), with an even rotary_dim "
            f"up to {rows.shape[-1]}"
        )
    if tuple(positions.shape) != tuple(rows.shape[:1]):
        raise InputError(
            f"positions has shape {tuple(positions.shape)}; expected ({rows.shape[0]},), one for each token"
        )
    if positions.dtype not in (torch.int32, torch.int64):
        raise InputError(f"positions has dtype {positions.dtype}; expected int32 or int64")
    if positions.device.type == "cpu" and positions.numel():
        lowest, highest, rows_of_angles = int(positions.min()), int(positions.max()), cos_sin.shape[0]
        if lowest < -rows_of_angles or highest >= rows_of_angles:
            raise InputError(
                f"positions names row {lowest if lowest < -rows_of_angles else highest} of cos_sin; expected rows "
                f"below {rows_of_angles}"
            )


def quantised(rows: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows (tokens, heads, dim) in FP8; with a scale for each key and head also theirs, (tokens, heads) float32.

    Args:
        scale: (), (1,) or (heads,), by which rows are divided; (pages, page_size, heads): each row's is chosen; None:
            1.
    """
    rows = rows.float()
    chosen = None
    if scale is not None and scale.dim() > 1:
        chosen = (rows.abs().amax(-1) / LARGEST).clamp(min=_SMALLEST_SCALE)
        rows = rows / chosen[..., None]
    elif scale is not None:
        rows = rows / scale[..., None]
    return rows.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), chosen
