"""What a fused `paged_append` is given, and what its kernels are passed: the fields of `append/parameters.cuh`."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch

from flashmoe_science.direct import all_direct
from flashmoe_science.varlen.transform import Rotary

FP8 = torch.float8_e4m3fn
MOST_DIM = 576
MOST_ROWS = 1 << 30
_ROWS, _CACHE = "Q2q", "2Q6qq"
_ROWS_DTYPES = "rows are of one of {}, and all of the same"
ARGUMENTS = struct.Struct(f"{3 * _ROWS}{2 * _CACHE}6Q2q13if")
_SAME_TYPE, _SCALE_GIVEN, _SCALE_CHOSEN = range(3)


class Append(NamedTuple):
    """A call of `paged_append` that was checked; its arguments."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    query: torch.Tensor | None
    """None too where nothing is done to it."""
    rotary: Rotary | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    eps: float

    @property
    def rows(self) -> int:
        """Of heads, over all tokens."""
        heads = 0 if self.query is None else self.query.shape[1]
        tokens, kv_heads, _ = self.key.shape
        return tokens * (heads + 2 * kv_heads)


def why_not(append: Append, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why a kernel for elements of ``dtypes`` does not take a call, as the end of a sentence; None if it does."""
    rotary = append.rotary
    turns, positions = (None, None) if rotary is None else rotary[:2]
    rows = [each for each in (append.query, append.key, append.value) if each is not None]
    caches = [append.key_cache, append.value_cache]
    numbers = [each for each in (turns, append.query_norm, append.key_norm) if each is not None]
    indices = [each for each in (append.slot_mapping, positions) if each is not None]
    scales = [each for each in (append.key_scale, append.value_scale) if each is not None]
    given = (*rows, *caches, *numbers, *indices, *scales)
    if not all_direct(*given):
        return "tensors are of a subclass, or a transform of PyTorch is active"
    dtype = append.key.dtype
    # Loops, for each call asks: a generator takes longer than what it asks.
    if dtype not in dtypes:
        return _ROWS_DTYPES.format(", ".join(map(str, dtypes)))
    for each in rows:
        if each.dtype != dtype:
            return _ROWS_DTYPES.format(", ".join(map(str, dtypes)))
    for each in numbers:
        if each.dtype is not torch.float32 and each.dtype != dtype:
            return "norms and rotary embeddings are float32, or of the rows' dtype"
    for each in (*rows, *caches, *numbers, *indices):
        if each.stride(-1) != 1 and each.shape[-1] > 1:
            return "last dimensions are contiguous"
    device = append.key.device
    for each in given:
        if not each.data_ptr() and each.numel():
            return "tensors have memory"
        if each.device != device:
            return "tensors are on one device"
    if append.query is not None and append.query.shape[::2] != append.key.shape[::2]:
        return "query and key have as many tokens and one head_dim"
    if max(append.key.shape[-1], append.value.shape[-1]) > MOST_DIM:
        return f"dimensions are at most {MOST_DIM}"
    if append.rows >= MOST_ROWS:
        return f"rows of heads are fewer than {MOST_ROWS}"
    return None


def pack_into(buffer: Any, append: Append, query_out: torch.Tensor | None) -> None:
    """All fields, for a call that `why_not` is None for."""
    key, value, query, rotary = append.key, append.value, append.query, append.rotary
    turns, positions = (None, None) if rotary is None else rotary[:2]
    tokens, kv_heads, head_dim = key.shape
    ARGUMENTS.pack_into(
        buffer,
        0,
        *((0, 0, 0) if query is None else _rows(query)),
        *_rows(key),
        *_rows(value),
        *_cache(append.key_cache, append.key_scale),
        *_cache(append.value_cache, append.value_scale),
        _address(query_out),
        _address(append.slot_mapping),
        _address(positions),
        _address(turns),
        _address(append.query_norm),
        _address(append.key_norm),
        *((0, 0) if turns is None else (turns.stride(0), turns.shape[0])),
        tokens,
        0 if query is None else query.shape[1],
        kv_heads,
        head_dim,
        value.shape[-1],
        0 if turns is None else turns.shape[-1],
        append.key_cache.shape[1],
        rotary is not None and rotary.interleaved,
        append.slot_mapping.dtype is torch.int64,
        positions is not None and positions.dtype is torch.int64,
        _is_float(turns),
        _is_float(append.query_norm),
        _is_float(append.key_norm),
        append.eps,
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _is_float(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype is torch.float32


def _rows(rows: torch.Tensor) -> tuple[int, int, int]:
    size = rows.element_size()
    return rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size


def _cache(cache: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, ...]:
    size = cache.element_size()
    page, slot, of_head, _ = cache.stride()
    strides = page * size, slot * size, of_head * size
    if cache.dtype is not FP8:
        return cache.data_ptr(), 0, *strides, 0, 0, 0, _SAME_TYPE
    if scale is None:
        return cache.data_ptr(), 0, *strides, 0, 0, 0, _SCALE_GIVEN
    if scale.dim() > 1:
        return cache.data_ptr(), scale.data_ptr(), *strides, *scale.stride(), _SCALE_CHOSEN
    head = scale.stride(0) if scale.numel() > 1 else 0
    return cache.data_ptr(), scale.data_ptr(), *strides, 0, 0, head, _SCALE_GIVEN
