"""New keys and values written into the pages of a cache."""

from __future__ import annotations

import torch

from flashmoe_science.errors import InputError


def paged_append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write rows of keys and values into slots of a paged cache, in place.

    Composed of PyTorch operations on every device; nothing is synchronised on CUDA, so a CUDA graph can capture it.

    Args:
        key: (tokens, kv_heads, head_dim).
        value: (tokens, kv_heads, value_dim).
        key_cache: (pages, page_size, kv_heads, head_dim), any strides, of key's dtype.
        value_cache: (pages, page_size, kv_heads, value_dim), any strides, of value's dtype.
        slot_mapping: (tokens,) int32 or int64: page * page_size + position in the page; negative: the row is not
            written. No slot twice.

    Raises:
        InputError: shapes, dtypes or devices that do not fit together; a tensor that requires a gradient; on the CPU
            also a slot that is not there.
    """
    _check(key, value, key_cache, value_cache, slot_mapping)
    page_size = key_cache.shape[1]
    if not key.shape[0]:
        return
    slots = slot_mapping.long()
    written = slots >= 0
    if not slots.is_cuda:
        key, value, slots = key[written], value[written], slots[written]
        page, position = slots // page_size, slots % page_size
        key_cache[page, position] = key
        value_cache[page, position] = value
        return
    # How many rows are written is on the device: those that are not write what another one writes, or, where there is
    # no other, what is there.
    some = written.any()
    first = written.int().argmax()
    row = torch.where(written, torch.arange(len(slots), dtype=torch.int64, device=slots.device), first)
    slots = torch.where(some, slots[row], 0)
    page, position = slots // page_size, slots % page_size
    key_cache[page, position] = torch.where(some, key[row], key_cache[0, 0])
    value_cache[page, position] = torch.where(some, value[row], value_cache[0, 0])


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
    on_cpu = block_table.device.type == "cpu"
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
        if rows.dtype != cache.dtype or rows.device != cache.device:
            raise InputError(
                f"{name} is {rows.dtype} on {rows.device} and {name}_cache {cache.dtype} on {cache.device}; "
                "expected the same"
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
        raise InputError(
            "an argument requires a gradient, and paged_append writes caches in place, without one; call it under "
            "torch.no_grad()"
        )
    slots = key_cache.shape[0] * key_cache.shape[1]
    if slot_mapping.device.type == "cpu" and slot_mapping.numel() and int(slot_mapping.max()) >= slots:
        raise InputError(
            f"slot_mapping names slot {int(slot_mapping.max())}; expected slots below {slots}, the pages' slots in all"
        )
