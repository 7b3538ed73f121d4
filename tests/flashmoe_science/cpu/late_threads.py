"""Run by test_library.py without torch, with late_team.cpp loaded ahead of all other libraries.

Argument: the library. OpenMP's threads begin as late as is said here, and the clock goes on only as it is told to.
"""

from __future__ import annotations

import array
import ctypes
import random
import sys

from sanitized_calls import Problem

SECOND_NS = 1_000_000_000
HEADS, SEQLEN, HEAD_DIM = 4, 96, 64


def main() -> None:
    stand_ins = ctypes.CDLL(None)
    passed, late = (ctypes.c_int64.in_dll(stand_ins, name) for name in ("passed_ns", "late_ns"))
    teams = ctypes.c_int.in_dll(stand_ins, "teams")
    launch = ctypes.CDLL(sys.argv[1]).flashmoe_attention_forward
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
    problem = Problem(0, 1, HEADS, HEADS, SEQLEN, SEQLEN, HEAD_DIM)
    row = HEAD_DIM * 4
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
    assert teams.value == 0

    def takes_the_team(seconds_later: int) -> bool:
        passed.value += seconds_later * SECOND_NS
        before = teams.value
        assert run(3) == alone
        return teams.value == before + 1

    for _ in range(20):  # of threads that begin in time
        assert takes_the_team(0)
    late.value = 1000 * SECOND_NS
    assert takes_the_team(0)
    for _ in range(20):  # twice as long without the team, however many calls
        assert not takes_the_team(0)
    assert not takes_the_team(1000)
    assert takes_the_team(1500)
    assert not takes_the_team(3000)  # it is late again: four times as long
    assert takes_the_team(1500)
    assert not takes_the_team(7000)
    late.value = 0
    assert takes_the_team(1500)  # in time
    assert takes_the_team(0)
    late.value = 1000 * SECOND_NS
    assert takes_the_team(0)
    assert not takes_the_team(1000)
    assert takes_the_team(1500)  # twice again
    print("passed")


if __name__ == "__main__":
    main()
