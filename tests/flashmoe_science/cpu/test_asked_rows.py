"""In which order a few rows' kernels ask for keys and values before they read them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from flashmoe_science.cpu.library import SOURCES
from flashmoe_science.jit import host

PAGE = 4096
"""Of memory, in bytes: a processor fetches no further ahead by itself."""
STREAMS = 4


def asked(
    first: int, end: int, heads: int, row_bytes: int, head_row: int | None = None
) -> tuple[list[int], int]:
    """For each key of a part, which one is asked for when it is read; and the keys of a window."""
    source = Path(__file__).with_name("asked_rows.cpp")
    build = host.build(source, "asked_rows", host.choose_instruction_set(), include_directories=(SOURCES,))
    function = host.load(build).asked_keys
    function.argtypes = [*[ctypes.c_int64] * 2, ctypes.c_int, *[ctypes.c_int64] * 2, ctypes.c_void_p]
    of = (ctypes.c_int64 * (end - first))()
    window = function(first, end, heads, row_bytes, row_bytes if head_row is None else head_row, of)
    assert window > 0
    return list(of), window


each_token = pytest.mark.parametrize(
    ("heads", "row_bytes"), [(1, 64), (1, 128), (1, 256), (1, 512), (8, 128), (8, 256), (8, 512), (1, 2304)]
)


@each_token
@pytest.mark.parametrize("end", [1, 63, 64, 65, 512, 2048, 2047])
def test_every_key_but_those_of_the_first_window_is_asked_for_once_and_before_it_is_read(
    heads: int, row_bytes: int, end: int
) -> None:
    of, window = asked(0, end, heads, row_bytes)
    # Where nothing is left to ask for, it is the last key again.
    later = [key for key in of if key < end - 1]
    assert len(set(later)) == len(later)
    assert all(key > reader for reader, key in enumerate(of) if key < end - 1)
    # Of a last window that is not whole, some have no reader.
    whole = end // window * window
    assert {*range(window, min(whole, end - 1))} <= {*later} <= {*range(window, end)}
    assert all(key < end for key in of)


@each_token
def test_pages_of_memory_take_turns(heads: int, row_bytes: int) -> None:
    of, window = asked(0, 1024, heads, row_bytes)
    token = heads * row_bytes
    assert window * token <= STREAMS * PAGE or window == STREAMS
    for reader in range(0, 512, STREAMS):
        four = of[reader : reader + STREAMS]
        assert four == [*range(four[0], four[0] + window, window // STREAMS)]
        if window * token == STREAMS * PAGE:
            assert len({key * token // PAGE for key in four}) == STREAMS


def test_heads_in_pages_of_their_own_are_turns_enough() -> None:
    of, window = asked(0, 512, 8, 256, head_row=64 * 256)
    assert of[: 512 - window] == [*range(window, 512)]


@pytest.mark.parametrize("first", [1, 37, 100, 130])
def test_a_part_that_begins_within_a_block_asks_for_nothing_outside_of_it(first: int) -> None:
    for heads, row_bytes in ((1, 64), (1, 256), (8, 512)):
        of, _ = asked(first, first + 600, heads, row_bytes)
        assert all(first <= key < first + 600 for key in of)
