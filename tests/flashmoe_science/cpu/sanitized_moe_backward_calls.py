"""Run by test_moe_backward.py in a process of its own: calls a kernel built with sanitizers. Argument: the library.

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
NEEDS = ((1, 1, 1, 1, 1, 1), (1, 0, 0, 0, 0, 0), (0, 0, 1, 0, 0, 1), (0, 0, 0, 1, 0, 0))


def main() -> None:
    launch = ctypes.CDLL(sys.argv[1]).flashmoe_moe_backward
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    shapes = [(1, 16, 16, 1, 1), (5, 48, 144, 3, 2), (70, 144, 16, 3, 3)]
    for element_type, shape, activation, wide, needs in itertools.product(
        range(3), shapes, ACTIVATIONS, (0, 1), NEEDS
    ):
        tokens, hidden, intermediate, experts, top_k = shape
        size = 4 if element_type == 0 else 2
        interleaved = wide if activation in GATED else 0
        problem = (ctypes.c_int64 * 10)(
            *(element_type, tokens, hidden, intermediate, experts, top_k),
            *(activation, interleaved, wide, hidden * size),
        )
        rows = (2 if activation in GATED else 1) * intermediate
        slots = tokens * top_k
        inputs = (
            tokens * hidden * size,
            tokens * hidden * size,
            experts * rows * hidden * size,
            experts * hidden * intermediate * size,
            slots * 4,
            slots * (8 if wide else 4),
            slots * rows * size,
            experts * hidden * size,
        )
        gradients = (*inputs[1:5], experts * rows * size, experts * hidden * size)
        buffers = [libc.malloc(length) for length in inputs]
        for buffer, length in zip(buffers, inputs, strict=True):
            ctypes.memset(buffer, 0x3C, length)
        number = ctypes.c_int64 if wide else ctypes.c_int32
        ids = (number * slots).from_address(buffers[5])
        for slot in range(slots):
            ids[slot] = IDS[slot % len(IDS)]
        buffers += [
            libc.malloc(length) if needed else None for length, needed in zip(gradients, needs, strict=True)
        ]
        tensors = (ctypes.c_void_p * len(buffers))(*buffers)
        assert launch(ctypes.addressof(problem), ctypes.addressof(tensors), 1 + 2 * wide) == 0
        for buffer in buffers:
            libc.free(buffer)
    print("passed")


if __name__ == "__main__":
    main()
