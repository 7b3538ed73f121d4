"""A router's top-k in one kernel beside PyTorch's softmax, topk and division, on the GPU at hand.

    python benchmarks/topk_routing.py

Microseconds of one call in a replayed graph, medians of readings in turns. Routing by itself is no operation of the
lab, whose mixture of experts is given ids and weights.
"""

from __future__ import annotations

import statistics

import torch

from cudadent42.timing.cuda_timers import CudaGraphTimer
from flashmoe_science import topk_routing

SIZES = ((1, 128, 8), (256, 128, 8), (32768, 128, 8), (8192, 8, 2), (32768, 256, 8))
"""Tokens, experts, k."""
READINGS = 15


def composed(logits: torch.Tensor, k: int) -> torch.Tensor:
    weights, _ = logits.float().softmax(-1).topk(k)
    return weights / weights.sum(-1, keepdim=True)


def main() -> None:
    print(torch.cuda.get_device_name(0))
    timer = CudaGraphTimer("cuda:0", None)
    for tokens, experts, k in SIZES:
        logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)
        read = {
            "kernel": timer.calibrate([lambda logits=logits, k=k: topk_routing(logits, k)[0]]),
            "PyTorch": timer.calibrate([lambda logits=logits, k=k: composed(logits, k)]),
        }
        times: dict[str, list[float]] = {name: [] for name in read}
        for _ in range(READINGS):
            for name, one in read.items():
                times[name].append(one().latency_ms * 1e3)
        medians = ", ".join(f"{name} {statistics.median(each):.2f} us" for name, each in times.items())
        print(f"{tokens} tokens, {experts} experts, k {k}: {medians}", flush=True)


if __name__ == "__main__":
    main()
