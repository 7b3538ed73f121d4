"""Random calls of a sanitized attention_forward. Arguments: the first seed, how many, the library."""

from __future__ import annotations

import ctypes
import math
import random

from sanitized import Memory, main


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("element_type", "batch", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("seqlen_q", "seqlen_k", "head_dim")),
        *(
            (name, ctypes.c_int64 * 3)
            for name in ("query_stride", "key_stride", "value_stride", "out_stride")
        ),
        ("causal", ctypes.c_int64),
        ("softmax_scale", ctypes.c_double),
    )


BF16 = 1
"""`ElementType` of problem.h."""

SCALES = (1.0, 0.125, 0.3, -0.2, 0.0, 50.0, 1e-38, 2e38)


def strides(
    shape: tuple[int, int, int], row: int, generator: random.Random, overlap: bool
) -> tuple[tuple[int, ...], int]:
    """In elements, for (batch, head, row), the three in any order, with gaps; and how many elements that takes."""
    steps = [0, 0, 0]
    step = row + generator.choice((0, 0, 1, 3, 16))
    for axis in generator.sample(range(3), 3):
        steps[axis] = 0 if overlap and generator.random() < 0.1 else step
        step *= max(1, shape[axis])
    if min(shape) == 0:
        return tuple(steps), 0
    return tuple(steps), sum((n - 1) * stride for n, stride in zip(shape, steps, strict=True)) + row


def call(library: ctypes.CDLL, generator: random.Random) -> None:
    element_type = generator.randrange(3)
    size = 4 if element_type == 0 else 2
    kv_heads = generator.choice((1, 1, 2, 3))
    batch, heads = generator.choice((0, 1, 1, 2)), kv_heads * generator.choice((1, 1, 2, 5))
    head_dim = 8 * generator.choice((*range(1, 33), 8, 16))
    seqlen_q = generator.choice((0, 1, 1, 2, generator.randint(1, 20), generator.randint(1, 150)))
    seqlen_k = generator.choice((0, 1, generator.randint(1, 20), generator.randint(1, 200)))
    if generator.random() < 0.15:  # few rows and many keys: these are split over threads
        seqlen_q, seqlen_k = generator.choice((1, 1, 2, 7, 13)), generator.randint(1024, 3000)
    elif generator.random() < 0.3:  # whole blocks of keys: what a matrix unit takes, and AVX2 as integers
        element_type, size, head_dim = BF16, 2, 8 * generator.choice((*range(4, 33, 4), *range(1, 33)))
        seqlen_q, seqlen_k = generator.randint(4, 150), 32 * generator.randint(1, 7)
        seqlen_k += generator.choice((0, 0, 0, 1, 17))
    problem = Problem(element_type, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim)
    problem.causal = generator.randrange(2)
    problem.softmax_scale = generator.choice((*SCALES, 1 / math.sqrt(head_dim)))
    of_queries, of_keys = (batch, heads, seqlen_q), (batch, kv_heads, seqlen_k)
    buffers = []
    for name, shape, specials in (
        ("query_stride", of_queries, generator.choice((0, 0, 3))),
        ("key_stride", of_keys, generator.choice((0, 0, 3))),
        ("value_stride", of_keys, generator.choice((0, 0, 3))),
        ("out_stride", of_queries, 0),
    ):
        steps, elements = strides(shape, head_dim, generator, overlap=name != "out_stride")
        setattr(problem, name, tuple(step * size for step in steps))
        memory = Memory(elements, size, generator)
        memory.fill(specials)
        buffers.append(memory)
    lse = Memory(batch * heads * seqlen_q, 4, generator) if generator.randrange(2) else None
    launch = library.flashmoe_attention_forward
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
    addresses = [memory.address for memory in buffers]
    threads = generator.choice((1, 1, 2, 3))
    assert launch(ctypes.addressof(problem), *addresses, None if lse is None else lse.address, threads) == 0
    for memory in (*buffers, *(() if lse is None else (lse,))):
        memory.free()


if __name__ == "__main__":
    main(call)
