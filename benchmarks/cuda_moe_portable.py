"""The portable products of a mixture of experts and the routing kernel, on the GPU at hand: tiles raced product by
product, after each one's result is checked against float64.

Usage: PYTHONPATH=src python benchmarks/cuda_moe_portable.py [--output FILE.json]

TFLOP/s count 2 x rows x inner x rows of weights. Times are medians of rounds in which the tiles take turns, each a
few launches between two events; operands are normal random numbers, bf16. `grouped_mm` is PyTorch's on rows that are
gathered already and without the activation; `mma.sync` is what the instruction reaches from registers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashmoe_science.configs.moe.portable import ProductTile
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import load, make_context_current
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.cuda.moe import MoeKind, forward
from flashmoe_science.cuda.moe.portable import Product, ProductLaunch, kernel
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.select import module
from flashmoe_science.cuda.moe.topk import topk
from flashmoe_science.errors import BuildError
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, CudaKernel, compile_kernel
from flashmoe_science.moe_arguments import Activation, W13Layout

T = ProductTile
TILES = (
    T(128, 256, 64, 4, 2, 4),
    T(128, 256, 64, 3, 2, 4),
    T(256, 128, 64, 4, 4, 2),
    T(128, 128, 64, 3, 2, 2, 2),
    T(128, 128, 64, 6, 2, 2),
    T(128, 128, 64, 4, 4, 2),
    T(64, 256, 64, 4, 1, 4),
    T(64, 256, 64, 5, 2, 4),
    T(64, 256, 32, 5, 1, 4, 2),
    T(64, 128, 64, 3, 2, 2, 3),
    T(64, 128, 64, 4, 2, 2, 2),
    T(32, 256, 64, 4, 1, 4),
    T(32, 256, 64, 3, 1, 4, 2),
    T(32, 128, 64, 5, 2, 2, 2),
)
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    skewed: bool = False
    """A few experts get most of the rows."""

    def problem(self) -> MoeProblem:
        return MoeProblem(
            tokens=self.tokens,
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            top_k=self.top_k,
            dtype=torch.bfloat16,
            activation=Activation.SILU,
            w13_layout=W13Layout.CONCAT,
            ids64=False,
        )


CASES = (
    Case("qwen3 32768", 32768, 2048, 768, 128, 8),
    Case("qwen3 32768 skewed", 32768, 2048, 768, 128, 8, skewed=True),
    Case("qwen3 4096", 4096, 2048, 768, 128, 8),
    Case("qwen3 2048", 2048, 2048, 768, 128, 8),
    Case("qwen3 1024", 1024, 2048, 768, 128, 8),
    Case("qwen3 512", 512, 2048, 768, 128, 8),
    Case("qwen3 256", 256, 2048, 768, 128, 8),
    Case("mixtral 8192", 8192, 4096, 14336, 8, 2),
)


class Routing:
    """Random ids, and what the routing kernel makes of them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.tokens)
        noise = torch.rand(case.tokens, case.experts, device="cuda")
        if case.skewed:
            noise += torch.linspace(1, 0, case.experts, device="cuda") ** 4
        ids = noise.topk(case.top_k).indices.int()
        order = ids.flatten().argsort(stable=True)
        self.slots = order.int()
        counts = ids.flatten().bincount(minlength=case.experts)
        self.offsets = torch.zeros(case.experts + 1, device="cuda", dtype=torch.int32)
        self.offsets[1:] = counts.cumsum(0)


