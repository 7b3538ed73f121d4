"""Random calls of a sanitized topk_routing_backward. Arguments: the first seed, how many, the library."""

from __future__ import annotations

import ctypes
import random

from random_topk_routing_calls import Problem, random_problem
from sanitized import Memory, main

PROBLEM = [name for name, _ in Problem._fields_]


def call(library: ctypes.CDLL, generator: random.Random) -> None:
    problem = random_problem(generator)
    size = 4 if problem.element_type == 0 else 2
    tokens, experts, k = problem.tokens, problem.experts, problem.top_k
    logits, gradient = (Memory(tokens * experts, size, generator) for _ in range(2))
    logits.fill(generator.choice((0, 0, 3)))
    ids, counts = Memory(tokens * k, 4, generator), Memory(experts, 8, generator)
    chosen = (ctypes.c_int32 * (tokens * k)).from_address(ids.address)
    for token in range(tokens):
        chosen[token * k : (token + 1) * k] = generator.sample(range(experts), k)
    slots = (ctypes.c_int64 * experts).from_address(counts.address)
    for expert in range(experts):
        slots[expert] = generator.randrange(tokens + 1)
    given = [
        Memory(elements, 4, generator) if generator.randrange(2) else None for elements in (tokens * k, 1, 1)
    ]
    for each in given:
        if each is not None:
            each.fill(generator.choice((0, 0, 1)))
    of_weights, of_balance, of_z = given
    order = [logits, ids, of_weights, counts if of_balance else None, of_balance, of_z, gradient]
    tensors = (ctypes.c_void_p * len(order))(*(None if each is None else each.address for each in order))
    launch = library.flashmoe_topk_routing_backward
    launch.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int]
    assert launch(ctypes.addressof(problem), ctypes.addressof(tensors), generator.choice((1, 1, 2, 3))) == 0
    for memory in (logits, gradient, ids, counts, *given):
        if memory is not None:
            memory.free()


if __name__ == "__main__":
    main(call)
