"""Run by test_library.py in a process of its own: calls a kernel built with sanitizers. Argument: the library.

Without torch, whose libraries do not go with AddressSanitizer; it watches buffers from malloc. Prints
"passed" when every call returned.
"""

from __future__ import annotations

import ctypes
import itertools
import sys


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


def main() -> None:
    launch = ctypes.CDLL(sys.argv[1]).flashmoe_attention_forward
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    shapes = [
        (1, 1, 1, 1, 8),
        (1, 1, 17, 33, 24),
        (2, 2, 1, 67, 72),
        (2, 1, 65, 130, 64),
        (1, 1, 150, 130, 64),  # narrow tiles for three threads
        (1, 1, 130, 130, 256),
        (4, 2, 3, 67, 72),
        (2, 2, 130, 5, 256),
        (1, 1, 1, 1025, 64),  # keys that are split
        (8, 2, 1, 2050, 72),
    ]
    for element_type, shape, causal, threads in itertools.product(range(3), shapes, (0, 1), (1, 3)):
        heads, kv_heads, seqlen_q, seqlen_k, head_dim = shape
        size = 4 if element_type == 0 else 2

        def strides(heads: int, seq: int, row: int = head_dim * size) -> tuple[int, int, int]:
            return heads * seq * row, seq * row, row

        of_queries, of_keys = strides(heads, seqlen_q), strides(kv_heads, seqlen_k)
        problem = Problem(element_type, 1, heads, kv_heads, seqlen_q, seqlen_k, head_dim)
        problem.query_stride = problem.out_stride = of_queries
        problem.key_stride = problem.value_stride = of_keys
        problem.causal = causal
        problem.softmax_scale = head_dim**-0.5
        of_query = heads * seqlen_q * head_dim * size
        of_key = kv_heads * seqlen_k * head_dim * size
        buffers = [
            libc.malloc(length) for length in (of_query, of_key, of_key, of_query, heads * seqlen_q * 4)
        ]
        for buffer, length in zip(buffers, (of_query, of_key, of_key), strict=False):
            ctypes.memset(buffer, 0x3C, length)
        lse = buffers[4] if causal else None  # without it float16 may take products of integers
        assert launch(ctypes.addressof(problem), *buffers[:4], lse, threads) == 0
        for buffer in buffers:
            libc.free(buffer)
    print("passed")


if __name__ == "__main__":
    main()
