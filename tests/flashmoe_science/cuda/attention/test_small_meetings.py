"""Where the splits of a launch meet: in memory of the stream; where it is captured, or much, in memory of its own."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science.cuda import tickets
from flashmoe_science.cuda.attention import small
from flashmoe_science.cuda.tickets import TicketPool

Meet = Callable[..., tuple[int, int]]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Meet:
    """Launches, and says where the splits meet: (partial results, counters)."""
    kept: list[torch.Tensor] = []  # so that no address comes twice

    def allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        kept.append(torch.empty_strided(sizes, strides, dtype=dtype))
        return kept[-1]

    pool = TicketPool(torch.zeros(64, dtype=torch.int32), most=4)
    monkeypatch.setattr(small, "cuda_allocator", lambda: allocate)
    monkeypatch.setattr(small, "_own", small._OfThread())
    monkeypatch.setattr(small, "_MOST_KEPT_FLOATS", 100)

    def launch(floats: int, stream: int, *, device: int = 0, capturing: bool = False) -> tuple[int, int]:
        for module in (small, tickets):
            monkeypatch.setattr(module, "is_capturing", lambda: capturing)
        launcher: Any = SimpleNamespace(
            buffer=ctypes.create_string_buffer(256), start_at=lambda *addresses: started.append(addresses)
        )
        started: list[tuple[int, ...]] = []
        small._split_launch(launcher, floats, 3, pool, device)(1, 2, 3, 4, 5, stream)
        assert started == [(1, 2, 3, 4, 5, stream)]
        partials, arrivals = struct.unpack_from("2Q", launcher.buffer, small._SPLIT_AT)
        return partials, arrivals

    return launch


def test_launches_on_a_stream_meet_where_the_last_ones_did(meet: Meet) -> None:
    first = meet(10, 7)
    assert meet(10, 7) == meet(8, 7) == meet(20, 7) == first
    others = [meet(10, 0), meet(10, 9), meet(10, 7, device=1)]
    assert len({first[0], *(partials for partials, _ in others)}) == 4
    assert meet(10, 0) == others[0]


def test_longer_ones_get_more_and_keep_the_counters(meet: Meet) -> None:
    first = meet(10, 7)
    longer = meet(21, 7)
    assert longer[0] != first[0]
    assert longer[1] == first[1]
    assert meet(42, 7) == longer
    assert meet(10, 7) == longer


def test_much_is_not_kept(meet: Meet) -> None:
    first = meet(100, 7)
    assert meet(101, 7)[0] != meet(101, 7)[0] != first[0]
    assert meet(101, 7)[1] == first[1]
    assert meet(100, 7) == first


def test_what_is_kept_is_of_no_graphs_memory(meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile's graphs warm up, they claim what this thread allocates."""
    allocate, threads = small.cuda_allocator(), []

    def watched(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        threads.append(threading.get_ident())
        return allocate(sizes, strides, dtype)

    monkeypatch.setattr(small, "cuda_allocator", lambda: watched)
    for floats in (10, 50, 101):
        meet(floats, 7)
    *kept, not_kept = threads
    assert len(kept) == 2
    assert threading.get_ident() not in kept
    assert not_kept == threading.get_ident()


def test_captured_launches_meet_where_nobody_else_does(meet: Meet) -> None:
    first = meet(10, 7)
    captured = [meet(10, 7, capturing=True) for _ in range(2)]
    assert len({first[0], *(partials for partials, _ in captured)}) == 3
    assert len({first[1], *(arrivals for _, arrivals in captured)}) == 3
    assert meet(10, 7) == first


def test_each_thread_has_its_own(meet: Meet) -> None:
    """Another thread may launch on the stream before this one has."""
    places: list[tuple[int, int]] = [meet(10, 7)]
    thread = threading.Thread(target=lambda: places.append(meet(10, 7)))
    thread.start()
    thread.join()
    assert places[0][0] != places[1][0]
