"""What mma.sync reaches on the GPU at hand, from registers and with the instructions that kernels need beside it.

    python benchmarks/mma_rate.py

TFLOP/s, bf16: the ceiling of the portable kernels. No kernel of an operation, so it is nothing that the lab could race.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from cudadent42.timing.cuda_timers import CudaGraphTimer
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import load, make_context_current
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, CudaKernel

ROUNDS = 20_000
READINGS = 5
BESIDE = ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2))
"""ldmatrix, and exponentials, per four products."""
_THREADS = 128
_BLOCKS_PER_MULTIPROCESSOR = 2
_FLOPS = 16 * 4096
"""Of a warp in a round."""


def rate(ldmatrix: int, exponentials: int) -> float:
    device = device_of(0)
    kernel = CudaKernel(
        source="mma_rate.cu",
        function="mma_rate",
        architecture=device.architecture,
        macros={
            "LDMATRIX": ldmatrix,
            "EXPONENTIALS": exponentials,
            "ELEMENT_BF16": 1,
            "NATIVE_CP_ASYNC": 1,
            "MMA_K": 16,
        },
        threads_per_block=_THREADS,
        dynamic_shared_bytes=0,
        directory=Path(__file__).parent / "kernels",
        header_directory=KERNEL_DIRECTORY,
    )
    blocks = _BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors
    out = torch.empty(blocks * _THREADS, device="cuda")
    launcher = Launcher(load(kernel, 0, False), (blocks, 1, 1), kernel, 16)
    struct.pack_into("Qi", launcher.buffer, 0, out.data_ptr(), ROUNDS)

    def call() -> torch.Tensor:
        launcher.start(torch.cuda.current_stream().cuda_stream)
        return out

    read = CudaGraphTimer("cuda:0", None).calibrate([call])
    fastest_ms = min(read().latency_ms for _ in range(READINGS))
    return blocks * _THREADS / 32 * ROUNDS * _FLOPS / fastest_ms / 1e9


def main() -> None:
    torch.zeros(1, device="cuda")
    make_context_current(0)
    print(torch.cuda.get_device_name(0))
    for ldmatrix, exponentials in BESIDE:
        print(f"ldmatrix {ldmatrix}, exponentials {exponentials}: {rate(ldmatrix, exponentials):.0f} TFLOP/s")


if __name__ == "__main__":
    main()
