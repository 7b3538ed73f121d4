"""Tensors of a batch, reproducible from a seed; every slot of a page without a key is NaN, and pages are shuffled.

A cache in FP8 comes with the same keys in the case's dtype, for implementations that read no FP8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cudadent42.base.seeds import derived_seed
from cudadent42.model.dtypes import DTYPES
from cudadent42.operations.attention_varlen.caches import Cache
from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.operations.attention_varlen.tree_masks import tree_mask
from cudadent42.operations.interface import HardInput

MOST_HARD_SCORES = {"cpu": 1 << 20, "cuda": 1 << 29}
"""Largest batch for adversarial values at a timed shape: its float64 reference takes milliseconds on CPU."""
_NAN = float("nan")
_SPARE_COLUMNS = 2
"""Of the block table: they name no page."""


@dataclass(frozen=True)
class VarlenInputs:
    """query (tokens, heads, head_dim); key and value (keys, kv_heads, head_dim or head_dim_v), or in pages."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    """(batch + 1,) int32."""
    seqused_k: Tensor
    """(batch,) int32: how many keys each sequence has."""
    cu_seqlens_k: Tensor
    """(batch + 1,) int32: their sums; where packed keys lie."""
    block_table: Tensor | None
    """(batch, pages) int32; None where keys are packed."""
    slots: Tensor
    """(keys,) int64: where each key of all sequences lies, among rows of keys or slots of pages."""
    key_scale: Tensor | None = None
    """float32, of key in FP8: (), (kv_heads,), or for each key and head: what an element is multiplied with."""
    value_scale: Tensor | None = None
    wide_key: Tensor | None = None
    """key in FP8 times its scale, in the query's dtype."""
    wide_value: Tensor | None = None
    tree_mask: Tensor | None = None
    """(tokens,) int64: see `flashmoe_science.attention_varlen`."""
    sinks: Tensor | None = None
    """(heads,) float32, each a number of the case's dtype."""
    alibi_slopes: Tensor | None = None
    """(heads,) float32."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value

    @property
    def result_like(self) -> Tensor:
        shape = (*self.query.shape[:-1], self.value.shape[-1])
        return self.query if shape == self.query.shape else self.query.new_empty(shape)

    @property
    def buffer_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(self.result_like.shape),)

    @property
    def rows_of_keys(self) -> tuple[Tensor, Tensor]:
        """key and value as rows (slots, kv_heads, their own dim) of the query's dtype: views."""
        key, value = self.caches
        return key.wide_rows, value.wide_rows

    @property
    def caches(self) -> tuple[Cache, Cache]:
        """Of keys and of values."""
        key = Cache(self.key, self.key_scale, self.wide_key)
        return key, Cache(self.value, self.value_scale, self.wide_value)


def input_sets(case: VarlenCase, seed: int, count: int, device: str) -> list[VarlenInputs]:
    """``count`` independent sets."""
    return [random_inputs(case, seed, index, device) for index in range(count)]


