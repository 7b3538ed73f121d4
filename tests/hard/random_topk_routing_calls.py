"""Random calls of a sanitized topk_routing. Arguments: the first seed, how many, the library."""

from __future__ import annotations

import ctypes
import random

from sanitized import Memory, main


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("element_type", "tokens", "experts", "top_k")),
        *((name, ctypes.c_int64) for name in ("sigmoid", "renormalize", "groups", "top_groups")),
        ("scale", ctypes.c_double),
    )


def random_problem(generator: random.Random) -> Problem:
    groups = generator.choice((1, 1, 1, 2, 5, 40))
    size = generator.choice((1, 2, 7, 8, 16, generator.randint(1, 400 // groups)))
    top_groups = generator.randint(1, groups)
    return Problem(
        generator.randrange(3),
        generator.choice((0, 1, 1, 2, 33, generator.randint(1, 200))),
        groups * size,
        generator.randint(1, min(top_groups * size, generator.choice((4, 10, 1000)))),
        generator.randrange(2),
        generator.randrange(2),
        groups,
        top_groups,
        generator.choice((1.0, 2.5)),
    )


def call(library: ctypes.CDLL, generator: random.Random) -> None:
    problem = random_problem(generator)
    size = 4 if problem.element_type == 0 else 2
    tokens, experts, slots = problem.tokens, problem.experts, problem.tokens * problem.top_k
    logits = Memory(tokens * experts, size, generator)
    logits.fill(generator.choice((0, 0, 3)))
    bias = Memory(experts, 4, generator) if generator.randrange(2) else None
    if bias is not None:
        bias.fill(generator.choice((0, 0, 3)))
    weights, ids = Memory(slots, 4, generator), Memory(slots, 4, generator)
    losses = [Memory(1, 4, generator), Memory(1, 4, generator), Memory(experts, 8, generator)]
    with_losses = tokens > 0 and generator.randrange(2)
    order = [logits, bias, weights, ids, *(losses if with_losses else (None,) * 3)]
    tensors = (ctypes.c_void_p * len(order))(*(None if each is None else each.address for each in order))
    launch = library.flashmoe_topk_routing
    launch.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int]
    assert launch(ctypes.addressof(problem), ctypes.addressof(tensors), generator.choice((1, 1, 2, 3))) == 0
    chosen = (ctypes.c_int32 * slots).from_address(ids.address)
    for first in range(0, slots, problem.top_k):
        row = chosen[first : first + problem.top_k]
        assert len(set(row)) == len(row)
        assert all(0 <= expert < experts for expert in row)
    if with_losses:
        assert sum((ctypes.c_int64 * experts).from_address(losses[2].address)) == slots
    for memory in (logits, bias, weights, ids, *losses):
        if memory is not None:
            memory.free()


if __name__ == "__main__":
    main(call)
