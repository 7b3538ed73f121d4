"""The portable CUDA attention kernel on the GPU at hand: its tiles raced against torch's flash backend, then
correctness of the tiles, host time per call, first calls, and the ceiling of mma.sync.

Usage: PYTHONPATH=src python benchmarks/cuda_portable.py [--quick] [--output FILE.json]

Speeds are medians of CUDA graph replays on normal random data, implementations interleaved; TFLOP/s counts
4 x seqlen² x head_dim per head, half of it with a causal mask.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cuda_host
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashmoe_science.configs.attention.portable import PortableConfiguration
from flashmoe_science.cuda.attention import OVERRIDE_VARIABLE, KernelKind, forward
from flashmoe_science.cuda.attention import portable as portable_kernel
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import load
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.errors import BuildError
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, CudaKernel, compile_kernel

TOKENS = 16384
WIDTH = 2048  # heads x head_dim
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Attention by its definition, in `dtype` throughout."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    scores = q @ (k / math.sqrt(q.shape[3])).transpose(2, 3)
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2]), -math.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0) @ v


def verify(choices: list[Choice]) -> list[dict[str, Any]]:
    """Every raced tile on lengths that leave partial tiles: its error against float64, and that of PyTorch's
    operators in the same dtype. What calls take by themselves is tested in tests/flashmoe_science/cuda/attention.
    """
    torch.manual_seed(0)
    results = []
    for choice in choices:
        dim = choice.configuration.head_dim
        for seqlen_q, seqlen_k, causal in ((257, 301, True), (301, 257, False), (1000, 1000, True)):
            q = torch.randn(2, 4, seqlen_q, dim, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(2, 4, seqlen_k, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            out, _ = forward(q, k, v, causal=causal, choice=choice)
            exact = reference(q, k, v, causal, torch.float64)
            error = (out.double() - exact).abs().max().item()
            plain = (reference(q, k, v, causal, q.dtype).double() - exact).abs().max().item()
            results.append(
                {
                    "tile": choice.configuration.label,
                    "seqlens": [seqlen_q, seqlen_k],
                    "causal": causal,
                    "error": error,
                    "plain_error": plain,
                    "passed": error <= 2 * plain,
                }
            )
    return results


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
    """Median milliseconds per call; the order is drawn anew in every round."""
    measures = {name: graph_of(call, least_ms) for name, call in implementations.items()}
    samples: dict[str, list[float]] = {name: [] for name in measures}
    order = list(measures)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            samples[name].append(measures[name]())
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


def speed(choices: list[Choice], quick: bool) -> Iterator[dict[str, Any]]:
    """One cell after another: TFLOP/s by implementation."""
    for dim in (64, 128):
        for causal in (False, True):
            for length in LENGTHS:
                shape = (TOKENS // length, WIDTH // dim, length, dim)
                q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                runs = runners(q, k, v, causal, choices)
                times = race(runs, rounds=5 if quick else 9, least_ms=3 if quick else 8)
                operations = 4 * shape[0] * shape[1] * length * length * dim / (2 if causal else 1)
                rates = {name: operations / ms / 1e9 for name, ms in times.items()}
                yield {"head_dim": dim, "causal": causal, "seqlen": length, "tflops": rates}


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


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_cell(cell: dict[str, Any]) -> None:
    rates = cell["tflops"]
    base = rates["torch flash"]
    tiles = {name: rate for name, rate in rates.items() if name not in ("torch flash", "selected")}
    best = max(tiles, key=lambda name: tiles[name])
    print(
        f"D={cell['head_dim']} {'causal' if cell['causal'] else 'full':6} {cell['seqlen']:5}: "
        f"torch flash {base:4.0f}, selected {rates['selected']:4.0f} ({rates['selected'] / base:.2f}), "
        f"best {tiles[best]:4.0f} ({tiles[best] / base:.2f}) {best}",
        flush=True,
    )


def print_table(cells: list[dict[str, Any]]) -> None:
    """TFLOP/s of every tile, and geometric means of its ratios to torch's flash backend."""
    for dim in (64, 128):
        chosen = [cell for cell in cells if cell["head_dim"] == dim]
        print(f"\nhead_dim {dim}: ratio full, causal; TFLOP/s full {LENGTHS}, then causal")
        for name in chosen[0]["tflops"]:
            ratios = [cell["tflops"][name] / cell["tflops"]["torch flash"] for cell in chosen]
            row = " ".join(f"{cell['tflops'][name]:4.0f}" for cell in chosen)
            half = len(ratios) // 2
            print(f"{geometric_mean(ratios[:half]):.3f} {geometric_mean(ratios[half:]):.3f}  {row}  {name}")
    for what, name in (("selected", "selected"), ("best tile of each cell", None)):
        ratios = []
        for cell in cells:
            rates = dict(cell["tflops"])
            base = rates.pop("torch flash")
            ratios.append((rates[name] if name else max(rates.values())) / base)
        print(
            f"{what} against torch flash, {len(ratios)} cells: geometric mean {geometric_mean(ratios):.3f}, "
            f"least {min(ratios):.3f}",
            flush=True,
        )


class Record:
    """The results so far, rewritten whenever a section has ended, so that a crash loses one section."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._sections: dict[str, Any] = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }

    def add(self, section: str, results: object) -> None:
        self._sections[section] = results
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._sections, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="shorter samples")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    arguments = parser.parse_args()
    os.environ[OVERRIDE_VARIABLE] = KernelKind.PORTABLE.value
    device = device_of(0)
    print(torch.cuda.get_device_name(0), torch.__version__, device)
    began = time.perf_counter()
    record = Record(arguments.output)

    tiles = candidates(64) + candidates(128)
    failed = compile_all(tiles, device.architecture)
    for configuration, reason in failed.items():
        print(f"not raced: {configuration.label}: {reason[:220]}")
    record.add("not_compiled", {c.label: reason for c, reason in failed.items()})
    racing = [Choice(KernelKind.PORTABLE, c) for c in tiles if c not in failed]
    print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)

    cells = []
    for cell in speed(racing, arguments.quick):
        cells.append(cell)
        print_cell(cell)
        record.add("speed", cells)
    print_table(cells)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)

    results = verify(racing)
    record.add("correctness", results)
    wrong = [result for result in results if not result["passed"]]
    for result in wrong[:20]:
        print(f"WRONG {result}")
    print(f"\n{len(results) - len(wrong)} of {len(results)} cases correct", flush=True)

    host = cuda_host.host_times()
    record.add("host_us", host)
    print("\nhost time per call, us:", ", ".join(f"{name} {us:.2f}" for name, us in host.items()), flush=True)
    first = cuda_host.first_calls()
    record.add("first_call_ms", first)
    print("\nimport and first call, ms:", first, flush=True)
    rates = mma_rates(device.architecture)
    record.add("mma_tflops", rates)
    print("\nmma.sync TFLOP/s:", ", ".join(f"{name}: {rate:.0f}" for name, rate in rates.items()))
    print(f"total {time.perf_counter() - began:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
