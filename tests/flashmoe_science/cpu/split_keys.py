"""Run by test_library.py as late_threads.py. Argument: the library. Of how many threads a team is for few rows.

One head has one task for each part of its keys, and a single one if they are not split.
"""

from __future__ import annotations

import array
import ctypes
import random
import sys

from sanitized_calls import Problem

MIN_PART_KEYS = 512
"""Of split.h."""
HEAD_DIM = 64


def main() -> None:
    stand_ins = ctypes.CDLL(None)
    teams, members = (ctypes.c_int.in_dll(stand_ins, name) for name in ("teams", "members"))
    launch = ctypes.CDLL(sys.argv[1]).flashmoe_attention_forward
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
    generator = random.Random(0)

    def normal(rows: int) -> array.array[float]:
        return array.array("f", (generator.gauss(0, 1) for _ in range(rows * HEAD_DIM)))

    for rows, keys in ((1, 4096), (20, 4096), (4, 1024), (4, 1023)):
        problem = Problem(0, 1, 1, 1, rows, keys, HEAD_DIM)
        row = HEAD_DIM * 4
        problem.query_stride = problem.out_stride = (rows * row, rows * row, row)
        problem.key_stride = problem.value_stride = (keys * row, keys * row, row)
        problem.softmax_scale = HEAD_DIM**-0.5
        query, key, value, out = normal(rows), normal(keys), normal(keys), normal(rows)
        addresses = [each.buffer_info()[0] for each in (query, key, value, out)]
        parts, results = keys // MIN_PART_KEYS, set()
        for threads in (1, 2, 3, 8, 20):
            before = teams.value
            assert launch(ctypes.addressof(problem), *addresses, None, threads) == 0
            results.add(out.tobytes())
            wanted = min(threads, parts)
            assert teams.value - before == (wanted > 1), (rows, keys, threads)
            assert wanted == 1 or members.value == wanted, (rows, keys, threads, members.value)
        assert len(results) == 1
    print("passed")


if __name__ == "__main__":
    main()
