"""Which launches share a counter. On a CPU tensor: the pool only does arithmetic with its address."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science.cuda import tickets
from flashmoe_science.cuda.tickets import TicketPool, zeros_to_keep

_PER_THREAD_STREAM = 2


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "is_capturing", lambda: False)


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
    monkeypatch.setattr(tickets, "is_capturing", lambda: True)
    assert [counters.take(9) for _ in range(3)] == addresses[:3]


def test_the_default_stream_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, _ = pool(4)
    monkeypatch.setattr(tickets, "is_capturing", lambda: True)
    assert counters.take(0) == counters.take(0)


def test_a_pool_that_is_used_up_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, addresses = pool(1)
    monkeypatch.setattr(tickets, "is_capturing", lambda: True)
    assert counters.take(9) == addresses[0]
    assert counters.take(9) not in addresses
    monkeypatch.setattr(tickets, "is_capturing", lambda: False)
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
    monkeypatch.setattr(tickets, "is_capturing", lambda: True)
    first = counters.take(9, 3)
    assert [counters.take(9, 3), counters.take(9, 2)] == [first + 3 * 4, first + 6 * 4]


def test_a_reserve_is_taken_before_what_is_there_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given out before stays: graphs hold its addresses."""
    whole = torch.zeros(8, dtype=torch.int32)
    start, counters = whole.data_ptr(), TicketPool(whole, most=4)
    del whole
    monkeypatch.setattr(tickets, "is_capturing", lambda: True)
    assert counters.take(9, 4) == start
    counters.reserve()
    assert counters.take(9, 3) == start + 4 * 4
    counters.reserve()
    taken = counters.take(9, 8)
    assert not start <= taken < start + 8 * 4
    assert sum(len(kept) for kept in counters._more) == 8


def test_what_is_kept_is_made_where_no_mode_of_this_thread_sees_it() -> None:
    """As torch.compile's CUDA graphs see what a thread allocates while they warm up."""

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            raise AssertionError(f"{function} was seen")

    with Refuses(), torch.inference_mode():
        zeros = zeros_to_keep(3, "cpu")
    assert not zeros.is_inference()
    assert zeros.tolist() == [0, 0, 0]


@pytest.mark.gpu
def test_what_is_kept_is_in_no_pool_of_a_graph() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        of_the_pool = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        kept = zeros_to_keep(1 << 20, "cuda")
    segments = [(each["address"], each["address"] + each["total_size"]) for each in pool.snapshot()]
    inside = [any(low <= each.data_ptr() < high for low, high in segments) for each in (of_the_pool, kept)]
    assert inside == [True, False]


_FIRST_CALL = """
import torch, torch.nn.functional as F
import flashmoe_science
query = torch.randn(1, 8, {tokens}, 128, dtype=torch.bfloat16, device="cuda")
key = torch.randn(1, 2, {tokens}, 128, dtype=torch.bfloat16, device="cuda")
mask = torch.ones(1, 1, {tokens}, {tokens}, dtype=torch.bool, device="cuda").tril()

def attended(query, key):
    seen = mask if {masked} else None
    return F.scaled_dot_product_attention(query, key, key, seen, is_causal=not {masked}, enable_gqa=True)

with torch.no_grad():
    right = attended(query, key)
    compiled = torch.compile(attended, mode="reduce-overhead", fullgraph=True)
    with flashmoe_science.sdpa():
        for _ in range(3):
            output = compiled(query, key).clone()
torch.testing.assert_close(output, right, rtol=0, atol=2**-6)
assert flashmoe_science.report().taken
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "masked"), [(16, True), (1024, False)])
def test_the_first_call_of_a_process_may_be_one_that_warms_a_graph_up(tokens: int, masked: bool) -> None:
    program = _FIRST_CALL.format(tokens=tokens, masked=masked)
    subprocess.run([sys.executable, "-c", program], check=True)
