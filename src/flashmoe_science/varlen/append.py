"""New keys and values written into the pages of a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science.arguments import check_dense, check_flag, is_finite, shown
from flashmoe_science.cpu import append as cpu
from flashmoe_science.cuda.varlen import append as cuda
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.append_arguments import Append
from flashmoe_science.varlen.arguments import FP8, check_scale
from flashmoe_science.varlen.transform import Rotary, check_transform, quantised, transformed

_CONTIGUOUS = torch.contiguous_format
_WITH_GRADIENT = (
    "an argument requires a gradient, and paged_append writes caches in place, without one; "
    "call it under torch.no_grad()"
)


def paged_append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor | None:
    """Write rows of keys and values into slots of a paged cache, in place; before that, norm, rotate and quantise them.

    One kernel on the CPU, and one launch on CUDA; FLASHMOE_CUDA_APPEND=composed asks for PyTorch's operations there.
    Nothing is synchronised, so a CUDA graph can capture it after one call of that dtype. Kernels take rows and caches
    whose last dimension is contiguous, with norms and embeddings in float32 or the rows' dtype; others are composed.

    Args:
        key: (tokens, kv_heads, head_dim).
        value: (tokens, kv_heads, value_dim).
        key_cache: (pages, page_size, kv_heads, head_dim), any strides, of key's dtype or torch.float8_e4m3fn.
        value_cache: (pages, page_size, kv_heads, value_dim), any strides, of value's dtype or torch.float8_e4m3fn.
        slot_mapping: (tokens,) int32 or int64: page * page_size + position in the page; negative: the row is not
            written. No slot twice.
        key_scale, value_scale: float32, of a cache of FP8, as `attention_varlen` takes them. () or (kv_heads,): rows
            are divided by it, and what is beyond 448 becomes 448. (pages, page_size, kv_heads): each row's scale is
            chosen, its largest magnitude / 448, and written there. None: 1.
        query: (tokens, heads, head_dim): normed and rotated as keys are, and returned.
        rotary: rotary embedding of query and key.
        query_norm, key_norm: (head_dim,) weights of a root-mean-square norm of each head, before it is rotated.
        eps: of the norms.

    Returns:
        The query, new memory of its dtype, computed in float32 and rounded once; itself where it is neither normed nor
        rotated; None if it was not given.

    Raises:
        InputError: shapes, dtypes or devices that do not fit together; a tensor that requires a gradient; on the CPU
            also a slot that is not there. On CUDA slots and positions are the caller's to keep, as no kernel reads them
            back: one that is not there reads or writes memory that is not the cache's.
    """
    if rotary is not None and not isinstance(rotary, Rotary):
        raise InputError(f"rotary is {shown(rotary)}; expected a flashmoe_science.varlen.transform.Rotary")
    if not is_dynamo_compiling():
        _check_options(rotary, eps)
        _check_tensors(
            {
                "key": key,
                "value": value,
                "key_cache": key_cache,
                "value_cache": value_cache,
                "slot_mapping": slot_mapping,
                **({} if rotary is None else {"cos_sin": rotary.cos_sin, "positions": rotary.positions}),
            },
            {
                "query": query,
                "query_norm": query_norm,
                "key_norm": key_norm,
                "key_scale": key_scale,
                "value_scale": value_scale,
            },
        )
    _check(key, value, key_cache, value_cache, slot_mapping)
    check_scale("key_scale", key_scale, key_cache)
    check_scale("value_scale", value_scale, value_cache)
    _check_chosen("key_scale", key_scale, key_cache)
    _check_chosen("value_scale", value_scale, value_cache)
    turns = None if rotary is None else rotary.cos_sin
    others = (query, query_norm, key_norm, turns, key_scale, value_scale)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in others):
        raise InputError(_WITH_GRADIENT)
    check_transform("key", key, key_norm, rotary)
    if query is not None:
        check_transform("query", query, query_norm, rotary)
    append = Append(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale,
        value_scale,
        query if query_norm is not None or rotary is not None else None,
        rotary,
        query_norm,
        key_norm,
        eps,
    )
    run = _kernel_for(append)
    if run is None:
        result = composed(append)
    else:
        result = None if append.query is None else torch.empty_like(append.query, memory_format=_CONTIGUOUS)
        run(append, result)
    return query if append.query is None else result


def composed(append: Append) -> torch.Tensor | None:
    """The query of a call that was checked, and its rows written, by PyTorch's operations."""
    query, rotary, eps = append.query, append.rotary, append.eps
    rotated_key = transformed("key", append.key, append.key_norm, rotary, eps)
    rotated_query = None if query is None else transformed("query", query, append.query_norm, rotary, eps)
    if append.key.shape[0]:
        pages = _Slots(append.slot_mapping, append.key_cache.shape[1])
        for rows, cache, scale in (
            (rotated_key, append.key_cache, append.key_scale),
            (append.value, append.value_cache, append.value_scale),
        ):
            if cache.dtype is not FP8:
                pages.write(cache, rows.to(cache.dtype))
                continue
            codes, scales = quantised(rows, scale)
            pages.write(cache.view(torch.uint8), codes.view(torch.uint8))
            if scale is not None and scales is not None:
                pages.write(scale, scales)
    return None if rotated_query is None or query is None else rotated_query.to(query.dtype)


