"""New keys and values in the pages of a cache."""

from __future__ import annotations

import pytest
import torch
from varlen_cases import NAN, Shape, bounds, packed, paged

from flashmoe_science import InputError, attention_varlen, paged_append
from flashmoe_science.varlen.append import slots_of


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND", "joint"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_what_was_appended_is_attended_to(page_size: int, layout: str, index_dtype: torch.dtype) -> None:
    shape = Shape((3, 1, 20), (10, 1, 33))
    call = paged(shape, page_size, layout=layout)
    expected = attention_varlen(**call, **bounds(shape))  # type: ignore[arg-type]
    new = packed(shape)
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(shape.keys))
    position = torch.cat([torch.arange(length) for length in shape.keys])
    slots = slots_of(call["block_table"], page_size, sequence, position).to(index_dtype)
    call["key"].fill_(NAN)
    call["value"].fill_(NAN)
    shuffled = torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))
    paged_append(new["key"][shuffled], new["value"][shuffled], call["key"], call["value"], slots[shuffled])
    assert torch.equal(attention_varlen(**call, **bounds(shape)), expected)  # type: ignore[arg-type]


def test_negative_slots_are_not_written() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    other = torch.zeros(2, 4, 1, 16)
    key, value = torch.ones(3, 1, 8), torch.ones(3, 1, 16)
    paged_append(key, value, cache, other, torch.tensor([-1, 6, -5]))
    assert cache.sum() == 8
    assert (cache[1, 2] == 1).all()
    assert (other[1, 2] == 1).all()
    paged_append(key, value, cache, other, torch.tensor([-1, -1, -1]))
    assert cache.sum() == 8
    paged_append(key[:0], value[:0], cache, other, torch.tensor([], dtype=torch.int32))
    assert cache.sum() == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.ones(3, 2, 8)}, r"key has shape \(3, 2, 8\) and key_cache"),
        ({"key": torch.ones(3, 1, 8).half()}, "key is torch.float16 on cpu and key_cache torch.float32"),
        ({"value": torch.ones(2, 1, 8)}, "differ; expected as many tokens"),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping is torch.float32"),
        ({"slot_mapping": torch.tensor([0, 1])}, r"expected int32 or int64 with shape \(3,\)"),
        ({"slot_mapping": torch.tensor([0, 8, 1])}, "names slot 8; expected slots below 8"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "key": torch.ones(3, 1, 8),
        "value": torch.ones(3, 1, 8),
        "key_cache": torch.zeros(2, 4, 1, 8),
        "value_cache": torch.zeros(2, 4, 1, 8),
        "slot_mapping": torch.tensor([0, 1, 2]),
    }
    with pytest.raises(InputError, match=message):
        paged_append(**{**arguments, **changes})
    assert (arguments["key_cache"] == 0).all()


@pytest.mark.gpu
def test_on_a_gpu_negative_slots_are_not_written() -> None:
    for slots in ([-1, 6, -5], [-1, -1, -1], [3, 2, 1]):
        caches = [torch.zeros(2, 4, 1, 8, device=device) for device in ("cpu", "cuda") for _ in range(2)]
        for key_cache, value_cache in (caches[:2], caches[2:]):
            rows = torch.arange(24.0, device=key_cache.device).view(3, 1, 8)
            paged_append(rows, -rows, key_cache, value_cache, torch.tensor(slots, device=key_cache.device))
        assert torch.equal(caches[0], caches[2].cpu())
        assert torch.equal(caches[1], caches[3].cpu())


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache"])
def test_gradients_are_refused_before_anything_is_written(name: str) -> None:
    tensors = {
        "key": torch.ones(1, 1, 8),
        "value": torch.ones(1, 1, 8),
        "key_cache": torch.zeros(2, 4, 1, 8),
        "value_cache": torch.zeros(2, 4, 1, 8),
    }
    tensors[name].requires_grad_()
    with pytest.raises(InputError, match="requires a gradient"):
        paged_append(**tensors, slot_mapping=torch.tensor([0]))
    assert (tensors["key_cache"] == 0).all()
    with torch.no_grad():
        paged_append(**tensors, slot_mapping=torch.tensor([0]))
    assert (tensors["key_cache"][0, 0] == 1).all()


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (8, "position 8; expected positions from 0 to 7.* 2 pages of 4"),
        (-1, "position -1; expected"),
        (4, "names page -1"),
    ],
)
def test_keys_have_no_slot_outside_their_sequence(position: int, message: str) -> None:
    table = torch.tensor([[3, -1]], dtype=torch.int32)
    with pytest.raises(InputError, match=message):
        slots_of(table, 4, torch.tensor([0, 0]), torch.tensor([1, position]))
    assert slots_of(table, 4, torch.tensor([0, 0]), torch.tensor([1, 3])).tolist() == [13, 15]


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_scales_that_are_chosen_have_memory_of_their_own(name: str) -> None:
    """The kernel writes them by page: with fewer pages than the cache it wrote behind their end."""
    rows, cache = torch.ones(3, 1, 8), torch.zeros(2, 4, 1, 8).to(torch.float8_e4m3fn)
    slots = torch.tensor([0, 6, 7])
    for pages in (0, 1, 3):
        with pytest.raises(InputError, match=f"{name} has shape .* but its cache has 2 pages"):
            paged_append(rows, rows, cache, cache.clone(), slots, **{name: torch.ones(pages, 4, 1)})
    shared = torch.ones(1, 1, 1).expand(2, 4, 1)
    with pytest.raises(InputError, match=f"{name} has strides .* several scales lie in the same memory"):
        paged_append(rows, rows, cache, cache.clone(), slots, **{name: shared})
    paged_append(rows, rows, cache, cache.clone(), slots, **{name: torch.ones(2, 4, 1)})


def test_slots_of_what_is_not_there() -> None:
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    one = torch.tensor([1])
    for given, message in (
        ((table, 4, one, one), "sequence names sequence 1; expected them from 0 to 0"),
        ((table, 0, one - 1, one), "page_size is 0"),
        ((table[0], 4, one - 1, one), r"block_table is torch.int32 with shape \(2,\)"),
        ((table, 4, one - 1, one.float()), "position torch.float32"),
        ((table, 4, 0, one), "sequence is a int; expected a torch.Tensor"),
    ):
        with pytest.raises(InputError, match=message):
            slots_of(*given)  # type: ignore[arg-type]
