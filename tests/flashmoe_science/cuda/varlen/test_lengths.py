"""Lengths that outlive plans, on the CPU in the place of a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from flashmoe_science.cuda.varlen import lengths
from flashmoe_science.cuda.varlen.lengths import LengthTable
from flashmoe_science.errors import CaptureError


@pytest.fixture(autouse=True)
def not_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of torch for the CPU cannot say."""
    monkeypatch.setattr(lengths, "is_capturing", lambda: False)


def test_the_same_numbers_are_kept_once() -> None:
    table = LengthTable("cpu")
    one, other = table.get((0, 7, 14)), table.get((0, 7, 14))
    assert one.tolist() == [0, 7, 14]
    assert one.data_ptr() == other.data_ptr()


def test_all_begin_at_multiples_of_16_bytes_and_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_CHUNK", 16)
    table = LengthTable("cpu")
    asked = [tuple(range(count)) for count in (1, 2, 3, 5, 8, 13, 40)]
    kept = [table.get(numbers) for numbers in asked]
    for numbers, tensor in zip(asked, kept, strict=True):
        assert tuple(tensor.tolist()) == numbers
        assert (tensor.data_ptr() - kept[0].data_ptr()) % 16 == 0
        assert tensor.is_contiguous()


def test_threads_at_once_get_one_copy() -> None:
    table = LengthTable("cpu")
    with ThreadPoolExecutor(8) as pool:
        addresses = set(pool.map(lambda _: table.get((0, 9)).data_ptr(), range(64)))
    assert len(addresses) == 1


def test_while_a_graph_is_captured_what_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    table = LengthTable("cpu")
    table.get((0, 5))
    monkeypatch.setattr(lengths, "is_capturing", lambda: True)
    assert table.get((0, 5)).tolist() == [0, 5]
    with pytest.raises(CaptureError, match="before capturing"):
        table.get((0, 6))
