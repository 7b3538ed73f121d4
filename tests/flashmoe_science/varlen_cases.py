"""Batches for attention over sequences of any lengths, packed and in pages, with NaN wherever nothing belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flashmoe_science.varlen import launch

if TYPE_CHECKING:
    import pytest  # which the programs under compute-sanitizer do without

Call = dict[str, torch.Tensor]
NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """Heads and dimensions of a batch; and how many queries and keys its sequences have."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 0
    """0: head_dim."""
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Contents:
    """Query rows of all sequences, and the keys and values of each."""

    query: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


def contents(shape: Shape, seed: int = 0) -> Contents:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(shape.dtype)

    value_dim = shape.value_dim or shape.head_dim
    return Contents(
        normal(sum(shape.queries), shape.heads, shape.head_dim),
        tuple(normal(length, shape.kv_heads, shape.head_dim) for length in shape.keys),
        tuple(normal(length, shape.kv_heads, value_dim) for length in shape.keys),
    )


def bounds(shape: Shape) -> dict[str, int]:
    return {"max_seqlen_q": max(shape.queries, default=0), "max_seqlen_k": max(shape.keys, default=0)}


def packed(shape: Shape, seed: int = 0, *, spare_rows: int = 0, spare_keys: int = 0) -> Call:
    """A call of packed keys. Spare query rows are behind the last sequence, spare keys behind each (with seqused_k)."""
    given = contents(shape, seed)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for key, value in zip(given.keys, given.values, strict=True):
        parts.append(
            tuple(
                torch.cat([part, part.new_full((spare_keys, *part.shape[1:]), NAN)]) for part in (key, value)
            )
        )  # type: ignore[arg-type]
    value_dim = shape.value_dim or shape.head_dim
    empty = given.query.new_empty
    call = {
        "query": _with_spare_rows(given.query, spare_rows),
        "key": torch.cat([empty(0, shape.kv_heads, shape.head_dim), *(key for key, _ in parts)]),
        "value": torch.cat([empty(0, shape.kv_heads, value_dim), *(value for _, value in parts)]),
        "cu_seqlens_q": _cumulative(shape.queries),
        "cu_seqlens_k": _cumulative([length + spare_keys for length in shape.keys]),
    }
    if spare_keys:
        call["seqused_k"] = torch.tensor(shape.keys, dtype=torch.int32)
    return call


