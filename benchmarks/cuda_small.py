"""The small-shape CUDA kernel against PyTorch and against the other kernels, on the GPU at hand.

    python benchmarks/cuda_small.py --output small.json

The first table's calls are `flashmoe_science.flash_attention`, the others' `flashmoe_science.cuda.attention.forward`
with the configuration given; output allocation included. GPU time is that of one call in a
replayed graph of equal calls, so consecutive calls may overlap as far as programmatic dependent launch allows;
`alone` is the same without it. Implementations are interleaved within every round, figures are medians in
microseconds. Every configuration's result is checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flashmoe_science import flash_attention
from flashmoe_science.configs.attention.small import HEAD_DIMS, SmallConfiguration
from flashmoe_science.cuda.attention import (
    KernelKind,
    Problem,
    explain,
    forward,
    hopper,
    portable,
    select,
    small,
)
from flashmoe_science.cuda.attention.select import module
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import load, make_context_current
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel

Call = Callable[[], Any]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
CALLS_PER_GRAPH = 50


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 64
    causal: bool = False

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = str(self.seqlen_q) if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}:{self.seqlen_k}"
        return f"({self.batch},{heads},{length},{self.head_dim}) {'causal' if self.causal else 'full'}"

    def tensors(self) -> Tensors:
        torch.manual_seed(0)
        query = (self.batch, self.heads, self.seqlen_q, self.head_dim)
        key = (self.batch, self.kv_heads, self.seqlen_k, self.head_dim)
        q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in (query, key, key))
        return q, k, v

    def problem(self) -> Problem:
        def strides(heads: int, length: int) -> tuple[int, int, int]:
            return heads * length * self.head_dim, length * self.head_dim, self.head_dim

        q, k = strides(self.heads, self.seqlen_q), strides(self.kv_heads, self.seqlen_k)
        return Problem(
            batch=self.batch,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            dtype=torch.bfloat16,
            causal=self.causal,
            softmax_scale=self.head_dim**-0.5,
            return_lse=False,
            query_strides=q,
            key_strides=k,
            value_strides=k,
            output_strides=q,
        )


def square(batch: int, heads: int, length: int, head_dim: int = 64, causal: bool = False) -> Shape:
    return Shape(batch, heads, heads, length, length, head_dim, causal)


# Candidates: row tiles, warps, key tiles, cluster.
SUITE = {
    (1, 1, 32): "1 2 1 1, 1 1 2 1, 2 2 1 1",
    (1, 1, 64): "1 4 1 1, 1 2 2 1, 1 2 1 2",
    (1, 1, 128): "1 4 2 1, 1 4 1 2, 1 2 1 4, 1 1 1 8, 1 1 2 4, 1 2 2 2",
    (1, 1, 256): "1 4 2 2, 1 2 2 4, 1 2 1 8, 2 4 2 2, 2 2 2 4",
    (1, 1, 512): "1 4 2 4, 2 4 2 4, 4 4 2 4, 4 2 2 8, 4 4 1 8, 2 2 2 8",
    (2, 4, 128): "1 4 2 1, 1 2 4 1, 2 4 2 1",
}
# Latency shapes beyond the suite.
OTHERS = {
    square(2, 4, 256): "1 4 4 1, 1 8 2 1, 1 4 2 2, 2 4 4 1, 2 4 2 2, 2 4 1 4",
    square(2, 8, 128): "1 4 2 1, 1 2 4 1, 2 4 2 1",
    square(1, 1, 64, 128): "1 4 1 1, 1 2 1 2, 1 1 1 4",
    square(1, 1, 128, 128): "1 8 1 1, 1 2 1 4, 1 4 1 2, 2 4 1 4, 1 4 2 1",
    square(1, 1, 256, 128): "2 4 1 4, 1 4 2 2, 1 4 1 4, 2 4 2 2",
    square(1, 1, 512, 128): "1 8 1 4, 2 4 2 4, 2 4 1 8, 1 4 2 4",
    square(1, 1, 128, 256): "1 4 1 4, 1 4 1 2, 1 2 1 4",
}
DECODE = {
    Shape(1, 32, 8, 1, 4096, 128, True): "1 8 1 8, 1 4 2 8, 1 4 1 16, 1 4 2 16, 1 2 2 16, 1 2 4 16",
    Shape(1, 8, 8, 1, 16384, 64, True): "1 8 2 8, 1 4 4 8, 1 4 2 8, 1 4 4 16",
    Shape(4, 16, 16, 8, 1024, 64): "1 8 1 2, 1 8 2 2, 1 8 4 2, 1 4 4 2",
    Shape(1, 8, 1, 1, 32768, 128, True): "1 8 1 16, 1 8 2 16",
}
# Where the rule of `small.choose` ends: small against the kernels for tall tiles.
BORDER = [
    *[square(1, 1, n) for n in (1024, 2048, 3072)],
    *[square(1, n, 1024) for n in (2, 4)],
    *[square(b, 8, 128) for b in (2, 4, 8, 16)],
    *[square(b, 8, 64) for b in (2, 4, 8, 16)],
    *[square(2, 4, n) for n in (256, 512)],
    square(1, 8, 512, causal=True),
    *[square(1, 1, n, 128) for n in (64, 128, 256, 512, 1024)],
    square(2, 4, 128, 128),
    square(4, 8, 128, 128),
    square(1, 1, 128, 256),
    square(1, 1, 512, 256),
    *[Shape(1, 32, 8, n, 4096, 128, True) for n in (4, 8, 16, 64)],
    *[Shape(32, 32, 8, n, 1024, 128, True) for n in (1, 8)],
    Shape(256, 8, 8, 16, 64),
]


def configurations(shape: Shape, texts: str) -> list[SmallConfiguration]:
    """Written as row tiles, warps, key tiles, cluster."""
    compiled = next(d for d in HEAD_DIMS if d >= shape.head_dim)
    candidates = []
    for text in texts.split(","):
        row_tiles, warps, key_tiles, cluster = map(int, text.split())
        several = SmallConfiguration(
            compiled, compiled != shape.head_dim, row_tiles, warps, key_tiles, cluster, dependent=True
        )
        candidates.append(dataclasses.replace(several, single_pass=several.keys_per_pass >= shape.seqlen_k))
    return candidates


def name(configuration: SmallConfiguration) -> str:
    c = configuration
    splits = f"s{c.splits}" if c.splits > 1 else ""
    return f"r{c.rows}w{c.warps}k{c.key_tiles}c{c.cluster}{splits}{'' if c.dependent else ' alone'}"


def expected(shape: Shape, tensors: Tensors) -> torch.Tensor:
    q, k, v = (x.double() for x in tensors)
    k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * shape.head_dim**-0.5
    if shape.causal:
        visible = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool, device="cuda")
        scores = scores.masked_fill(~visible.tril(shape.seqlen_k - shape.seqlen_q), -torch.inf)
    return scores.softmax(-1) @ v


def sdpa(shape: Shape, tensors: Tensors) -> Call:
    q, k, v = tensors
    # SDPA aligns the mask top-left: for one query, bottom-right means that it sees everything; in between only
    # an explicit mask says it.
    mask = None
    if shape.causal and 1 < shape.seqlen_q != shape.seqlen_k:
        ones = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool, device="cuda")
        mask = ones.tril(shape.seqlen_k - shape.seqlen_q)
    causal = shape.causal and mask is None and shape.seqlen_q > 1
    grouped = shape.heads != shape.kv_heads
    return lambda: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


def own(shape: Shape, tensors: Tensors, choice: Choice | None = None) -> Call:
    q, k, v = tensors
    if choice is None:
        return lambda: flash_attention(q, k, v, causal=shape.causal)
    return lambda: forward(q, k, v, causal=shape.causal, choice=choice)[0]


def race(calls: dict[str, Call], rounds: int = 30) -> dict[str, float]:
    """Median GPU time of one call, of implementations interleaved in every round."""
    graphs = {}
    for label, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[label] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[label]):
            for _ in range(CALLS_PER_GRAPH):
                call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(rounds):
        for label, graph in graphs.items():
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[label].append(begin.elapsed_time(end) * 1000 / CALLS_PER_GRAPH)
    return {label: statistics.median(values) for label, values in samples.items()}


def around_each_call(calls: dict[str, Call], rounds: int = 300) -> dict[str, float]:
    """Median time between events around a call on an idle GPU, launch included."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(rounds):
        for label, call in calls.items():
            torch.cuda.synchronize()
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples[label].append(begin.elapsed_time(end) * 1000)
    return {label: statistics.median(values) for label, values in samples.items()}


