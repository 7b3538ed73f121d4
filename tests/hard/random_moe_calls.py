"""Random calls of a sanitized moe_forward. Arguments: the first seed, how many, the library.

What the library was built for stands in its name: ``moe_forward int8-avx2.so`` takes weights of 8 bits.
"""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

from sanitized import Memory, main

GATED, ACTIVATIONS = (1, 2, 3, 4), 7
"""Codes of activation.h, which begin with 1."""
STRANGE_IDS = (-1, 2**31 - 1, -(2**31))
GROUP_STEP = 32
"""A group of quantised weights is a multiple of so many."""
PROBLEM = (
    *(
        "element_type",
        "tokens",
        "hidden",
        "intermediate",
        "experts",
        "top_k",
        "activation",
        "interleaved",
        "ids64",
    ),
    *("w13_group", "w2_group"),
)


def bits_of(library: ctypes.CDLL) -> int:
    """Of a weight; 0 where weights have the tokens' type."""
    name = Path(library._name).name
    return next((bits for bits in (8, 4) if f"int{bits}" in name), 0)


def depth_and_group(largest: int, bits: int, generator: random.Random) -> tuple[int, int]:
    """A depth, and how many weights along it share a scale: 0 where there are no scales."""
    if not bits:
        return 16 * generator.randint(1, largest), 0
    group = GROUP_STEP * generator.choice((1, 1, 2, 3, 4))
    return group * generator.randint(1, max(1, 16 * largest // group)), group


def call(library: ctypes.CDLL, generator: random.Random) -> None:
    element_type, wide = generator.randrange(3), generator.randrange(2)
    activation = generator.randint(1, ACTIVATIONS)
    size = 4 if element_type == 0 else 2
    tokens = generator.choice((0, 1, 1, 2, generator.randint(1, 20), generator.randint(1, 300)))
    bits = bits_of(library)
    hidden, w13_group = depth_and_group(20, bits, generator)
    intermediate, w2_group = depth_and_group(7, bits, generator)
    experts = generator.randint(1, 9)
    top_k = generator.randint(1, experts)
    interleaved = generator.randrange(2) if activation in GATED else 0
    problem = (ctypes.c_int64 * len(PROBLEM))(
        *(element_type, tokens, hidden, intermediate, experts, top_k, activation, interleaved, wide),
        *(w13_group, w2_group),
    )
    rows = (2 if activation in GATED else 1) * intermediate
    slots = tokens * top_k
    weights = [experts * rows * hidden, experts * hidden * intermediate]
    stored = [
        Memory(count * bits // 8, 1, generator) if bits else Memory(count, size, generator)
        for count in weights
    ]
    groups = (w13_group, w2_group) if bits else ()
    scales = [Memory(count // group, size, generator) for count, group in zip(weights, groups, strict=False)]
    inputs = [Memory(tokens * hidden, size, generator), *stored, Memory(slots, 4, generator)]
    for memory in (*inputs, *scales):
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
    launch.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int]
    z = Memory(slots * rows, size, generator)
    addresses = [memory.address for memory in (*inputs, ids, out)]
    of_scales = [memory.address for memory in scales] if bits else [None, None]
    biases = [Memory(count, size, generator) for count in (experts * rows, experts * hidden)]
    of_biases = [generator.choice((None, bias.address)) for bias in biases]
    arguments = *addresses, *of_scales, *of_biases, generator.choice((None, z.address))
    assert launch(ctypes.addressof(problem), *arguments, generator.choice((1, 1, 2, 3))) == 0
    for memory in (*inputs, *scales, *biases, ids, out, z):
        memory.free()


if __name__ == "__main__":
    main(call)
