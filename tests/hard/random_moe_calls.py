"""Random calls of a sanitized moe_forward. Arguments: the first seed, how many, the library."""

from __future__ import annotations

import ctypes
import random

from sanitized import Memory, main

GATED = (0, 1, 2)
STRANGE_IDS = (-1, 2**31 - 1, -(2**31))


def call(library: ctypes.CDLL, generator: random.Random) -> None:
    element_type, activation, wide = generator.randrange(3), generator.randrange(6), generator.randrange(2)
    size = 4 if element_type == 0 else 2
    tokens = generator.choice((0, 1, 1, 2, generator.randint(1, 20), generator.randint(1, 300)))
    hidden = 16 * generator.choice((1, 2, 3, 5, 9, 20))
    intermediate = 16 * generator.choice((1, 2, 3, 5, 7))
    experts = generator.randint(1, 9)
    top_k = generator.randint(1, experts)
    interleaved = generator.randrange(2) if activation in GATED else 0
    problem = (ctypes.c_int64 * 9)(
        element_type, tokens, hidden, intermediate, experts, top_k, activation, interleaved, wide
    )
    rows = (2 if activation in GATED else 1) * intermediate
    slots = tokens * top_k
    inputs = [
        Memory(tokens * hidden, size, generator),
        Memory(experts * rows * hidden, size, generator),
        Memory(experts * hidden * intermediate, size, generator),
        Memory(slots, 4, generator),
    ]
    for memory in inputs:
        memory.fill(generator.choice((0, 0, 2)))
    ids = Memory(slots, 8 if wide else 4, generator)
    numbers = ((ctypes.c_int64 if wide else ctypes.c_int32) * slots).from_address(ids.address)
    strange = (*STRANGE_IDS, experts, 2**40 if wide else experts + 1)
    for slot in range(slots):
        numbers[slot] = (
            generator.choice(strange) if generator.random() < 0.1 else generator.randrange(experts)
        )
    out = Memory(tokens * hidden, size, generator)
    launch = library.flashmoe_moe_forward
    launch.argtypes = [ctypes.c_void_p] * 10 + [ctypes.c_int]
    z = Memory(slots * rows, size, generator)
    buffers = [*inputs, ids, out, z]
    *addresses, kept = (memory.address for memory in buffers)
    arguments = *addresses, None, None, generator.choice((None, kept))
    assert launch(ctypes.addressof(problem), *arguments, generator.choice((1, 1, 2, 3))) == 0
    for memory in buffers:
        memory.free()


if __name__ == "__main__":
    main(call)