def _kernel_for(append: Append) -> Callable[[Append, torch.Tensor | None], None] | None:
    """What makes a call in one launch; None where nothing does."""
    if is_dynamo_compiling() or not append.rows:
        return None
    if append.key.is_cpu:
        return cpu.run if cpu.takes(append) else None
    if append.key.is_cuda and cuda.is_asked_for() and cuda.takes(append):
        return cuda.run
    return None


class _Slots:
    """Where rows go."""

    def __init__(self, slot_mapping: torch.Tensor, page_size: int) -> None:
        slots = slot_mapping.long()
        written = slots >= 0
        self._some: torch.Tensor | None = None
        if slots.is_cuda:
            # How many rows are written is on the device: those that are not write what another one writes, or, where
            # there is no other, what is there.
            self._some = written.any()
            numbers = torch.arange(len(slots), dtype=torch.int64, device=slots.device)
            self._rows = torch.where(written, numbers, written.int().argmax())
            slots = torch.where(self._some, slots[self._rows], 0)
        else:
            self._rows = written
            slots = slots[written]
        self._page, self._position = slots // page_size, slots % page_size

    def write(self, cache: torch.Tensor, rows: torch.Tensor) -> None:
        """Into (pages, page_size, ...), rows (tokens, ...)."""
        written = rows[self._rows]
        if self._some is not None:
            written = torch.where(self._some, written, cache[0, 0])
        cache[self._page, self._position] = written


