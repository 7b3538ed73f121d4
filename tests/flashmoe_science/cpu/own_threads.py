"""Run by test_library.py without torch, so that no OpenMP runtime is there and the kernel's own threads run.

Argument: the library. Calls it from one thread, several, and a forked child, and compares the bytes.
"""

from __future__ import annotations

import array
import ctypes
import os
import random
import sys

from sanitized_calls import Problem

HEADS, SEQLEN, HEAD_DIM = 4, 96, 64


def main() -> None:
    assert not hasattr(ctypes.CDLL(None), "GOMP_parallel"), "an OpenMP runtime is loaded"
    launch = ctypes.CDLL(sys.argv[1]).flashmoe_attention_forward
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
    row = HEAD_DIM * 4
    problem = Problem(0, 1, HEADS, HEADS, SEQLEN, SEQLEN, HEAD_DIM)
    for name in ("query_stride", "key_stride", "value_stride", "out_stride"):
        setattr(problem, name, (HEADS * SEQLEN * row, SEQLEN * row, row))
    problem.softmax_scale = HEAD_DIM**-0.5
    generator = random.Random(0)
    count = HEADS * SEQLEN * HEAD_DIM
    query, key, value = (array.array("f", (generator.gauss(0, 1) for _ in range(count))) for _ in range(3))

    def run(threads: int) -> bytes:
        out = array.array("f", [0.0]) * count
        addresses = (each.buffer_info()[0] for each in (query, key, value, out))
        assert launch(ctypes.addressof(problem), *addresses, None, threads) == 0
        return out.tobytes()

    alone = run(1)
    assert any(alone)
    for _ in range(200):
        assert run(3) == alone
    child = os.fork()
    if child == 0:
        os._exit(0 if all(run(3) == alone for _ in range(20)) else 1)
    assert os.waitpid(child, 0)[1] == 0, "the forked child"
    assert run(3) == alone
    print("passed")


if __name__ == "__main__":
    main()
