"""Run by test_library.py in a process of its own: calls the backward kernel built with sanitizers.

Argument: the library. As sanitized_calls.py. Prints "passed" when every call returned.
"""

from __future__ import annotations

import ctypes
import itertools
import sys

NAMES = ("query", "key", "value", "out", "grad_out", "grad_lse", "grad_query", "grad_key", "grad_value")


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("element_type", "batch", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("seqlen_q", "seqlen_k", "head_dim")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in NAMES),
        ("causal", ctypes.c_int64),
        ("softmax_scale", ctypes.c_double),
    )


def main() -> None:
    launch = ctypes.CDLL(sys.argv[1]).flashmoe_attention_backward
    launch.argtypes = [ctypes.c_void_p] * 11 + [ctypes.c_int]
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    shapes = [
        (1, 1, 1, 1, 8),
        (1, 1, 17, 33, 24),
        (2, 2, 1, 67, 72),
        (2, 1, 65, 130, 64),
        (4, 2, 3, 67, 72),
        (2, 2, 130, 5, 256),
        (1, 1, 300, 200, 40),
    ]
    # 0x3c: small numbers; 0xff: NaN in every type, which takes the way of what is not finite.
    for element_type, shape, causal, threads, fill, needed in itertools.product(
        range(3), shapes, (0, 1), (1, 3), (0x3C, 0xFF), (7, 1, 4)
    ):
        heads, kv_heads, seqlen_q, seqlen_k, head_dim = shape
        row = head_dim * (4 if element_type == 0 else 2)
        problem = Problem(element_type, 1, heads, kv_heads, seqlen_q, seqlen_k, head_dim)
        sizes = {}
        for name in NAMES:
            of_keys = name.removeprefix("grad_") in ("key", "value")
            rows, count = (seqlen_k, kv_heads) if of_keys else (seqlen_q, heads)
            bytes_of_row = 4 if name == "grad_lse" else row
            sizes[name] = count * rows * bytes_of_row
            setattr(problem, f"{name}_stride", (sizes[name], rows * bytes_of_row, bytes_of_row))
        problem.causal = causal
        problem.softmax_scale = head_dim**-0.5
        sizes["lse"] = heads * seqlen_q * 4
        buffers = {name: libc.malloc(size) for name, size in sizes.items()}
        for name in ("query", "key", "value", "out", "grad_out", "grad_lse", "lse"):
            ctypes.memset(buffers[name], fill, sizes[name])
        given = [buffers[name] for name in ("query", "key", "value", "out", "lse", "grad_out", "grad_lse")]
        wanted = [
            buffers[name] if needed >> index & 1 else None
            for index, name in enumerate(("grad_query", "grad_key", "grad_value"))
        ]
        assert launch(ctypes.addressof(problem), *given, *wanted, threads) == 0
        for buffer in buffers.values():
            libc.free(buffer)
    print("passed")


if __name__ == "__main__":
    main()