def slots_of(
    block_table: torch.Tensor, page_size: int, sequence: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Where keys lie: slots for `paged_append`, (tokens,) int64. Nothing is synchronised on CUDA.

    Args:
        block_table: (batch, pages): see `attention_varlen`.
        sequence: (tokens,) int64: which sequence each token belongs to.
        position: (tokens,) int64: and where in it.

    Raises:
        InputError: on the CPU, a position that the sequence's pages do not have, or a page below 0. On CUDA these are
            the caller's to keep.
    """
    if not is_dynamo_compiling():
        check_dense(block_table=block_table, sequence=sequence, position=position)
    indices = (torch.int32, torch.int64)
    if block_table.dim() != 2 or block_table.dtype not in indices:
        raise InputError(
            f"block_table is {block_table.dtype} with shape {tuple(block_table.shape)}; expected int32 with "
            "shape (batch, pages)"
        )
    if sequence.shape != position.shape or {sequence.dtype, position.dtype} - set(indices):
        raise InputError(
            f"sequence is {sequence.dtype} with shape {tuple(sequence.shape)} and position {position.dtype} with "
            f"shape {tuple(position.shape)}; expected int64 and one shape, an entry for each token"
        )
    if not isinstance(page_size, int) or page_size < 1:
        raise InputError(f"page_size is {shown(page_size)}; expected an int of at least 1")
    on_cpu = block_table.device.type == "cpu"
    if on_cpu and sequence.numel():
        first, last = int(sequence.min()), int(sequence.max())
        if first < 0 or last >= block_table.shape[0]:
            raise InputError(
                f"sequence names sequence {first if first < 0 else last}; expected them from 0 to "
                f"{block_table.shape[0] - 1}, the rows of block_table"
            )
    if on_cpu and position.numel():
        most = block_table.shape[1] * page_size
        lowest, highest = int(position.min()), int(position.max())
        if lowest < 0 or highest >= most:
            raise InputError(
                f"a key is to lie at position {lowest if lowest < 0 else highest}; expected positions from 0 to "
                f"{most - 1}: a sequence's row of the table has {block_table.shape[1]} pages of {page_size}"
            )
    page = block_table[sequence, position // page_size].long()
    if on_cpu and page.numel() and int(page.min()) < 0:
        raise InputError(
            f"block_table names page {int(page.min())} for a key to be written; expected pages of at least 0"
        )
    return page * page_size + position % page_size


def _check_tensors(needed: dict[str, torch.Tensor], optional: dict[str, torch.Tensor | None]) -> None:
    """InputError unless they are dense tensors of one device, and caches can be written to."""
    check_dense(**needed, **{name: tensor for name, tensor in optional.items() if tensor is not None})
    for name in ("key_cache", "value_cache"):
        if needed[name]._is_zerotensor():
            raise InputError(f"{name} has no memory to write to; expected an allocated cache: call .clone()")
    query = optional["query"]
    if query is not None and query.dim() != 3:
        raise InputError(f"query has shape {tuple(query.shape)}; expected (tokens, heads, head_dim)")


def _check_options(rotary: Rotary | None, eps: float) -> None:
    if rotary is not None:
        check_flag("rotary's interleaved", rotary.interleaved)
    if not is_finite(eps) or eps < 0:
        raise InputError(f"eps is {shown(eps)}; expected a number of at least 0")


def _check_chosen(name: str, scale: torch.Tensor | None, cache: torch.Tensor) -> None:
    """InputError unless there is memory of its own for each scale that is chosen: they are written."""
    if scale is None or scale.dim() <= 1:
        return
    if scale.shape[0] != cache.shape[0]:
        raise InputError(
            f"{name} has shape {tuple(scale.shape)}, but its cache has {cache.shape[0]} pages; expected "
            f"{tuple(cache.shape[:-1])}, one for each key and head"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(scale.stride(), scale.shape, strict=True)):
        raise InputError(
            f"{name} has strides {scale.stride()}, so several scales lie in the same memory; expected memory for each: "
            "pass a tensor that was not expanded"
        )


def _check(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if rows.dim() != 3 or cache.dim() != 4 or rows.shape[1:] != cache.shape[2:]:
            raise InputError(
                f"{name} has shape {tuple(rows.shape)} and {name}_cache {tuple(cache.shape)}; expected "
                "(tokens, kv_heads, dim) and (pages, page_size, kv_heads, dim)"
            )
        if (rows.dtype != cache.dtype and cache.dtype is not FP8) or rows.device != cache.device:
            raise InputError(
                f"{name} is {rows.dtype} on {rows.device} and {name}_cache {cache.dtype} on {cache.device}; "
                f"expected the same, or a cache of {FP8}"
            )
    if key.shape[0] != value.shape[0] or key_cache.shape[:2] != value_cache.shape[:2]:
        raise InputError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)}, or their caches {tuple(key_cache.shape)} and "
            f"{tuple(value_cache.shape)}, differ; expected as many tokens, pages and slots in a page"
        )
    if slot_mapping.dtype not in (torch.int32, torch.int64) or slot_mapping.shape != key.shape[:1]:
        raise InputError(
            f"slot_mapping is {slot_mapping.dtype} with shape {tuple(slot_mapping.shape)}; "
            f"expected int32 or int64 with shape ({key.shape[0]},), one slot for each token"
        )
    if slot_mapping.device != key.device:
        raise InputError(
            f"slot_mapping is on {slot_mapping.device} but key is on {key.device}; move it with .to()"
        )
    if torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (key, value, key_cache, value_cache)
    ):
        raise InputError(_WITH_GRADIENT)
    slots = key_cache.shape[0] * key_cache.shape[1]
    if slot_mapping.device.type == "cpu" and slot_mapping.numel() and int(slot_mapping.max()) >= slots:
        raise InputError(
            f"slot_mapping names slot {int(slot_mapping.max())}; expected slots below {slots}, the pages' slots in all"
        )
