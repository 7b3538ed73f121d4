"""Random calls of a sanitized attention_varlen. Arguments: the first seed, how many, the library.

A call in seven has a wrong length or page, of which the kernel has to say so before it touches anything.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import random

from random_attention_calls import BF16
from sanitized import Memory, main

SUCCESS, FAULTS = 0, (3, 4, 5, 6)
WRONG = (-1, -(2**31), 2**31 - 1, 2**24)
SCALES = (1.0, 0.125, 0.3, -0.2, 0.0, 50.0, 1e-38, 2e38)
PAGE_SIZES = (0, 0, 0, 1, 7, 16, 64)


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
    """Those of one call."""

    def __init__(self, generator: random.Random) -> None:
        self._all: list[Memory] = []
        self._random = generator

    def tensor(self, elements: int, size: int, specials: int = 0) -> Memory:
        memory = Memory(elements, size, self._random)
        memory.fill(specials)
        self._all.append(memory)
        return memory

    def integers(self, values: list[int]) -> tuple[int, ctypes.Array[ctypes.c_int32]]:
        """The address, and the numbers there."""
        memory = Memory(len(values), 4, self._random)
        self._all.append(memory)
        there = (ctypes.c_int32 * len(values)).from_address(memory.address)
        there[:] = values
        return memory.address, there

    def free(self) -> None:
        for memory in self._all:
            memory.free()


def strides(shape: tuple[int, ...], row: int, generator: random.Random) -> tuple[tuple[int, ...], int]:
    """In elements, for the axes in any order, with gaps; and how many elements that takes."""
    steps = [0] * len(shape)
    step = row + generator.choice((0, 0, 1, 3, 16))
    for axis in generator.sample(range(len(shape)), len(shape)):
        steps[axis] = step
        step *= max(1, shape[axis])
    if min(shape) == 0:
        return tuple(steps), 0
    return tuple(steps), sum((n - 1) * stride for n, stride in zip(shape, steps, strict=True)) + row


def call(library: ctypes.CDLL, generator: random.Random) -> None:
    size = 4 if (element_type := generator.randrange(3)) == 0 else 2
    kv_heads = generator.choice((1, 1, 2, 3))
    heads = kv_heads * generator.choice((1, 1, 2, 4))
    head_dim, value_dim = (8 * generator.choice((*range(1, 33), 8, 16, most // 8)) for most in (576, 512))
    if generator.random() < 0.4:  # what a matrix unit takes
        element_type, size = BF16, 2
        head_dim, value_dim = 32 * generator.randint(1, 8), 32 * generator.randint(1, 8)
    page_size = generator.choice(PAGE_SIZES)
    batch = generator.choice((0, 1, 1, 2, 5, 9))
    queries = [generator.choice((0, 1, 1, 2, generator.randint(1, 90))) for _ in range(batch)]
    keys = [
        generator.choice((0, 1, generator.randint(1, 20), generator.randint(1, 400))) for _ in range(batch)
    ]
    if batch == 1 and generator.random() < 0.3:  # few rows and many keys: these are split over threads
        queries, keys = [generator.choice((1, 2, 7))], [generator.randint(1024, 3000)]
    buffers = Buffers(generator)
    problem = Problem(element_type, heads, kv_heads, head_dim, value_dim, page_size)
    problem.window_left, problem.window_right = (
        generator.choice((-1, -1, 0, 1, 30, 2**31)) for _ in range(2)
    )
    problem.split_keys = generator.choice((0, 0, 256, 512))
    problem.chunk = generator.choice((0, 0, 1, 5, 64, 2**31))
    problem.softmax_scale = generator.choice((*SCALES, 1 / math.sqrt(head_dim)))
    problem.softcap = generator.choice((0.0, 0.0, 5.0, 1e-3))
    asked = Call(batch=batch)
    asked.tokens = sum(queries) + generator.choice((0, 0, 1, 5))
    numbers = []
    asked.cu_seqlens_q, starts = buffers.integers([0, *itertools.accumulate(queries)])
    numbers.append(starts)
    if page_size:
        pages = [-(-length // page_size) for length in keys]
        columns = max(pages, default=0) + generator.randrange(2)
        asked.keys = sum(pages) + generator.randrange(2)
        order = generator.sample(range(asked.keys), asked.keys)
        table = [
            order.pop() if page < used else generator.choice(WRONG)
            for used in pages
            for page in range(columns)
        ]
        asked.block_table, there = buffers.integers(table)
        asked.seqused_k, lengths = buffers.integers(keys)
        asked.table_row = asked.table_pages = columns
        numbers += [there, lengths]
        of_keys: tuple[int, ...] = (asked.keys, page_size, kv_heads)
    else:
        room = [length + generator.choice((0, 0, 3)) for length in keys]
        asked.cu_seqlens_k, there = buffers.integers([0, *itertools.accumulate(room)])
        asked.keys = sum(room)
        numbers.append(there)
        if room != keys or generator.randrange(2):
            asked.seqused_k, lengths = buffers.integers(keys)
            numbers.append(lengths)
        of_keys = (asked.keys, kv_heads)
    for name, shape, row in (
        ("query", (asked.tokens, heads), head_dim),
        ("key", of_keys, head_dim),
        ("value", of_keys, value_dim),
        ("out", (asked.tokens, heads), value_dim),
    ):
        steps, elements = strides(shape, row, generator)
        given = [step * size for step in steps]
        if name in ("key", "value") and not page_size:
            given = [0, *given]
        setattr(problem, f"{name}_stride", tuple(given))
        specials = 0 if name == "out" else generator.choice((0, 0, 3))
        setattr(asked, name, buffers.tensor(elements, size, specials).address)
    if generator.randrange(2):
        asked.lse = buffers.tensor(asked.tokens * heads, 4).address
    if generator.randrange(2):
        asked.sinks = buffers.tensor(heads, 4, generator.choice((0, 1))).address
    if generator.randrange(2):
        asked.alibi_row = generator.choice((0, heads))
        asked.alibi_slopes = buffers.tensor(max(1, batch) * heads, 4).address
    if generator.randrange(3) == 0:
        asked.tree_mask = buffers.tensor(asked.tokens, 8).address
    expected: tuple[int, ...] = (SUCCESS,)
    if generator.random() < 0.15:
        wrong = generator.choice([each for each in numbers if len(each)])
        wrong[generator.randrange(len(wrong))] = generator.choice(WRONG)
        expected = (SUCCESS, *FAULTS)  # an entry that no sequence uses may hold anything
    launch = library.flashmoe_attention_varlen
    launch.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int]
    status = launch(ctypes.addressof(problem), ctypes.addressof(asked), generator.choice((1, 1, 2, 3)))
    assert status in expected, status
    buffers.free()


if __name__ == "__main__":
    main(call)