def paged(
    shape: Shape,
    page_size: int,
    seed: int = 0,
    *,
    layout: str = "NHD",
    spare_rows: int = 0,
    spare_columns: int = 2,
    spare_pages: int = 3,
    garbage: int = -1,
) -> Call:
    """A call of keys in pages that are shuffled; slots without a key are NaN, the table behind each length is garbage.

    Args:
        layout: NHD, HND (heads before tokens), joint (key and value of one tensor, the page's dimension second), or
            interleaved (key and value of one tensor beside each other in each page).
    """
    given = contents(shape, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    pages_of = [-(-length // page_size) for length in shape.keys]
    pages = sum(pages_of) + spare_pages
    key, value = _cache(pages, page_size, shape, layout)
    order = torch.randperm(pages, generator=generator)
    table = torch.full(
        (len(shape.keys), max(pages_of, default=0) + spare_columns), garbage, dtype=torch.int32
    )
    taken = 0
    for index, count in enumerate(pages_of):
        table[index, :count] = order[taken : taken + count].int()
        taken += count
        position = torch.arange(shape.keys[index])
        page = table[index].long()[position // page_size]
        key[page, position % page_size] = given.keys[index]
        value[page, position % page_size] = given.values[index]
    return {
        "query": _with_spare_rows(given.query, spare_rows),
        "key": key,
        "value": value,
        "cu_seqlens_q": _cumulative(shape.queries),
        "block_table": table,
        "seqused_k": torch.tensor(shape.keys, dtype=torch.int32),
    }


def drawn(shape: Shape, page_size: int, seed: int, extras: Sequence[str]) -> Call:
    """A call over pages, or packed with a page size of 0, with what ``extras`` names: rows (of no sequence), sinks."""
    spare = 3 if "rows" in extras else 0
    call = (
        paged(shape, page_size, seed, spare_rows=spare, garbage=1 << 30)
        if page_size
        else packed(shape, seed, spare_rows=spare, spare_keys=spare)
    )
    if "sinks" in extras:
        call["sinks"] = 3 * torch.randn(shape.heads, generator=torch.Generator().manual_seed(seed))
        call["sinks"][0] = -torch.inf
    return call


def picked(call: Call, shape: Shape, *indices: int) -> Call:
    """A call of some of the sequences of ``call``, whose rows and lengths are those of ``shape``."""

    def rows(tensor: torch.Tensor, name: str, lengths: Sequence[int]) -> torch.Tensor:
        starts = call[name].tolist()
        return torch.cat([tensor[:0], *(tensor[starts[i] : starts[i] + lengths[i]] for i in indices)])

    others = {name: call[name][list(indices)] for name in ("block_table", "seqused_k") if name in call}
    few = {**call, **others, "query": rows(call["query"], "cu_seqlens_q", shape.queries)}
    lengths = {"cu_seqlens_q": [shape.queries[i] for i in indices]}
    if "cu_seqlens_k" in call:
        each_key = [name for name in ("key_scale", "value_scale") if name in call and call[name].dim() > 1]
        few |= {name: rows(call[name], "cu_seqlens_k", shape.keys) for name in ("key", "value", *each_key)}
        lengths["cu_seqlens_k"] = [shape.keys[i] for i in indices]
    return few | {name: _cumulative(each).to(call[name].device) for name, each in lengths.items()}


def quantized(call: Call, scales: str) -> tuple[Call, Call]:
    """The call with its cache in FP8, and the same with the widened cache in float64: what is right for the first.

    Args:
        scales: one, of each head, of each key, or none.
    """
    small, wide = dict(call), dict(call)
    for name in ("key", "value"):
        cache = call[name]
        rows = cache.float()
        if scales == "each key":
            scale = rows.nan_to_num().abs().amax(-1).clamp(min=1e-3) / 400
            scale = torch.where(rows.isnan().any(-1), NAN, scale)  # of what nobody sees
        elif scales == "each head":
            scale = torch.linspace(0.01, 0.02, cache.shape[-2])
        else:
            scale = torch.tensor(0.0125)
        if scales == "none":
            codes = rows.to(torch.float8_e4m3fn)
            widened = codes.double()
        else:
            codes = (rows / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            widened = codes.double() * scale[..., None].double()
            small[f"{name}_scale"] = scale
        small[name] = torch.empty_strided(cache.shape, cache.stride(), dtype=codes.dtype).copy_(codes)
        wide[name] = widened
    return small, wide


def cache_beyond_32_bits(queries: int, page_size: int = 64) -> tuple[Call, Call]:
    """A call of one sequence of 150 keys on a GPU whose pages are 2.6e9 elements, and the same with few on the CPU."""
    slots, heads, head_dim = 1_280_000, 8, 256
    pages, taken_pages = slots // page_size, -(-150 // page_size)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    key = torch.full((pages, page_size, heads, head_dim), NAN, **options)  # type: ignore[call-overload]
    taken = torch.linspace(pages - 1, 0, taken_pages, dtype=torch.float64, device="cuda").long()
    key[taken] = torch.randn(taken_pages, page_size, heads, head_dim, **options)  # type: ignore[call-overload]
    call = {
        "query": torch.randn(queries, heads, head_dim, **options),  # type: ignore[call-overload]
        "key": key,
        "value": key,
        "cu_seqlens_q": torch.tensor([0, queries], dtype=torch.int32, device="cuda"),
        "block_table": taken.int()[None],
        "seqused_k": torch.tensor([150], dtype=torch.int32, device="cuda"),
    }
    few = key[taken].cpu()
    near = {name: tensor.cpu() for name, tensor in call.items() if name not in ("key", "value")}
    table = torch.arange(taken_pages, dtype=torch.int32)[None]
    near |= {"key": few, "value": few, "block_table": table}
    return call, near


def to(call: Call, device: torch.device | str) -> Call:
    """The call on another device, with the same strides."""
    return {name: _moved(tensor, device) for name, tensor in call.items()}


def _moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def _cache(pages: int, page_size: int, shape: Shape, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    value_dim = shape.value_dim or shape.head_dim
    dimensions = shape.head_dim, value_dim
    nan = torch.tensor(NAN, dtype=shape.dtype)
    if layout == "NHD":
        key, value = (nan.repeat(pages, page_size, shape.kv_heads, dimension) for dimension in dimensions)
    elif layout == "HND":
        key, value = (
            nan.repeat(pages, shape.kv_heads, page_size, dimension).transpose(1, 2)
            for dimension in dimensions
        )
    elif layout == "joint":
        assert shape.head_dim == value_dim
        key, value = nan.repeat(2, pages, page_size, shape.kv_heads, value_dim).unbind(0)
    else:
        assert layout == "interleaved"
        both = nan.repeat(pages, page_size, shape.kv_heads, sum(dimensions))
        key, value = both.split(dimensions, -1)
    return key, value


def _cumulative(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _with_spare_rows(query: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([query, query.new_full((rows, *query.shape[1:]), NAN)])


def forget_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been called yet: what a test replaces is asked for anew."""
    monkeypatch.setattr(launch, "_runs", {})
    monkeypatch.setattr(launch, "of_thread", launch._OfThread())
