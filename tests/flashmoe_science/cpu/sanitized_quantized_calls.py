"""Run by test_quantized.py in a process of its own: calls the experts of quantised weights, built with sanitizers.

As sanitized_moe_calls.py: without torch, with buffers from malloc that end where what may be read ends.
Arguments: the bits of a weight, the library. Prints "passed" when every call returned.
"""

from __future__ import annotations

import ctypes
import itertools
import sys

SILU, RELU2_NO_MUL = 1, 7
IDS = (-1, 0, 2, 1, 3, 2**31 - 1, -(2**31), 0)
SHAPES = (
    # tokens, hidden, intermediate, experts, top_k, group of w13, group of w2
    (1, 32, 32, 1, 1, 32, 32),
    (1, 256, 128, 3, 2, 128, 64),
    (5, 192, 320, 3, 2, 64, 64),
    (16, 128, 96, 3, 3, 128, 96),
    (17, 128, 128, 3, 2, 128, 128),
    (300, 96, 64, 4, 1, 32, 64),
)
BYTES = (0x00, 0x3C, 0xFF)
"""Of the tokens: zeros, numbers of which most products are in integers, and NaN."""


def main() -> None:
    bits = int(sys.argv[1])
    launch = ctypes.CDLL(sys.argv[2]).flashmoe_moe_forward
    launch.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int]
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    for element_type, shape, activation, byte, threads in itertools.product(
        range(3), SHAPES, (SILU, RELU2_NO_MUL), BYTES, (1, 3)
    ):
        tokens, hidden, intermediate, experts, top_k, w13_group, w2_group = shape
        sizes = (tokens, hidden, intermediate, experts, top_k)
        problem = (ctypes.c_int64 * 11)(element_type, *sizes, activation, 0, 0, w13_group, w2_group)
        size = 4 if element_type == 0 else 2
        rows = (2 if activation == SILU else 1) * intermediate
        slots = tokens * top_k
        lengths = (
            tokens * hidden * size,
            experts * rows * hidden * bits // 8,
            experts * hidden * intermediate * bits // 8,
            slots * 4,
            slots * 4,
            tokens * hidden * size,
            experts * rows * (hidden // w13_group) * size,
            experts * hidden * (intermediate // w2_group) * size,
        )
        buffers = [libc.malloc(length) for length in lengths]
        for buffer, length in zip(buffers, lengths, strict=True):
            ctypes.memset(buffer, 0x3C, length)
        ctypes.memset(buffers[0], byte, lengths[0])
        ids = (ctypes.c_int32 * slots).from_address(buffers[4])
        for slot in range(slots):
            ids[slot] = IDS[slot % len(IDS)]
        assert launch(ctypes.addressof(problem), *buffers, None, None, None, threads) == 0
        for buffer in buffers:
            libc.free(buffer)
    print("passed")


if __name__ == "__main__":
    main()