def host(calls: dict[str, Call], rounds: int = 20, repeats: int = 50) -> dict[str, float]:
    """Median time that the CPU spends on one call."""
    samples: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(rounds):
        for label, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            samples[label].append((time.perf_counter() - start) * 1e6 / repeats)
    return {label: statistics.median(values) for label, values in samples.items()}


class Ablation:
    """A variant of the kernel with other macros, wrong results included, launched without the backend."""

    def __init__(
        self, shape: Shape, tensors: Tensors, configuration: SmallConfiguration, **macros: int
    ) -> None:
        device = device_of(0)
        kernel = ablated(configuration, device.architecture, **macros)
        grid = (
            -(-shape.seqlen_q * (shape.heads // shape.kv_heads) // configuration.rows)
            * configuration.cluster,
            shape.kv_heads,
            shape.batch,
        )
        launcher = Launcher(load(kernel, 0, False), grid, kernel, 256, dependent=configuration.dependent)
        small.write_arguments(launcher.buffer, shape.problem())
        self.launch = launcher.start_at
        self.tensors = (*tensors, torch.empty_like(tensors[0]))

    def __call__(self) -> None:
        addresses = (tensor.data_ptr() for tensor in self.tensors)
        self.launch(*addresses, 0, torch._C._cuda_getCurrentRawStream(0))


def ablated(configuration: SmallConfiguration, architecture: str, **macros: int) -> CudaKernel:
    kernel = small.kernel(configuration, torch.bfloat16, architecture)
    return dataclasses.replace(kernel, macros={**kernel.macros, **macros})


ABLATIONS = {
    "whole": {},
    "load only": {"ABLATION": 1},
    "no softmax": {"ABLATION": 2},
    "no merge": {"ABLATION": 3},
    "passes": {"SINGLE_PASS": 0},
    "padded": {"PADDED": 1},
}


def alternatives(shape: Shape) -> dict[str, Choice]:
    """What each kernel would do with a shape, the small one also if its rule declines."""
    problem, device = shape.problem(), device_of(0)
    by_name = {}
    for kind in KernelKind:
        choice = module(kind).choose(problem, device)
        if choice is not None:
            by_name[kind.value] = choice
    if "small" not in by_name:
        by_name["small (declined)"] = Choice(KernelKind.SMALL, small.configuration_for(problem, device))
    return by_name


def compile_all(choices: list[Choice], ablations: list[CudaKernel], architecture: str) -> float:
    """Into the cache, in parallel. Seconds."""
    start = time.perf_counter()
    kernels = list(ablations)
    for choice in choices:
        if choice.kernel is KernelKind.SMALL:
            kernels.append(small.kernel(choice.configuration, torch.bfloat16, architecture))
        elif choice.kernel is KernelKind.PORTABLE:
            kernels.append(portable.kernel(choice.configuration, torch.bfloat16, architecture))
        else:
            kernels.append(hopper.kernel(choice.configuration, torch.bfloat16))

    def compile_one(kernel: CudaKernel) -> None:
        try:
            compile_kernel(kernel)
        except BuildError as error:
            print(f"  does not build: {kernel.label}: {error}")

    unique = {(kernel.source, kernel.label): kernel for kernel in kernels}
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, unique.values()))
    return time.perf_counter() - start


