"""Random calls of a sanitized attention_backward. Arguments: the first seed, how many, the library."""

from __future__ import annotations

import ctypes
import math
import random

from random_attention_calls import BF16, SCALES, strides
from sanitized import Memory, main

GIVEN = ("query", "key", "value", "out", "grad_out", "grad_lse")
MADE = ("grad_query", "grad_key", "grad_value")


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("element_type", "batch", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("seqlen_q", "seqlen_k", "head_dim")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in (*GIVEN, *MADE)),
        ("causal", ctypes.c_int64),
        ("softmax_scale", ctypes.c_double),
    )


def call(library: ctypes.CDLL, generator: random.Random) -> None:
    element_type = generator.randrange(3)
    size = 4 if element_type == 0 else 2
    kv_heads = generator.choice((1, 1, 2))
    # Calls without an element do not reach the kernel.
    batch, heads = generator.choice((1, 1, 2)), kv_heads * generator.choice((1, 1, 2, 5))
    head_dim = 8 * generator.choice((*range(1, 33), 8, 16))
    seqlen_q = generator.choice((1, 2, generator.randint(1, 20), generator.randint(1, 150)))
    seqlen_k = generator.choice((1, generator.randint(1, 20), generator.randint(1, 200)))
    if generator.random() < 0.4:  # what a matrix unit takes
        element_type, size, head_dim = BF16, 2, 32 * generator.randint(1, 8)
    problem = Problem(element_type, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim)
    problem.causal = generator.randrange(2)
    problem.softmax_scale = generator.choice((*SCALES, 1 / math.sqrt(head_dim)))
    buffers: dict[str, Memory] = {}
    for name in (*GIVEN, *MADE):
        of_keys = name.removeprefix("grad_") in ("key", "value")
        shape = (batch, kv_heads, seqlen_k) if of_keys else (batch, heads, seqlen_q)
        is_lse = name == "grad_lse"
        bytes_of_one = 4 if is_lse else size
        steps, elements = strides(shape, 1 if is_lse else head_dim, generator, overlap=name in GIVEN)
        setattr(problem, f"{name}_stride", tuple(step * bytes_of_one for step in steps))
        memory = Memory(elements, bytes_of_one, generator)
        memory.fill(0 if name in MADE else generator.choice((0, 0, 3)))
        buffers[name] = memory
    lse = Memory(batch * heads * seqlen_q, 4, generator)
    lse.fill(generator.choice((0, 0, 3)))
    address = {name: memory.address for name, memory in buffers.items()}
    wanted = generator.randint(1, 7)
    arguments = [
        *(address[name] for name in ("query", "key", "value", "out")),
        *(lse.address, address["grad_out"], address["grad_lse"] if generator.randrange(2) else None),
        *(address[name] if wanted >> index & 1 else None for index, name in enumerate(MADE)),
    ]
    launch = library.flashmoe_attention_backward
    launch.argtypes = [ctypes.c_void_p] * 11 + [ctypes.c_int]
    assert launch(ctypes.addressof(problem), *arguments, generator.choice((1, 1, 2, 3))) == 0
    for memory in (*buffers.values(), lse):
        memory.free()


if __name__ == "__main__":
    main(call)
