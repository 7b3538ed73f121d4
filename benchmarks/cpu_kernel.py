"""The CPU kernel against PyTorch SDPA, interleaved in one process: ratios, throughput, error, as a table.

    PYTHONPATH=src python benchmarks/cpu_kernel.py [--dtype fp32 bf16 fp16] [--shape 1,8,2048,64] [--error]

A quick look while tuning; `cudadent42 run` is the measurement with intervals and a record. Each repeat times
both implementations in random order, with an inner loop of at least 200 us for small shapes; the ratio is
that of medians. GFLOP/s count 4 * batch * heads * pairs * head_dim, pairs being seq^2, or seq (seq + 1) / 2
with a causal mask.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable

import torch

from flashmoe_science import cpu, flash_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SUITE = [
    ((1, 1, 32, 64), False),
    ((1, 1, 64, 64), False),
    ((1, 1, 128, 64), False),
    ((1, 1, 256, 64), False),
    ((1, 1, 512, 64), False),
    ((2, 4, 128, 64), False),
    ((1, 8, 512, 64), False),
    ((1, 8, 1024, 64), False),
    ((1, 8, 2048, 64), False),
    ((1, 8, 2048, 64), True),
    ((1, 16, 1024, 128), True),
    ((4, 8, 512, 64), False),
]
INNER_LOOP_S = 200e-6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--shape", nargs="+", help="batch,heads,seq,head_dim; the default suite unless given")
    parser.add_argument("--causal", action="store_true", help="with --shape")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--error", action="store_true", help="also the error against float64, over PyTorch's own"
    )
    arguments = parser.parse_args()
    cases = SUITE
    if arguments.shape:
        cases = [(_shape(text), arguments.causal) for text in arguments.shape]
    peaks = cpu.measure_peaks()
    print(
        ", ".join(f"{name} {value:.0f}" for name, value in peaks.items()),
        f"threads {torch.get_num_threads()}",
    )
    torch.manual_seed(arguments.seed)
    random.seed(arguments.seed)
    for dtype in arguments.dtype:
        ratios = []
        for shape, causal in cases:
            torch_s, ours_s, errors = _case(shape, DTYPES[dtype], causal, arguments.repeats, arguments.error)
            batch, heads, seq, head_dim = shape
            pairs = seq * (seq + 1) / 2 if causal else seq * seq
            flops = 4 * batch * heads * pairs * head_dim
            ratios.append(torch_s / ours_s)
            print(
                f"{dtype} {shape!s:20} {'causal' if causal else 'full':6} "
                f"torch {torch_s * 1e6:9.1f} us {flops / torch_s * 1e-9:4.0f} GF/s  "
                f"ours {ours_s * 1e6:9.1f} us {flops / ours_s * 1e-9:4.0f} GF/s  {ratios[-1]:5.2f}x{errors}",
                flush=True,
            )
        print(f"{dtype} geometric mean {statistics.geometric_mean(ratios):.2f}x, slowest {min(ratios):.2f}x")


def _shape(text: str) -> tuple[int, int, int, int]:
    batch, heads, seq, head_dim = (int(part) for part in text.split(","))
    return batch, heads, seq, head_dim


def _case(
    shape: tuple[int, int, int, int], dtype: torch.dtype, causal: bool, repeats: int, with_error: bool
) -> tuple[float, float, str]:
    query, key, value = (torch.randn(shape).to(dtype) for _ in range(3))

    def run_torch() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    def run_ours() -> torch.Tensor:
        out = flash_attention(query, key, value, causal=causal)
        assert isinstance(out, torch.Tensor)
        return out

    errors = _errors(query, key, value, causal, run_ours(), run_torch()) if with_error else ""
    samples: dict[Callable[[], torch.Tensor], list[float]] = {run_torch: [], run_ours: []}
    inner = {}
    for run in samples:
        run()
        start = time.perf_counter()
        run()
        inner[run] = max(1, math.ceil(INNER_LOOP_S / (time.perf_counter() - start)))
    for _ in range(repeats):
        for run in random.sample(list(samples), 2):
            # Both start in the same state: OpenMP workers awake, caches as this implementation leaves them.
            run()
            start = time.perf_counter()
            for _ in range(inner[run]):
                run()
            samples[run].append((time.perf_counter() - start) / inner[run])
    return statistics.median(samples[run_torch]), statistics.median(samples[run_ours]), errors


def _errors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    ours: torch.Tensor,
    theirs: torch.Tensor,
) -> str:
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=causal
    )
    our, their = (ours.double() - exact), (theirs.double() - exact)
    worst = our.abs().max() / their.abs().max()
    return f"  error: worst {worst:.2f}x rms {our.square().mean().sqrt() / their.square().mean().sqrt():.3f}x"


if __name__ == "__main__":
    main()
