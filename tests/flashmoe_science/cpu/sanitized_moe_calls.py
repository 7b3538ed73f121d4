"""Run by test_moe.py in a process of its own: calls a kernel built with sanitizers. Argument: the library.

Without torch, whose libraries do not go with AddressSanitizer; it watches buffers from malloc. Prints
"passed" when every call returned.
"""

from __future__ import annotations

import ctypes
import itertools
import sys

ACTIVATIONS = range(1, 8)
GATED = (1, 2, 3, 4)
IDS = (-1, 0, 2, 1, 3, 2**31 - 1, -(2**31), 0)


def main() -> None:
    launch = ctypes.CDLL(sys.argv[1]).flashmoe_moe_forward
    launch.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int]
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    shapes = [(1, 16, 16, 1, 1), (5, 48, 80, 3, 2), (70, 64, 16, 3, 3), (300, 16, 48, 4, 1)]
    for element_type, shape, activation, wide, threads in itertools.product(
        range(3), shapes, ACTIVATIONS, (0, 1), (1, 3)
    ):
        tokens, hidden, intermediate, experts, top_k = shape
        interleaved = wide if activation in GATED else 0
        problem = (ctypes.c_int64 * 11)(
            element_type, tokens, hidden, intermediate, experts, top_k, activation, interleaved, wide, 0, 0
        )
        size = 4 if element_type == 0 else 2
        rows = (2 if activation in GATED else 1) * intermediate
        slots = tokens * top_k
        lengths = (
            tokens * hidden * size,
            experts * rows * hidden * size,
            experts * hidden * intermediate * size,
            slots * 4,
            slots * (8 if wide else 4),
            tokens * hidden * size,
            slots * rows * size,
            experts * rows * size,
            experts * hidden * size,
        )
        buffers = [libc.malloc(length) for length in lengths]
        for buffer, length in zip(buffers[:4], lengths, strict=False):
            ctypes.memset(buffer, 0x3C, length)
        number = ctypes.c_int64 if wide else ctypes.c_int32
        ids = (number * slots).from_address(buffers[4])
        for slot in range(slots):
            ids[slot] = IDS[slot % len(IDS)]
        *tensors, z, w13_bias, w2_bias = buffers
        ctypes.memset(w13_bias, 0x3C, lengths[-2])
        ctypes.memset(w2_bias, 0x3C, lengths[-1])
        for kept, biases in ((None, (None, None)), (z, (w13_bias, w2_bias))):
            assert launch(ctypes.addressof(problem), *tensors, None, None, *biases, kept, threads) == 0
        for buffer in buffers:
            libc.free(buffer)
    print("passed")


if __name__ == "__main__":
    main()
