"""Which launches share a counter. On a CPU tensor: the pool only does arithmetic with its address."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from flashmoe_science.cuda import tickets
from flashmoe_science.cuda.tickets import TicketPool

_PER_THREAD_STREAM = 2


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "_is_capturing", lambda: False)


def pool(slots: int) -> tuple[TicketPool, list[int]]:
    """And the addresses of its counters."""
    counters = torch.zeros(slots, dtype=torch.int32)
    return TicketPool(counters), [counter.data_ptr() for counter in counters]


def test_a_stream_keeps_its_counter() -> None:
    counters, addresses = pool(4)
    assert [counters.take(stream) for stream in (0, 7, 0, 7)] == [*addresses[:2], *addresses[:2]]


def test_the_per_thread_stream_is_another_in_every_thread() -> None:
    counters, addresses = pool(4)
    together = Barrier(3)

    def take() -> list[int]:
        together.wait()
        return [counters.take(_PER_THREAD_STREAM) for _ in range(2)]

    with ThreadPoolExecutor(3) as threads:
        taken = [future.result() for future in [threads.submit(take) for _ in range(3)]]
    assert all(first == second for first, second in taken)
    assert {first for first, _ in taken} == set(addresses[:3])


def test_captured_launches_share_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, addresses = pool(4)
    monkeypatch.setattr(tickets, "_is_capturing", lambda: True)
    assert [counters.take(0) for _ in range(3)] == addresses[:3]


def test_a_pool_that_is_used_up_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, addresses = pool(1)
    monkeypatch.setattr(tickets, "_is_capturing", lambda: True)
    assert counters.take(0) == addresses[0]
    assert counters.take(0) not in addresses
    monkeypatch.setattr(tickets, "_is_capturing", lambda: False)
    kept = [counters.take(stream) for stream in (0, 7)]
    assert len({*kept, *addresses}) == 3
    assert [counters.take(stream) for stream in (0, 7)] == kept


def test_a_stream_keeps_as_many_as_any_launch_takes() -> None:
    counters = TicketPool(torch.zeros(8, dtype=torch.int32), most=4)
    first, second = counters.take(0, 3), counters.take(7, 1)
    assert second == first + 4 * 4
    assert counters.take(0, 4) == first


def test_captured_launches_take_no_more_than_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = TicketPool(torch.zeros(8, dtype=torch.int32), most=4)
    monkeypatch.setattr(tickets, "_is_capturing", lambda: True)
    first = counters.take(0, 3)
    assert [counters.take(0, 3), counters.take(0, 2)] == [first + 3 * 4, first + 6 * 4]


def test_a_reserve_is_taken_before_what_is_there_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given out before stays: graphs hold its addresses."""
    whole = torch.zeros(8, dtype=torch.int32)
    start, counters = whole.data_ptr(), TicketPool(whole, most=4)
    del whole
    monkeypatch.setattr(tickets, "_is_capturing", lambda: True)
    assert counters.take(0, 4) == start
    counters.reserve()
    assert counters.take(0, 3) == start + 4 * 4
    counters.reserve()
    taken = counters.take(0, 8)
    assert not start <= taken < start + 8 * 4
    assert sum(len(kept) for kept in counters._more) == 8
