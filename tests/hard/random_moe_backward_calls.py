"""Random calls of a sanitized moe_backward. Arguments: the first seed, how many, the library."""

from __future__ import annotations

import ctypes
import random

from random_moe_calls import ACTIVATIONS, GATED, STRANGE_IDS
from sanitized import Memory, main

PROBLEM = (
    *("element_type", "tokens", "hidden", "intermediate", "experts", "top_k", "activation", "interleaved"),
    *("ids64", "grad_output_row"),
)


def call(library: ctypes.CDLL, generator: random.Random) -> None:
    element_type, wide = generator.randrange(3), generator.randrange(2)
    activation = generator.randint(1, ACTIVATIONS)
    size = 4 if element_type == 0 else 2
    tokens = generator.choice((0, 1, 1, 2, generator.randint(1, 20), generator.randint(1, 200)))
    hidden, intermediate = 16 * generator.randint(1, 20), 16 * generator.randint(1, 7)
    experts = generator.randint(1, 9)
    top_k = generator.randint(1, experts)
    interleaved = generator.randrange(2) if activation in GATED else 0
    row = hidden + generator.choice((0, 0, 16))
    problem = (ctypes.c_int64 * len(PROBLEM))(
        *(element_type, tokens, hidden, intermediate, experts, top_k, activation, interleaved, wide),
        row * size,
    )
    rows = (2 if activation in GATED else 1) * intermediate
    slots = tokens * top_k
    numbers = {
        "grad_output": (tokens - 1) * row + hidden if tokens else 0,
        "hidden_states": tokens * hidden,
        "w13": experts * rows * hidden,
        "w2": experts * hidden * intermediate,
        "weights": slots,
        "z": slots * rows,
        "w2_bias": experts * hidden,
    }
    inputs = {}
    for name, elements in numbers.items():
        inputs[name] = Memory(elements, 4 if name == "weights" else size, generator)
        inputs[name].fill(generator.choice((0, 0, 2)))
    ids = Memory(slots, 8 if wide else 4, generator)
    chosen = ((ctypes.c_int64 if wide else ctypes.c_int32) * slots).from_address(ids.address)
    strange = (*STRANGE_IDS, experts, 2**40 if wide else experts + 1)
    for slot in range(slots):
        chosen[slot] = generator.choice(strange) if generator.random() < 0.1 else generator.randrange(experts)
    gradients = [
        Memory(elements, width, generator) if generator.random() < 0.7 else None
        for elements, width in (
            *((numbers[name], size) for name in ("hidden_states", "w13", "w2")),
            *((slots, 4), (experts * rows, size), (experts * hidden, size)),
        )
    ]
    given = [inputs[name] for name in ("grad_output", "hidden_states", "w13", "w2", "weights")]
    bias = inputs["w2_bias"] if generator.randrange(2) else None
    order = [*given, ids, inputs["z"], bias, *gradients]
    tensors = (ctypes.c_void_p * len(order))(*(None if each is None else each.address for each in order))
    launch = library.flashmoe_moe_backward
    launch.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int]
    assert launch(ctypes.addressof(problem), ctypes.addressof(tensors), generator.choice((1, 1, 2, 3))) == 0
    for memory in (*inputs.values(), ids, *gradients):
        if memory is not None:
            memory.free()


if __name__ == "__main__":
    main(call)