def random_inputs(case: VarlenCase, seed: int, index: int, device: str) -> VarlenInputs:
    """Standard normal values, rounded to the case's dtype. ``index`` numbers the sets of one case."""
    generator = torch.Generator(device=device).manual_seed(derived_seed(seed, case.id, index))
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)

    def starts(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    keys = sum(case.seqlens_k)
    table, slots = _pages(case, index, device)
    query = normal(case.tokens, case.num_heads, case.head_dim)
    rows = [normal(keys, case.num_kv_heads, dim) for dim in (case.head_dim, case.head_dim_v)]
    key, value = (Cache.of(case, each, slots) for each in rows)
    return VarlenInputs(
        query=query,
        key=key.stored,
        value=value.stored,
        cu_seqlens_q=starts(case.seqlens_q),
        seqused_k=torch.tensor(case.seqlens_k, dtype=torch.int32, device=device),
        cu_seqlens_k=starts(case.seqlens_k),
        block_table=table,
        slots=slots,
        key_scale=key.scale,
        value_scale=value.scale,
        wide_key=key.wide,
        wide_value=value.wide,
        tree_mask=tree_mask(case, device),
        sinks=normal(case.num_heads).float() if case.sinks else None,
        alibi_slopes=alibi_slopes(case, device),
    )


def alibi_slopes(case: VarlenCase, device: str) -> Tensor | None:
    """2^(-8 h / heads) for h from 1 on, as Press et al. (2021, arXiv:2108.12409) have them for a power of two; (heads,)
    float32. A model has them once for all, so no call has others."""
    if not case.alibi:
        return None
    heads = torch.arange(1, case.num_heads + 1, dtype=torch.float32, device=device)
    return torch.exp2(-8.0 / case.num_heads * heads)


def _pages(case: VarlenCase, index: int, device: str) -> tuple[Tensor | None, Tensor]:
    """The block table, whose pages lie in any order, and where each key lies."""
    keys = sum(case.seqlens_k)
    if not case.page_size:
        return None, torch.arange(keys, dtype=torch.int64, device=device)
    cpu = torch.device("cpu")
    generator = torch.Generator(cpu).manual_seed(derived_seed(case.draw, case.id, index))
    order = torch.randperm(sum(case.pages), generator=generator, dtype=torch.int64, device=cpu)
    table = torch.full(
        (case.batch, max(case.pages, default=0) + _SPARE_COLUMNS), -1, dtype=torch.int32, device=cpu
    )
    slots = []
    first = 0
    for sequence, (pages, length) in enumerate(zip(case.pages, case.seqlens_k, strict=True)):
        own = order[first : first + pages]
        table[sequence, :pages] = own.int()
        position = torch.arange(length, dtype=torch.int64, device=cpu)
        slots.append(own[position // case.page_size] * case.page_size + position % case.page_size)
        first += pages
    return table.to(device), torch.cat(slots).to(device)


def refresh(case: VarlenCase, inputs: VarlenInputs, seed: int) -> tuple[Tensor, ...]:
    """New standard normal values in the place of all queries, keys and values; slots without a key stay NaN."""
    generator = torch.Generator(device=inputs.query.device).manual_seed(derived_seed(seed, case.id))
    inputs.query.normal_(generator=generator)
    written = [inputs.query]
    for cache in inputs.caches:
        shape = (inputs.slots.shape[0], *cache.rows.shape[1:])
        rows = torch.empty(shape, dtype=inputs.query.dtype, device=inputs.query.device)
        written += cache.write(inputs.slots, rows.normal_(generator=generator))
    return tuple(written)


# ---------------------------------------------------------------- inputs that are hard to get right

Change = Callable[[VarlenInputs], VarlenInputs]


def hard_inputs(dtype: str) -> tuple[HardInput, ...]:
    """Every length that goes wrong, and values that do."""

    def hard(kind: str, change: Change = _unchanged, **numbers: float | bool | str) -> HardInput:
        usual = VarlenCase(kind, dtype, 5, 4, 2, longest=260, shortest=1, head_dim=64, page_size=16)
        return _hard_input(kind, replace(usual, **numbers), change)  # type: ignore[arg-type]

    return (
        hard("decode"),
        hard("decode_packed", page_size=0),
        hard("pages_of_one", page_size=1),
        hard("odd_pages", page_size=48),
        hard("page_exactly_full", longest=64, shortest=64, page_size=64),
        hard("one_key_over_a_page", longest=65, shortest=65, page_size=64),
        hard("empty_sequences", shortest=0, longest=3, batch=8),
        hard("speculative", queries=4, longest=300),
        hard("more_queries_than_keys", queries=70, longest=60),
        hard("prefill", queries=0, longest=200),
        hard("prefill_packed", queries=0, longest=200, page_size=0),
        hard("prefill_full", queries=0, longest=150, causal=False),
        hard("mixed", chunks=2, chunk=67, longest=300),
        hard("trees", queries=8, longest=300, tree="random"),
        hard("trees_longer_than_keys", queries=9, longest=12, tree="random"),
        hard("window", window=20, longest=300),
        hard("window_prefill", window=20, queries=0, longest=200),
        hard("sinks", sinks=True, queries=2),
        hard("sinks_window", sinks=True, window=20, longest=300),
        hard("sinks_more_queries_than_keys", sinks=True, queries=70, longest=60),
        hard("large_sinks", _large_sinks, sinks=True, queries=3),
        hard("softcap", softcap=3.0, queries=2),
        hard("softcap_window_prefill", softcap=3.0, window=20, queries=0, longest=200),
        hard("softcap_sinks_packed", softcap=3.0, sinks=True, page_size=0),
        hard("alibi", alibi=True, queries=3, longest=300),
        hard("alibi_prefill", alibi=True, queries=0, longest=200),
        hard("alibi_full_packed", alibi=True, queries=0, longest=150, causal=False, page_size=0),
        hard("alibi_more_queries_than_keys", alibi=True, queries=70, longest=60),
        hard("alibi_window_softcap_sinks", alibi=True, window=20, softcap=3.0, sinks=True, queries=2),
        hard("narrow_values", value_dim=32),
        hard("narrow_values_prefill", head_dim=96, value_dim=64, queries=0, longest=150),
        hard("narrow_values_packed", head_dim=192, value_dim=128, queries=0, longest=90, page_size=0),
        hard("wide_values", value_dim=128, queries=2),
        hard("one_key_head", num_heads=8, num_kv_heads=1),
        hard("as_many_key_heads", num_heads=3, num_kv_heads=3),
        hard("wide_head", head_dim=128, queries=3),
        hard("large_logits", _large_logits),
        hard("nan_key_prefill", _nan_key, queries=0, longest=120),
    )


_LENGTHS_OF_FP8 = (
    *("decode", "decode_packed", "pages_of_one", "odd_pages", "page_exactly_full", "one_key_over_a_page"),
    *("empty_sequences", "speculative", "window", "prefill"),
)
"""Kinds of `hard_inputs`."""


def hard_cases(cases: Sequence[VarlenCase], device: str) -> tuple[HardInput, ...]:
    """Hard values at shapes that will be timed: for each kind of batch the largest that is not too large."""
    most = MOST_HARD_SCORES[device.partition(":")[0]]
    largest: dict[tuple[object, ...], VarlenCase] = {}
    for case in sorted(cases, key=lambda case: case.scores):
        if 0 < case.scores <= most and not case.fp8_scales:
            lengths = case.page_size > 0, case.queries, case.chunks > 0
            dims = case.head_dim, case.value_dim
            kind = (case.dtype, *dims, *lengths, case.tree, case.sinks, case.softcap, case.alibi)
            largest[kind] = case
    changes = {"large_logits": _large_logits, "nan_key": _nan_key}
    return (
        *(
            _hard_input(kind, replace(case, name=f"{kind}@{case.name}"), change)
            for case in largest.values()
            for kind, change in changes.items()
        ),
        *_hard_lengths_of_fp8(cases),
    )


def _hard_lengths_of_fp8(cases: Sequence[VarlenCase]) -> Iterator[HardInput]:
    """Of `hard_inputs`, those whose lengths are hard, over caches in FP8 with the scales that the cases have."""
    for dtype, scales in sorted({(case.dtype, case.fp8_scales) for case in cases if case.fp8_scales}):
        for each in hard_inputs(dtype):
            assert isinstance(each.case, VarlenCase)
            if each.kind in _LENGTHS_OF_FP8:
                kind = f"{each.kind}_fp8_{scales}"
                yield _hard_input(kind, replace(each.case, name=kind, fp8_scales=scales), _unchanged)


def _hard_input(kind: str, case: VarlenCase, change: Change) -> HardInput:
    return HardInput(kind, case, partial(_changed, case, change))


def _changed(case: VarlenCase, change: Change, seed: int, device: str) -> VarlenInputs:
    return change(random_inputs(case, seed, 0, device))


def _unchanged(inputs: VarlenInputs) -> VarlenInputs:
    return inputs


def _large_logits(inputs: VarlenInputs) -> VarlenInputs:
    """Scores in the hundreds: exp overflows unless the maximum is taken off first."""
    return replace(inputs, query=inputs.query * 16, key=inputs.key * 8)


def _large_sinks(inputs: VarlenInputs) -> VarlenInputs:
    """Of every other head so large that its rows come to nothing, of the others so small that they are as without."""
    assert inputs.sinks is not None
    sinks = torch.full_like(inputs.sinks, 200.0)
    sinks[::2] = -200.0
    return replace(inputs, sinks=sinks)


def _nan_key(inputs: VarlenInputs) -> VarlenInputs:
    """In the middle of the first sequence: rows that see it are NaN, no other."""
    key = inputs.key.clone()
    key.view(-1, *key.shape[-2:])[inputs.slots[int(inputs.seqused_k[0]) // 2], 0] = _NAN
    return replace(inputs, key=key)