def verified(shape: Shape, tensors: Tensors, calls: dict[str, Call]) -> dict[str, Call]:
    """Those that build and are right; says what the others are."""
    exact = expected(shape, tensors)
    good = {}
    for label, call in calls.items():
        try:
            error = float((call().double() - exact).abs().max())
        except (BuildError, DeviceError) as failure:
            print(f"  {shape} {label}: {str(failure).splitlines()[0]}", flush=True)
            continue
        if error < 2**-5:
            good[label] = call
        else:
            print(f"  {shape} {label}: WRONG, error {error:.2e}", flush=True)
    return good


def line(times: dict[str, float]) -> str:
    return "  ".join(f"{label} {value:.2f}" for label, value in times.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    output: Path | None = parser.parse_args().output
    start = time.perf_counter()
    torch.zeros(1, device="cuda")
    make_context_current(0)
    device = device_of(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {device}", flush=True)
    explored = (
        {square(*size, causal=causal): texts for causal in (False, True) for size, texts in SUITE.items()}
        | OTHERS
        | DECODE
    )
    candidates = {
        shape: [Choice(KernelKind.SMALL, c) for c in configurations(shape, texts)]
        for shape, texts in explored.items()
    }
    chosen = {shape: select(shape.problem(), device) for shape in explored}
    ablation = {
        shape: choice
        for shape, choice in chosen.items()
        if choice.kernel is KernelKind.SMALL and (shape in DECODE or not shape.causal)
    }
    border = {shape: alternatives(shape) for shape in BORDER}
    alone = {
        shape: dataclasses.replace(
            choice, configuration=dataclasses.replace(choice.configuration, dependent=False)
        )
        for shape, choice in chosen.items()
        if choice.kernel is KernelKind.SMALL
    }
    seconds = compile_all(
        [
            *(choice for choices in candidates.values() for choice in choices),
            *chosen.values(),
            *alone.values(),
            *(choice for choices in border.values() for choice in choices.values()),
        ],
        [
            ablated(choice.configuration, device.architecture, **macros)
            for choice in ablation.values()
            for macros in ABLATIONS.values()
        ],
        device.architecture,
    )
    print(f"compiled in {seconds:.1f} s", flush=True)

    results: dict[str, Any] = {"product": {}, "configurations": {}, "ablations": {}, "border": {}}
    print(f"\n{'flash_attention':36} {'sdpa':>7} {'own':>7} {'ratio':>6} {'alone':>7} {'ratio':>6}", end="")
    print(f" | {'events':>7} {'own':>7} {'ratio':>6} | {'host':>7} {'own':>7}  choice")
    for shape, choice in chosen.items():
        tensors = shape.tensors()
        assert explain(*tensors, causal=shape.causal) == choice
        calls = {"sdpa": sdpa(shape, tensors), "own": own(shape, tensors)}
        if shape in alone:
            calls["alone"] = own(shape, tensors, alone[shape])
        calls = verified(shape, tensors, calls)
        times = race(calls)
        both = {label: calls[label] for label in ("sdpa", "own")}
        events, cpu = around_each_call(both), host(both)
        results["product"][str(shape)] = {"graph": times, "events": events, "host": cpu}
        base = times["sdpa"]
        single = times.get("alone", float("nan"))
        print(
            f"{shape!s:36} {base:7.2f} {times['own']:7.2f} {base / times['own']:6.2f} {single:7.2f} "
            f"{base / single:6.2f} | {events['sdpa']:7.2f} {events['own']:7.2f} "
            f"{events['sdpa'] / events['own']:6.2f} | {cpu['sdpa']:7.2f} {cpu['own']:7.2f}  "
            f"{choice.kernel.value} "
            + (name(choice.configuration) if choice.kernel is KernelKind.SMALL else ""),
            flush=True,
        )

    print("\nconfigurations")
    for shape, choices in candidates.items():
        tensors = shape.tensors()
        calls = {name(c.configuration): own(shape, tensors, c) for c in choices}
        times = race(verified(shape, tensors, calls))
        results["configurations"][str(shape)] = times
        print(f"{shape!s:36} {line(times)}", flush=True)

    print("\nablations of the choice")
    for shape, choice in ablation.items():
        tensors = shape.tensors()
        variants: dict[str, Call] = {}
        for label, macros in ABLATIONS.items():
            with contextlib.suppress(BuildError):  # told when it was compiled
                variants[label] = Ablation(shape, tensors, choice.configuration, **macros)
        times = race(variants)
        results["ablations"][str(shape)] = times
        print(f"{shape!s:36} {line(times)}", flush=True)

    print("\nborder of the rule (what is taken first)")
    for shape, choices in border.items():
        tensors = shape.tensors()
        calls = {label: own(shape, tensors, choice) for label, choice in choices.items()}
        calls["sdpa"] = sdpa(shape, tensors)
        times = race(verified(shape, tensors, calls), rounds=15)
        results["border"][str(shape)] = times
        print(f"{shape!s:36} {line(times)}", flush=True)
    if output:
        output.write_text(json.dumps(results, indent=1))
    print(f"{time.perf_counter() - start:.1f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
