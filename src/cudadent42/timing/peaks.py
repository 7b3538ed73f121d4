"""What a GPU reaches at most, measured now with PyTorch: a large matrix product, and a large copy."""

from __future__ import annotations

import torch

from cudadent42.model.dtypes import DTYPES
from cudadent42.model.implementations import Call
from cudadent42.timing.cuda_timers import CudaQueueTimer

_SIDES = {"fp16": 8192, "bf16": 8192, "fp32": 4096}
"""Of the square matrices: large enough for the tensor cores to be all that counts."""

_COPY_BYTES = 1 << 30
_MEMORY_SHARE = 0.1
"""Of the free memory that one buffer may take."""

_WARM_UPS = 3
_WINDOWS = 5
_CALLS = 4
"""In a window. The best window counts: a ceiling is what the machine can do, not what it usually does."""


def measure_cuda_peaks(device: str) -> dict[str, float]:
    """``fp16_gflops``, ``bf16_gflops``, ``fp32_gflops`` (of matrix products) and ``copy_gbps`` (read and written).

    About 0.3 s on an H200. Random values, as zeros draw less power and so run faster. A dtype that this GPU does
    not multiply is left out.
    """
    free, _ = torch.cuda.mem_get_info(device)
    most = int(free * _MEMORY_SHARE)
    peaks: dict[str, float] = {}
    for dtype, side in _SIDES.items():
        side = min(side, int((most / DTYPES[dtype].itemsize) ** 0.5) // 256 * 256)
        seconds = _product_seconds(dtype, side, device)
        if seconds is not None:
            peaks[f"{dtype}_gflops"] = 2 * side**3 / seconds * 1e-9
    size = min(_COPY_BYTES, most)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    peaks["copy_gbps"] = 2 * size / _best_seconds(lambda: target.copy_(source), device) * 1e-9
    return peaks


def _product_seconds(dtype: str, side: int, device: str) -> float | None:
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (
        torch.randn(side, side, generator=generator, dtype=torch.float32, device=device).to(DTYPES[dtype])
        for _ in range(2)
    )
    out = torch.empty_like(a)
    try:
        return _best_seconds(lambda: torch.mm(a, b, out=out), device)
    except RuntimeError:  # what cuBLAS says of a dtype that the GPU lacks
        return None


def _best_seconds(call: Call, device: str) -> float:
    """Per call, in the best of several windows."""
    for _ in range(_WARM_UPS):
        call()
    read = CudaQueueTimer(device, None).calibrate([call], _CALLS)
    return min(read().latency_ms for _ in range(_WINDOWS)) * 1e-3