class Operands:
    """Inputs, weights and output of one product of a case."""

    def __init__(self, case: Case, product: Product, routing: Routing) -> None:
        rows = case.tokens * case.top_k
        up = product is Product.UP
        parts, inner, columns = (
            (2, case.hidden, case.intermediate) if up else (1, case.intermediate, case.hidden)
        )
        self.routing = routing
        self.input = torch.randn(case.tokens if up else rows, inner, device="cuda", dtype=torch.bfloat16)
        self.weights = torch.empty(
            case.experts, parts * columns, inner, device="cuda", dtype=torch.bfloat16
        ).normal_(std=inner**-0.5)
        self.output = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        self.ticket = torch.zeros(1, device="cuda", dtype=torch.int32)
        self.operations = 2 * rows * inner * parts * columns
        self.up, self.columns, self.top_k = up, columns, case.top_k

    def launch(self, launcher: ProductLaunch) -> None:
        self.ticket.zero_()
        launcher.launch(
            self.input.data_ptr(),
            self.weights.data_ptr(),
            self.output.data_ptr(),
            self.routing.offsets.data_ptr(),
            self.routing.slots.data_ptr(),
            self.ticket.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )

    def gathered(self) -> torch.Tensor:
        return self.input[self.routing.slots.long() // self.top_k] if self.up else self.input

    def largest_error(self) -> float:
        """Against float64, of three experts; relative to the largest result."""
        offsets = self.routing.offsets.tolist()
        experts = sorted(range(len(offsets) - 1), key=lambda e: offsets[e + 1] - offsets[e])
        worst = 0.0
        for expert in (experts[0], experts[len(experts) // 2], experts[-1]):
            begin, end = offsets[expert], offsets[expert + 1]
            slots = self.routing.slots[begin:end].long()
            rows = self.input[slots // self.top_k] if self.up else self.input[begin:end]
            exact = rows.double() @ self.weights[expert].double().T
            if self.up:
                gate, up = exact[:, : self.columns], exact[:, self.columns :]
                exact = torch.nn.functional.silu(gate) * up
            actual = self.output[begin:end] if self.up else self.output[slots]
            if end > begin:
                worst = max(worst, ((actual.double() - exact).abs().max() / exact.abs().max()).item())
        return worst


def median_ms(calls: dict[str, Callable[[], object]], launches: int) -> dict[str, float]:
    """Of one call each; all take turns, in another order every time, because what ran before decides the clock."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    turns = list(calls.items())
    for _ in range(ROUNDS):
        random.shuffle(turns)
        for name, call in turns:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(launches):
                call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / launches)
    return {name: statistics.median(measured) for name, measured in times.items()}


def compile_all(architecture: str) -> set[ProductTile]:
    """In parallel; the tiles that compile without defects."""

    def attempt(tile: ProductTile) -> bool:
        try:
            for product in Product:
                compile_kernel(kernel(tile, product, Activation.SILU, torch.bfloat16, architecture))
        except BuildError as error:
            print(f"not raced: {tile.label}: {error}")
            return False
        return True

    with ThreadPoolExecutor() as pool:
        return {tile for tile, fine in zip(TILES, pool.map(attempt, TILES), strict=True) if fine}


def race(case: Case, product: Product, tiles: list[ProductTile], routing: Routing) -> dict[str, Any]:
    operands = Operands(case, product, routing)
    device = device_of(0)
    calls: dict[str, Callable[[], object]] = {}
    errors = {}
    for tile in tiles:
        launcher = ProductLaunch(case.problem(), product, tile, device)
        operands.output.fill_(torch.nan)
        operands.launch(launcher)
        errors[tile.label] = operands.largest_error()
        calls[tile.label] = lambda launcher=launcher: operands.launch(launcher)
    gathered = operands.gathered()
    weights = operands.weights.transpose(1, 2)
    ends = routing.offsets[1:]
    calls["grouped_mm"] = lambda: torch.nn.functional.grouped_mm(gathered, weights, offs=ends)
    times = median_ms(calls, 3 if operands.operations > 5e11 else 20)
    return {
        "case": case.name,
        "product": product.value,
        "ms": times,
        "tflops": {name: operands.operations / ms / 1e9 for name, ms in times.items()},
        "error": errors,
    }


def layer_times(case: Case) -> dict[str, Any]:
    """Microseconds of whole layers in each way that takes them, routing and combination included."""
    problem, device = case.problem(), device_of(0)
    hidden, inner = case.hidden, case.intermediate

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5)

    x = normal(case.tokens, hidden)
    w13, w2 = normal(case.experts, 2 * inner, hidden), normal(case.experts, hidden, inner)
    weights, ids = topk(torch.randn(case.tokens, case.experts, device="cuda"), case.top_k)
    calls: dict[str, Callable[[], object]] = {}
    for kind in (MoeKind.HOPPER, MoeKind.PORTABLE):
        choice = module(kind).choose(problem, device)
        if choice is not None:
            calls[kind.value] = lambda choice=choice: forward(x, w13, w2, weights, ids, choice=choice)
    times = median_ms(calls, 3 if case.tokens > 4096 else 20)
    return {"case": case.name, **{name: round(ms * 1000, 1) for name, ms in times.items()}}


def mma_rate(architecture: str, ldmatrix: bool) -> float:
    """TFLOP/s of mma.sync from registers, or with as many `ldmatrix` as warps of 64 x 64 need."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    macros = {
        "LDMATRIX": int(ldmatrix),
        "EXPONENTIALS": 0,
        "ELEMENT_BF16": 1,
        "NATIVE_CP_ASYNC": 1,
        "MMA_K": 16,
    }
    rate = CudaKernel(
        source="mma_rate.cu",
        function="mma_rate",
        architecture=architecture,
        macros=macros,
        threads_per_block=128,
        dynamic_shared_bytes=0,
        directory=Path(__file__).parent / "kernels",
        header_directory=KERNEL_DIRECTORY,
    )
    out = torch.empty(2 * multiprocessors * 128, device="cuda")
    rounds = 20000
    launcher = Launcher(load(rate, 0, False), (2 * multiprocessors, 1, 1), rate, 16)
    struct.pack_into("Qi", launcher.buffer, 0, out.data_ptr(), rounds)
    stream = torch.cuda.current_stream().cuda_stream
    ms = median_ms({"mma": lambda: launcher.start(stream)}, 2)["mma"]
    return 2 * multiprocessors * 4 * rounds * 16 * 4096 / ms / 1e9


def topk_times() -> dict[str, dict[str, float]]:
    """Microseconds per call in a replayed graph of 20."""
    results = {}
    for tokens, experts, k in ((1, 128, 8), (256, 128, 8), (32768, 128, 8), (8192, 8, 2), (32768, 256, 8)):
        logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)

        def plain(logits: torch.Tensor = logits, k: int = k) -> torch.Tensor:
            weights, _ = logits.float().softmax(-1).topk(k)
            return weights / weights.sum(-1, keepdim=True)

        calls: dict[str, Callable[[], object]] = {
            "kernel": lambda logits=logits, k=k: topk(logits, k),
            "PyTorch": plain,
        }
        graphs: dict[str, Callable[[], object]] = {}
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    call()
            graphs[name] = graph.replay
        medians = median_ms(graphs, 3)
        results[f"{tokens} tokens, {experts} experts, k {k}"] = {
            name: ms * 1000 / 20 for name, ms in medians.items()
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    arguments = parser.parse_args()
    began = time.perf_counter()
    device = device_of(0)
    make_context_current(0)
    fine = compile_all(device.architecture)
    print(f"{torch.cuda.get_device_name(0)}, compiled in {time.perf_counter() - began:.1f} s", flush=True)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    for ldmatrix in (False, True):
        name = "mma.sync with ldmatrix" if ldmatrix else "mma.sync from registers"
        results[name] = mma_rate(device.architecture, ldmatrix)
        print(f"{name}: {results[name]:.0f} TFLOP/s")
    results["products"] = []
    for case in CASES:
        routing = Routing(case)
        for product in Product:
            timed = race(case, product, [tile for tile in TILES if tile in fine], routing)
            results["products"].append(timed)
            print(f"\n{case.name} {product.value}, TFLOP/s (ms), error")
            for name, rate in sorted(timed["tflops"].items(), key=lambda item: -item[1]):
                error = timed["error"].get(name, 0.0)
                print(f"  {rate:4.0f} ({timed['ms'][name]:.3f}) {error:.1e} {name}")
            print(f"  {time.perf_counter() - began:.0f} s", flush=True)
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(results, indent=1))
    results["layer_us"] = [layer_times(case) for case in CASES]
    for timed in results["layer_us"]:
        print(", ".join(f"{name} {value}" for name, value in timed.items()))
    results["topk_us"] = topk_times()
    for name, times in results["topk_us"].items():
        print(name, ", ".join(f"{what} {us:.2f} us" for what, us in times.items()))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1))
    print(f"total {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
