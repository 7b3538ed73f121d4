"""The portable CUDA attention kernel on the GPU at hand: correctness first, then speed against torch's flash
backend.

Usage: PYTHONPATH=src python benchmarks/cuda_portable.py [--quick] [--output FILE.json]

Speeds are medians of CUDA graph replays on normal random data, implementations interleaved; TFLOP/s counts
4 x seqlen² x head_dim per head, half of it with a causal mask.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashmoe_science.configs import portable as configs
from flashmoe_science.configs.portable import PortableConfiguration
from flashmoe_science.cuda import Choice, KernelKind, build, explain, forward
from flashmoe_science.cuda import portable as portable_kernel
from flashmoe_science.cuda.driver import Launcher, load
from flashmoe_science.cuda.forward import device_of
from flashmoe_science.errors import BuildError
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, CudaKernel, compile_kernel

TOKENS = 16384
WIDTH = 2048  # heads x head_dim
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PAIRS = (
    *(
        (1, 1),
        (3, 3),
        (64, 32),
        (64, 128),
        (128, 192),
        (256, 256),
        (255, 256),
        (239, 1),
        (799, 3),
        (113, 203),
    ),
    *((113, 128), (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)),
)


def candidates(head_dim: int) -> list[PortableConfiguration]:
    """Tile shapes worth racing on a GPU with 227 KB of shared memory per block."""
    c = PortableConfiguration
    if head_dim == 64:
        return [
            c(64, 128, 64, 4, 4),
            c(64, 128, 32, 4, 4),
            c(64, 128, 32, 4, 4, overlap=True),
            c(64, 128, 48, 4, 4, overlap=True),
            c(64, 64, 64, 4, 4),
            c(64, 64, 64, 4, 4, overlap=True),
            c(64, 64, 64, 4, 4, min_blocks=2, overlap=True),
            c(64, 128, 64, 4, 4, min_blocks=1),
            c(64, 128, 48, 4, 4, min_blocks=1, overlap=True),
            c(64, 128, 64, 8, 4, overlap=True),
            c(64, 192, 64, 6, 4),
            c(64, 64, 64, 2, 4),
            c(64, 256, 64, 8, 4),
        ]
    return [
        c(128, 128, 64, 4, 0),
        c(128, 128, 32, 4, 0),
        c(128, 128, 48, 4, 0),
        c(128, 128, 32, 4, 4),
        c(128, 128, 64, 4, 0, min_blocks=1),
        c(128, 128, 32, 4, 4, min_blocks=1),
        c(128, 64, 64, 4, 8),
        c(128, 64, 64, 4, 8, overlap=True),
        c(128, 128, 64, 8, 8, overlap=True),
        c(128, 128, 128, 8, 8),
        c(128, 256, 32, 8, 0),
        c(128, 256, 64, 8, 0),
    ]


def compile_all(
    configurations: list[PortableConfiguration], architecture: str
) -> dict[PortableConfiguration, str]:
    """Why each configuration that does not compile does not; all of them, in parallel."""

    def attempt(configuration: PortableConfiguration) -> str:
        try:
            compile_kernel(portable_kernel.kernel(configuration, torch.bfloat16, architecture))
        except BuildError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:
        reasons = list(pool.map(attempt, configurations))
    return {c: reason for c, reason in zip(configurations, reasons, strict=True) if reason}


# --- correctness


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, dtype: torch.dtype
) -> Any:
    """Attention by its definition, in `dtype` throughout; (output, lse)."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ (k * scale).transpose(2, 3)
    if causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        columns = torch.arange(k.shape[2], device=q.device)[None]
        scores = scores.masked_fill(columns > rows + k.shape[2] - q.shape[2], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = (
        torch.softmax(scores.float() if dtype != torch.float64 else scores, dim=-1).nan_to_num(0.0).to(dtype)
    )
    return weights @ v, lse


def guarded(shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A random tensor inside a larger one of NaN, so that a stray read shows."""
    batch, heads, rows, dim = shape
    if layout == "bshd":
        whole = torch.full((batch, rows + 16, heads, dim + 8), math.nan, device="cuda", dtype=dtype)
        view = whole[:, 8 : 8 + rows, :, :dim].transpose(1, 2)
    else:
        whole = torch.full((batch, heads, rows + 16, dim + 8), math.nan, device="cuda", dtype=dtype)
        view = whole[:, :, 8 : 8 + rows, :dim]
    view.copy_(torch.randn(shape, device="cuda", dtype=torch.float32))
    return view


def verify(
    shape_q: tuple[int, int, int, int],
    kv_heads: int,
    seqlen_k: int,
    dtype: torch.dtype,
    causal: bool,
    layout: str = "bhsd",
    scale: float | None = None,
    choice: Choice | None = None,
    magnitude: float = 1.0,
) -> dict[str, Any]:
    """One case: the error against float64, what a computation in the same dtype makes, and whether it is
    acceptable.
    """
    batch, dim = shape_q[0], shape_q[3]
    q = guarded(shape_q, dtype, layout)
    k = guarded((batch, kv_heads, seqlen_k, dim), dtype, layout)
    v = guarded((batch, kv_heads, seqlen_k, dim), dtype, layout)
    q.mul_(magnitude)
    used_scale = 1 / math.sqrt(dim) if scale is None else scale
    out, lse = forward(q, k, v, causal=causal, softmax_scale=scale, return_lse=True, choice=choice)
    exact, exact_lse = reference(q, k, v, causal, used_scale, torch.float64)
    plain, _ = reference(q, k, v, causal, used_scale, dtype)
    assert lse is not None
    error = (out.double() - exact).abs().max().item() if out.numel() else 0.0
    plain_error = (plain.double() - exact).abs().max().item() if out.numel() else 0.0
    rounding = 2 * ((exact.to(dtype) + 0.3 - 0.3).double() - exact).abs().max().item() if out.numel() else 0.0
    empty = torch.isinf(exact_lse)
    finite_lse = (lse.double() - exact_lse)[~empty]
    lse_error = finite_lse.abs().max().item() if finite_lse.numel() else 0.0
    good = (
        error <= 2 * plain_error + rounding
        and lse_error <= 1e-3 * max(1.0, magnitude)
        and torch.equal(torch.isinf(lse) & (lse < 0), empty)
    )
    label = (
        f"q{shape_q} kv_heads {kv_heads} seqlen_k {seqlen_k} {dtype} causal {causal} {layout} scale {scale}"
    )
    configuration = (
        choice.configuration.label if choice else explain(q, k, v, causal=causal).configuration.label
    )
    return {
        "case": f"{label} x{magnitude} [{configuration}]",
        "error": error,
        "plain_error": plain_error,
        "lse_error": lse_error,
        "passed": bool(good),
    }


def correctness(quick: bool, choices: list[Choice]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    bf16, fp16 = torch.bfloat16, torch.float16
    results = []
    pairs = PAIRS[::2] if quick else PAIRS
    for seqlen_q, seqlen_k in (*pairs, (64, 0), (0, 64), (5, 0)):
        for causal in (False, True):
            for dim in (64, 128) if quick else (64, 96, 128, 192, 256):
                results.append(verify((2, 6, seqlen_q, dim), 2, seqlen_k, bf16, causal))
    for dim in range(8, 257, 8):
        results.append(verify((1, 2, 150, dim), 1, 170, fp16 if dim % 16 else bf16, dim % 24 == 0))
    for layout in ("bhsd", "bshd"):
        for kv_heads in (6, 2, 1):
            for dtype in (bf16, fp16):
                results.append(verify((3, 6, 300, 128), kv_heads, 333, dtype, True, layout))
                results.append(verify((3, 6, 300, 64), kv_heads, 333, dtype, False, layout))
    for scale in (-0.2, 0.0, 1.0, 1e-6):
        results.append(verify((1, 2, 200, 64), 2, 190, bf16, True, scale=scale))
    for magnitude in (30.0, 300.0):
        results.append(verify((1, 2, 500, 128), 2, 500, bf16, True, magnitude=magnitude))
        results.append(verify((1, 2, 500, 64), 2, 500, bf16, False, magnitude=magnitude))
    for choice in choices:
        dim = choice.configuration.head_dim
        dtype = bf16 if choice.configuration.mma_k == 16 else fp16
        for used in (dim, dim - 8):
            for seqlen_q, seqlen_k in ((257, 301), (301, 257), (1000, 1000)):
                results.append(
                    verify((2, 4, seqlen_q, used), 2, seqlen_k, dtype, seqlen_q != 257, choice=choice)
                )
    return results


def repeatable(repeats: int) -> bool:
    """The same bits every time, on shapes with masks, tails and many blocks."""
    for dim, causal in ((64, True), (128, False), (128, True)):
        q, k, v = (torch.randn(1, 8, 2000, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        first, _ = forward(q, k, v, causal=causal)
        for _ in range(repeats):
            again, _ = forward(q, k, v, causal=causal)
            if not torch.equal(first, again):
                return False
    return True


# --- speed


def graph_of(call: Callable[[], Any], least_ms: float) -> Callable[[], float]:
    """A function that replays enough calls to last `least_ms`, and returns milliseconds per call."""
    call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    call()
    stop.record()
    stop.synchronize()
    count = max(2, math.ceil(least_ms / (start.elapsed_time(stop) / 2)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()

    def measure() -> float:
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / count

    measure()
    return measure


def race(implementations: dict[str, Callable[[], Any]], rounds: int, least_ms: float) -> dict[str, float]:
    """Median milliseconds per call."""
    measures = {name: graph_of(call, least_ms) for name, call in implementations.items()}
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            samples[name].append(measure())
    return {name: statistics.median(times) for name, times in samples.items()}


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def runners(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, choices: list[Choice]
) -> dict[str, Callable[[], Any]]:
    """What is raced, by name."""
    runs: dict[str, Callable[[], Any]] = {
        "torch flash": lambda: flash(q, k, v, causal),
        "selected": lambda: forward(q, k, v, causal=causal),
    }
    for choice in choices:
        if choice.configuration.head_dim == q.shape[3]:
            runs[choice.configuration.label] = partial(forward, q, k, v, causal=causal, choice=choice)
    return runs


def speed(choices: list[Choice], quick: bool) -> list[dict[str, Any]]:
    cells = []
    for dim in (64, 128):
        for causal in (False, True):
            for length in LENGTHS:
                shape = (TOKENS // length, WIDTH // dim, length, dim)
                q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                runs = runners(q, k, v, causal, choices)
                times = race(runs, rounds=5 if quick else 9, least_ms=3 if quick else 8)
                operations = 4 * shape[0] * shape[1] * length * length * dim / (2 if causal else 1)
                rates = {name: operations / ms / 1e9 for name, ms in times.items()}
                cells.append({"head_dim": dim, "causal": causal, "seqlen": length, "tflops": rates})
    return cells


def mma_rates(architecture: str) -> dict[str, float]:
    """TFLOP/s of mma.sync alone, with the ldmatrix and the exponentials that attention needs beside it."""
    multiprocessors = device_of(0).multiprocessors
    rates = {}
    for ldmatrix, exponentials in ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)):
        kernel = CudaKernel(
            source="mma_rate.cu",
            function="mma_rate",
            architecture=architecture,
            macros={
                "LDMATRIX": ldmatrix,
                "EXPONENTIALS": exponentials,
                "ELEMENT_BF16": 1,
                "NATIVE_CP_ASYNC": 1,
                "MMA_K": 16,
            },
            threads_per_block=128,
            dynamic_shared_bytes=0,
            directory=Path(__file__).parent / "kernels",
            header_directory=KERNEL_DIRECTORY,
        )
        out = torch.empty(2 * multiprocessors * 128, device="cuda")
        rounds = 20000
        launcher = Launcher(load(kernel, 0, False), (2 * multiprocessors, 1, 1), kernel, 16)
        struct.pack_into("Qi", launcher.buffer, 0, out.data_ptr(), rounds)
        name = f"ldmatrix {ldmatrix}, exponentials {exponentials}"
        milliseconds = graph_of(lambda: launcher(torch._C._cuda_getCurrentRawStream(0)), 1)()  # noqa: B023
        rates[name] = 2 * multiprocessors * 4 * rounds * 16 * 4096 / milliseconds / 1e9
    return rates


def host_times() -> dict[str, float]:
    """Microseconds of host time per call, queue never full."""
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    raw_stream = torch._C._cuda_getCurrentRawStream
    out = torch.empty_like(q)
    from flashmoe_science.cuda import forward as forward_module_function  # the public name

    plans = sys.modules["flashmoe_science.cuda.forward"]._thread.plans  # type: ignore[attr-defined]
    forward_module_function(q, k, v)
    plan = next(reversed(plans.values()))
    addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0)

    def per_call(call: Callable[[], Any]) -> float:
        best = math.inf
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(300):
                call()
            best = min(best, (time.perf_counter() - start) / 300)
        return best * 1e6

    return {
        "forward": per_call(lambda: forward(q, k, v)),
        "forward with lse": per_call(lambda: forward(q, k, v, return_lse=True)),
        "forward causal": per_call(lambda: forward(q, k, v, causal=True)),
        "sdpa": per_call(lambda: scaled_dot_product_attention(q, k, v)),
        "plan.launch only": per_call(lambda: plan.launch(*addresses, raw_stream(0))),
        "empty_like": per_call(lambda: torch.empty_like(q)),
        "new_empty lse": per_call(lambda: q.new_empty(q.shape[:3], dtype=torch.float32)),
        "four data_ptr": per_call(lambda: (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())),
        "raw stream": per_call(lambda: raw_stream(0)),
        "signature": per_call(
            lambda: hash(
                (q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, 0, False, None, False, None)
            )
        ),
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
    """Milliseconds of (import, first call) in a fresh process, with an empty and with a filled cache."""
    import os

    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "FLASHMOE_CACHE_DIR": str(Path(directory) / "cache")}
        results = {}
        for name in ("not cached", "cached", "cached again"):
            run = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode:
                print(run.stderr)
                continue
            results[name] = [float(x) for x in run.stdout.split()]
        return results


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_speed(cells: list[dict[str, Any]]) -> None:
    for dim in (64, 128):
        chosen = [cell for cell in cells if cell["head_dim"] == dim]
        names = list(chosen[0]["tflops"])
        print(f"\nTFLOP/s, head_dim {dim}; full {LENGTHS}, then causal; geometric mean ratio to torch flash")
        for name in names:
            row = [cell["tflops"][name] for cell in chosen]
            ratio = geometric_mean([cell["tflops"][name] / cell["tflops"]["torch flash"] for cell in chosen])
            print(f"{ratio:6.3f}  " + " ".join(f"{rate:5.0f}" for rate in row) + f"  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter samples")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    arguments = parser.parse_args()
    device = device_of(0)
    print(torch.cuda.get_device_name(0), torch.__version__, device)
    began = time.perf_counter()

    raced = candidates(64) + candidates(128)
    foreign = [
        tile(name, dim)
        for name in ("sm_75", "sm_80", "sm_86")
        for dim in ((64, 128) if arguments.quick else configs.HEAD_DIMS)
        for tile in (configs.tall, configs.short)
    ]
    failed = compile_all([*raced, *dict.fromkeys(c for c in foreign if c.mma_k == 16)], device.architecture)
    for configuration, reason in failed.items():
        print(f"not raced: {configuration.label}: {reason[:220]}")
    build([device.architecture])
    racing = [Choice(KernelKind.PORTABLE, c) for c in raced if c not in failed]
    others = [Choice(KernelKind.PORTABLE, c) for c in dict.fromkeys(foreign) if c not in failed]
    print(f"compiled in {time.perf_counter() - began:.1f} s")

    results = correctness(arguments.quick, racing + others)
    wrong = [result for result in results if not result["passed"]]
    for result in wrong[:20]:
        print(f"WRONG {result}")
    same = repeatable(30 if arguments.quick else 1000)
    ratios = [r["error"] / r["plain_error"] for r in results if r["plain_error"] > 0]
    print(
        f"{len(results) - len(wrong)} of {len(results)} cases correct, error over plain same-dtype error: "
        f"median {statistics.median(ratios):.2f}, most {max(ratios):.2f}; repeatable: {same}; "
        f"{time.perf_counter() - began:.1f} s"
    )
    cells = speed(racing, arguments.quick)
    rates = mma_rates(device.architecture)
    host = host_times()
    first = first_calls()
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "correctness": results,
            "repeatable": same,
            "speed": cells,
            "mma_tflops": rates,
            "host_us": host,
            "first_call_ms": first,
            "not_compiled": {c.label: reason for c, reason in failed.items()},
        }
        arguments.output.write_text(json.dumps(record, indent=1))
    print_speed(cells)
    print("\nmma.sync TFLOP/s:", ", ".join(f"{name}: {rate:.0f}" for name, rate in rates.items()))
    print("\nhost time per call, us:", ", ".join(f"{name} {us:.2f}" for name, us in host.items()))
    print("import and first call, ms:", first)
    print(f"total {time.perf_counter() - began:.0f} s")
    sys.exit(1 if wrong or not same else 0)


if __name__ == "__main__":
    main()
