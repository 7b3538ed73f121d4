"""Run by test_library.py in a process of its own: calls attention_varlen built with sanitizers. Argument: the library.

As sanitized_calls.py: without torch, with buffers from malloc that end where what may be read ends.
Prints "passed" when every call returned.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Sequence

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("element_type", "heads", "kv_heads", "head_dim", "value_dim")),
        ("page_size", ctypes.c_int64),
        ("query_stride", ctypes.c_int64 * 2),
        ("key_stride", ctypes.c_int64 * 3),
        ("value_stride", ctypes.c_int64 * 3),
        ("out_stride", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("window_left", "window_right", "split_keys", "chunk")),
        *((name, ctypes.c_double) for name in ("softmax_scale", "softcap")),
    )


class Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqused_k")),
        *((name, ctypes.c_void_p) for name in ("sinks", "alibi_slopes", "tree_mask")),
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "keys", "table_row", "table_pages")),
        *((name, ctypes.c_int64) for name in ("alibi_row", "fault_index", "fault_number")),
    )


class Buffers:
    """Memory of malloc, until it is closed."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def zeros(self, count: int) -> int:
        address = LIBC.malloc(max(1, count))
        ctypes.memset(address, 0, count)
        self.addresses.append(address)
        return address

    def numbers(self, values: Sequence[int]) -> int:
        address = self.zeros(4 * len(values))
        ctypes.memmove(address, (ctypes.c_int32 * len(values))(*values), 4 * len(values))
        return address

    def close(self) -> None:
        for address in self.addresses:
            LIBC.free(address)


def main() -> None:
    launch = ctypes.CDLL(sys.argv[1]).flashmoe_attention_varlen
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    heads, kv_heads = 4, 2
    queries, keys = [1, 3, 0, 70, 2], [300, 5, 7, 70, 0]
    starts = [0, *itertools.accumulate(queries)]
    for element_type, page_size, (window, split_keys, threads) in itertools.product(
        range(3), (0, 1, 7, 64), ((-1, 0, 1), (30, 0, 3), (-1, 128, 3), (30, 128, 1))
    ):
        head_dim, value_dim = (8, 16) if page_size == 7 else (72, 24)
        size = 4 if element_type == 0 else 2
        buffers = Buffers()
        problem = Problem(element_type, heads, kv_heads, head_dim, value_dim, page_size)
        key_row, value_row = head_dim * size, value_dim * size
        problem.query_stride = (heads * key_row, key_row)
        problem.out_stride = (heads * value_row, value_row)
        problem.key_stride = (page_size * kv_heads * key_row, kv_heads * key_row, key_row)
        problem.value_stride = (page_size * kv_heads * value_row, kv_heads * value_row, value_row)
        problem.window_left, problem.window_right, problem.split_keys = window, 0, split_keys
        problem.softmax_scale, problem.softcap = head_dim**-0.5, 5.0 if window > 0 else 0.0
        call = Call(batch=len(queries), tokens=starts[-1] + 1)
        slots = sum(keys)
        call.cu_seqlens_q = buffers.numbers(starts)
        if page_size:
            pages = [-(-length // page_size) for length in keys]
            first = [0, *itertools.accumulate(pages)]
            columns = max(pages)
            table = [first[b] + p if p < pages[b] else -1 for b in range(len(keys)) for p in range(columns)]
            call.block_table, call.seqused_k = buffers.numbers(table), buffers.numbers(keys)
            call.table_row = call.table_pages = columns
            call.keys = first[-1]
            slots = first[-1] * page_size
        else:
            call.cu_seqlens_k = buffers.numbers([0, *itertools.accumulate(keys)])
            call.keys = slots
        call.query = buffers.zeros(call.tokens * heads * key_row)
        call.key, call.value = (buffers.zeros(slots * kv_heads * row) for row in (key_row, value_row))
        call.out = buffers.zeros(call.tokens * heads * value_row)
        call.lse = buffers.zeros(call.tokens * heads * 4)
        if window > 0:
            call.sinks, call.alibi_slopes = buffers.zeros(4 * heads), buffers.zeros(4 * heads)
        else:
            call.tree_mask = buffers.zeros(8 * call.tokens)
        assert launch(ctypes.byref(problem), ctypes.byref(call), threads) == 0
        buffers.close()
    print("passed")


if __name__ == "__main__":
    main()
