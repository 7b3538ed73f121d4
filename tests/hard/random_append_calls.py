"""Random calls of a sanitized paged_append. Arguments: the first seed, how many, the library."""

from __future__ import annotations

import ctypes
import random

from sanitized import Memory, main

_MOST_DIM = 576
SAME_TYPE, SCALE_GIVEN, SCALE_CHOSEN = range(3)


class Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("token", ctypes.c_int64), ("head", ctypes.c_int64))


class Cache(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scale")),
        *((name, ctypes.c_int64) for name in ("page", "slot", "head")),
        *((name, ctypes.c_int64) for name in ("scale_page", "scale_slot", "scale_head", "form")),
    )


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, Rows) for name in ("query", "key", "value")),
        *((name, Cache) for name in ("key_cache", "value_cache")),
        *((name, ctypes.c_void_p) for name in ("query_out", "slots", "positions", "cos_sin")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("cos_sin_row", "cos_sin_rows")),
        *((name, ctypes.c_int32) for name in ("tokens", "heads", "kv_heads", "head_dim", "value_dim")),
        *((name, ctypes.c_int32) for name in ("rotary_dim", "page_size", "interleaved")),
        *((name, ctypes.c_int32) for name in ("wide_slots", "wide_positions")),
        *((name, ctypes.c_int32) for name in ("float_cos_sin", "float_query_norm", "float_key_norm")),
        ("eps", ctypes.c_float),
    )


class Buffers:
    """Those of one call."""

    def __init__(self, generator: random.Random) -> None:
        self._all: list[Memory] = []
        self._random = generator

    def tensor(self, elements: int, size: int, specials: int = 0) -> int:
        memory = Memory(elements, size, self._random)
        memory.fill(specials)
        self._all.append(memory)
        return memory.address

    def integers(self, values: list[int], *, wide: bool) -> int:
        memory = Memory(len(values), 8 if wide else 4, self._random)
        self._all.append(memory)
        number = ctypes.c_int64 if wide else ctypes.c_int32
        (number * len(values)).from_address(memory.address)[:] = values
        return memory.address

    def free(self) -> None:
        for memory in self._all:
            memory.free()


def steps(shape: tuple[int, ...], row: int, generator: random.Random) -> tuple[list[int], int]:
    """Strides in elements, for the axes in any order, with gaps; and how many elements that takes."""
    strides = [0] * len(shape)
    step = row + generator.choice((0, 0, 1, 3, 16))
    for axis in generator.sample(range(len(shape)), len(shape)):
        strides[axis] = step
        step *= max(1, shape[axis])
    if min(shape) == 0:
        return strides, 0
    return strides, sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + row


def call(library: ctypes.CDLL, generator: random.Random) -> None:
    size = 4 if (element_type := generator.randrange(3)) == 0 else 2
    tokens = generator.choice((0, 1, 1, 2, 7, 40))
    heads, kv_heads = generator.choice((0, 1, 2, 5)), generator.choice((1, 1, 2, 3))
    head_dim, value_dim = (generator.choice((1, 7, 8, 64, 128, 192, _MOST_DIM)) for _ in range(2))
    page_size = generator.choice((1, 7, 16, 64))
    pages = -(-tokens // page_size) + generator.randrange(3)
    buffers = Buffers(generator)
    specials = generator.choice((0, 0, 3))
    problem = Problem(
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        page_size=page_size,
    )
    for name, of_rows, dim in (
        ("query", heads, head_dim),
        ("key", kv_heads, head_dim),
        ("value", kv_heads, value_dim),
    ):
        (token, head), elements = steps((tokens, of_rows), dim, generator)
        setattr(problem, name, Rows(buffers.tensor(elements, size, specials), token * size, head * size))
    problem.query_out = buffers.tensor(tokens * heads * head_dim, size)
    for name, dim in (("key_cache", head_dim), ("value_cache", value_dim)):
        form = generator.choice((SAME_TYPE, SCALE_GIVEN, SCALE_CHOSEN))
        width = size if form == SAME_TYPE else 1
        strides, elements = steps((pages, page_size, kv_heads), dim, generator)
        cache = Cache(buffers.tensor(elements, width), 0, *(stride * width for stride in strides), form=form)
        if form == SCALE_CHOSEN:
            (cache.scale_page, cache.scale_slot, cache.scale_head), elements = steps(
                (pages, page_size, kv_heads), 1, generator
            )
            cache.scale = buffers.tensor(elements, 4)
        elif form == SCALE_GIVEN and generator.randrange(2):
            cache.scale_head = generator.randrange(2)
            cache.scale = buffers.tensor(kv_heads if cache.scale_head else 1, 4, specials)
        setattr(problem, name, cache)
    slots = generator.sample(range(pages * page_size), tokens)
    slots = [slot if generator.random() < 0.8 else -generator.randint(1, 1 << 30) for slot in slots]
    problem.wide_slots = generator.randrange(2)
    problem.slots = buffers.integers(slots, wide=bool(problem.wide_slots))
    if generator.randrange(2):
        problem.rotary_dim = 2 * generator.randint(0, head_dim // 2)
        problem.interleaved = generator.randrange(2)
        problem.cos_sin_rows = generator.randint(1, 50)
        problem.cos_sin_row = problem.rotary_dim + generator.randrange(3)
        problem.float_cos_sin = generator.randrange(2)
        problem.cos_sin = buffers.tensor(
            (problem.cos_sin_rows - 1) * problem.cos_sin_row + problem.rotary_dim,
            4 if problem.float_cos_sin else size,
            specials,
        )
        problem.wide_positions = generator.randrange(2)
        problem.positions = buffers.integers(
            [generator.randrange(-problem.cos_sin_rows, problem.cos_sin_rows) for _ in range(tokens)],
            wide=bool(problem.wide_positions),
        )
    for name in ("query_norm", "key_norm"):
        if generator.randrange(2):
            is_float = generator.randrange(2)
            setattr(problem, f"float_{name}", is_float)
            setattr(problem, name, buffers.tensor(head_dim, 4 if is_float else size, specials))
    problem.eps = generator.choice((1e-6, 0.0, 1.0))
    launch = library.flashmoe_paged_append
    launch.argtypes = [ctypes.c_void_p] + [ctypes.c_int] * 2
    launch.restype = None
    launch(ctypes.addressof(problem), element_type, generator.choice((1, 1, 2, 3)))
    buffers.free()


if __name__ == "__main__":
    main(call)
