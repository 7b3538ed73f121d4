"""Host time of attention calls on CUDA tensors: steady state with its parts, and the first call of a process.

Usage: PYTHONPATH=src python benchmarks/cuda_host.py
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashmoe_science
from flashmoe_science.cuda import forward


def per_call(call: Callable[[], Any]) -> float:
    """Microseconds per call, the least of 30 batches that are short enough not to fill the launch queue."""
    best = math.inf
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(300):
            call()
        best = min(best, (time.perf_counter() - start) / 300)
    return best * 1e6


def host_times() -> dict[str, float]:
    """Microseconds of host time per call; the kernels are short, so the queue never fills."""
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    raw_stream = torch._C._cuda_getCurrentRawStream
    return {
        "flash_attention": per_call(lambda: flashmoe_science.flash_attention(q, k, v)),
        "forward": per_call(lambda: forward(q, k, v)),
        "forward with lse": per_call(lambda: forward(q, k, v, return_lse=True)),
        "forward causal": per_call(lambda: forward(q, k, v, causal=True)),
        "sdpa": per_call(lambda: scaled_dot_product_attention(q, k, v)),
        "empty_like": per_call(lambda: torch.empty_like(q)),
        "new_empty lse": per_call(lambda: q.new_empty(q.shape[:3], dtype=torch.float32)),
        "four data_ptr": per_call(lambda: (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.data_ptr())),
        "raw stream": per_call(lambda: raw_stream(0)),
        "get_device": per_call(lambda: q.get_device()),
        "current device": per_call(lambda: torch._C._cuda_getDevice()),
        "shapes and strides": per_call(lambda: (q.shape, k.shape, q.stride(), k.stride(), v.stride())),
        "nothing": per_call(lambda: None),
    }


_FIRST_CALL = """
import time, torch
q = torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
from flashmoe_science.cuda import forward
imported = time.perf_counter()
forward(q, q, q)
torch.cuda.synchronize()
stop = time.perf_counter()
print((imported - start) * 1e3, (stop - imported) * 1e3)
"""


def first_calls() -> dict[str, list[float]]:
    """Milliseconds of (import, first call) in a fresh process, with an empty and with a filled cache.

    Raises:
        subprocess.CalledProcessError: the process failed; its own words went to stderr.
    """
    sources = str(Path(flashmoe_science.__file__).parent.parent)
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            **os.environ,
            "PYTHONPATH": sources,
            "FLASHMOE_CACHE_DIR": str(Path(directory) / "cache"),
        }
        results = {}
        for name in ("not cached", "cached", "cached again"):
            run = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            results[name] = [float(x) for x in run.stdout.split()]
        return results


if __name__ == "__main__":
    print("host time per call, us:", ", ".join(f"{name} {us:.2f}" for name, us in host_times().items()))
    print("import and first call, ms:", first_calls())
