"""The way through a mixture of experts for few tokens, on the GPU at hand: configurations raced against each other,
after each one's result is checked against float64.

Usage: PYTHONPATH=src python benchmarks/cuda_moe_few.py [--output FILE.json] [--case NAME ...] [--products]

Times are GPU time of one call in a replayed graph of several calls, each with other expert ids, so that weights come
from memory; consecutive kernels may overlap as far as programmatic dependent launch allows. Configurations take turns
in every round; medians, microseconds. TB/s count the weights of the experts that were chosen, each once. `up` and
`down`: the kernel of that product alone, repeated. Operands are normal random numbers, bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flashmoe_science.configs.moe.few import FewConfiguration, FewProduct, FewWay
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import LaunchPlan
from flashmoe_science.cuda.moe import few, hopper
from flashmoe_science.cuda.moe.few import Product
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.errors import BuildError
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.moe_arguments import Activation, W13Layout

SPLIT, TILES, COMBINED = FewWay
ROUNDS = 9
MANY_TOKENS = 64
"""From which on the way for many tokens takes part."""
CHUNK_BYTES = 6 << 30  # about what the calls of a graph read


def parse(text: str) -> FewConfiguration:
    """Written as slots (0: direct), then for each product way, m_tiles, n_tiles, k_steps, stages, warps (8) and parts
    (1), e.g. `128 split 2 1 1 4, combined 1 1 2 4`.
    """
    slots, first = text.split(maxsplit=1)
    products = []
    for part in first.split(","):
        way, *numbers = part.split()
        products.append(FewProduct(FewWay(way), *map(int, numbers)))
    up, down = products if len(products) == 2 else products * 2
    return FewConfiguration(up, down, int(slots) or 32, direct=slots == "0")


def parse_all(text: str) -> tuple[FewConfiguration, ...]:
    return tuple(parse(line) for line in text.strip().splitlines())


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    candidates: tuple[FewConfiguration, ...]

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


QWEN = (2048, 768, 128, 8)
MIXTRAL = (4096, 14336, 8, 2)
ONE = parse_all("""
0 split 2 1 2 4, combined 1 1 2 8
0 split 2 1 1 8, combined 1 1 2 8
0 split 2 1 2 4, combined 1 1 4 4
0 split 2 1 4 2, combined 1 1 4 4
0 split 4 1 1 4, combined 1 1 2 8
0 split 1 1 4 4, combined 1 1 4 4
0 split 2 1 1 9, combined 1 1 1 16
512 split 2 1 2 4, combined 1 1 2 6
""")
FEW = parse_all("""
512 split 4 1 1 4, combined 1 1 2 6
512 split 2 1 2 4, combined 1 1 2 6
512 split 2 1 2 4, combined 1 1 4 3
512 split 4 1 2 2, combined 1 1 4 3
512 split 2 1 1 8, combined 1 1 2 6
4096 tiles 1 4 4 4
4096 split 4 1 1 4
""")
MORE = parse_all("""
4096 tiles 1 4 4 4
4096 tiles 1 4 4 3
4096 tiles 1 3 4 4
4096 tiles 1 2 4 4
4096 tiles 2 4 4 2
4096 tiles 2 4 2 3
4096 tiles 1 4 8 2
4096 split 4 4 1 3
4096 split 2 4 1 5
4096 split 4 4 1 3, tiles 1 4 4 4
4096 tiles 1 4 4 4, tiles 2 4 4 2
""")
MOST = parse_all("""
4096 tiles 1 4 4 4
4096 tiles 2 4 4 2
4096 tiles 2 8 2 4
4096 tiles 1 8 4 3
4096 split 4 8 1 2
""")
CASES = (
    Case("qwen3 1", 1, *QWEN, ONE),
    Case("qwen3 2", 2, *QWEN, (ONE[0], *FEW[:3])),
    Case("qwen3 4", 4, *QWEN, FEW[:5]),
    Case("qwen3 16", 16, *QWEN, FEW),
    Case("qwen3 32", 32, *QWEN, FEW),
    Case("qwen3 64", 64, *QWEN, FEW),
    Case("qwen3 128", 128, *QWEN, MORE),
    Case("qwen3 256", 256, *QWEN, MORE),
    Case("qwen3 512", 512, *QWEN, MOST),
    Case("mixtral 1", 1, *MIXTRAL, parse_all("0 split 2 1 2 4, combined 1 1 2 8 8 4")),
    Case("mixtral 4", 4, *MIXTRAL, (*FEW[:2], *parse_all("0 split 2 1 2 4, combined 1 1 2 8"))),
    Case("mixtral 16", 16, *MIXTRAL, FEW),
    Case("mixtral 64", 64, *MIXTRAL, MORE),
    Case("mixtral 128", 128, *MIXTRAL, MOST),
)


class Operands:
    def __init__(self, case: Case, calls: int) -> None:
        problem = case.problem()
        torch.manual_seed(case.tokens)
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.problem = problem
        self.x = torch.randn(case.tokens, case.hidden, **kind)
        self.w13 = torch.empty(case.experts, 2 * case.intermediate, case.hidden, **kind).normal_(
            std=case.hidden**-0.5
        )
        self.w2 = torch.empty(case.experts, case.hidden, case.intermediate, **kind).normal_(
            std=case.intermediate**-0.5
        )
        self.weights = torch.rand(case.tokens, case.top_k, device="cuda")
        noise = torch.rand(calls, case.tokens, case.experts, device="cuda")
        self.ids = noise.topk(case.top_k, dim=2).indices.int()
        self.out = torch.empty_like(self.x)
        self.middle = torch.randn(problem.slots, case.intermediate, **kind)
        self.rows = torch.empty(problem.slots, case.hidden, **kind)
        self.workspace = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)  # outlives the graphs
        touched = [len(ids.unique()) for ids in self.ids]
        self.touched = statistics.mean(touched)
        self.bytes = self.touched * 3 * case.hidden * case.intermediate * 2

    def expected(self) -> torch.Tensor:
        """In float64, of the first ids."""
        problem, ids = self.problem, self.ids[0].flatten()
        total = torch.zeros(problem.tokens, problem.hidden, device="cuda", dtype=torch.float64)
        for expert in ids.unique().tolist():
            slots = (ids == expert).nonzero().flatten()
            tokens = slots // problem.top_k
            gate, up = (self.x[tokens].double() @ self.w13[expert].double().T).chunk(2, dim=1)
            rows = (F.silu(gate) * up).bfloat16().double() @ self.w2[expert].double().T
            total.index_add_(0, tokens, rows * self.weights.flatten()[slots].double()[:, None])
        return total


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def whole(given: Operands, configuration: FewConfiguration | None) -> Callable[[torch.Tensor], None]:
    """A call; None: in the way for many tokens."""
    plan: LaunchPlan
    if configuration is None:
        choice = hopper.choose(given.problem, device_of(0))
        assert choice is not None
        plan = hopper.plan(given.problem, choice.configuration, device_of(0))
    else:
        plan = few.plan(given.problem, configuration, device_of(0))
    fixed = [t.data_ptr() for t in (given.x, given.w13, given.w2, given.weights)]

    def call(ids: torch.Tensor) -> None:
        plan.launch(*fixed, ids.data_ptr(), given.out.data_ptr(), given.workspace.data_ptr(), stream())

    return call


def one_product(
    given: Operands, configuration: FewConfiguration, product: Product
) -> Callable[[torch.Tensor], None]:
    launcher = few.product_launcher(given.problem, configuration, product, device_of(0))
    x, w, out = (
        (given.x, given.w13, given.middle)
        if product is Product.UP
        else (given.middle, given.w2, given.out if configuration.combined else given.rows)
    )
    addresses = x.data_ptr(), w.data_ptr(), given.weights.data_ptr()

    def call(ids: torch.Tensor) -> None:
        launcher.start_at(*addresses, ids.data_ptr(), out.data_ptr(), stream())

    return call


def capture(call: Callable[[torch.Tensor], None], given: Operands) -> torch.cuda.CUDAGraph:
    call(given.ids[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for ids in given.ids:
            call(ids)
    return graph


def race(graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, float]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1000 / calls)
    return {name: statistics.median(values[1:]) for name, values in samples.items()}


def run(case: Case, products: bool) -> list[dict[str, Any]]:
    problem = case.problem()
    per_call = min(case.experts, problem.slots) * 3 * case.hidden * case.intermediate * 2
    calls = max(2, min(40, CHUNK_BYTES // per_call))
    given = Operands(case, calls)
    expected = given.expected()
    scale = float(expected.abs().max())
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    rows: list[dict[str, Any]] = []
    many = hopper.choose(problem, device_of(0)) is not None and case.tokens >= MANY_TOKENS
    for index, configuration in enumerate((*case.candidates, None) if many else case.candidates):
        call = whole(given, configuration)
        given.out.fill_(torch.nan)
        call(given.ids[0])
        error = float((given.out.double() - expected).abs().max()) / scale
        label = "the way for many tokens" if configuration is None else configuration.label
        rows.append({"case": case.name, "configuration": label, "error": error})
        graphs[f"{index} whole"] = capture(call, given)
        if configuration is not None and products:
            for product in Product:
                graphs[f"{index} {product.value}"] = capture(
                    one_product(given, configuration, product), given
                )
    times = race(graphs, calls)
    print(f"\n{case.name}: {given.touched:.1f} experts, {given.bytes / 1e6:.0f} MB", flush=True)
    for index, row in enumerate(rows):
        row |= {name: times[key] for name in ("whole", "up", "down") if (key := f"{index} {name}") in times}
        row["TB/s"] = given.bytes / row["whole"] / 1e6
        wrong = "" if row["error"] < 0.01 else "  WRONG"
        parts = "".join(f"  {name} {row[name]:7.1f}" for name in ("up", "down") if name in row)
        print(
            f"{row['whole']:8.1f} us {row['TB/s']:5.2f} TB/s{parts}  error {row['error']:.4f}{wrong}  "
            f"{row['configuration']}",
            flush=True,
        )
    return rows


def build(cases: list[Case], architecture: str) -> None:
    """All kernels, several at a time."""
    wanted = {}
    for case in cases:
        for configuration in case.candidates:
            for product in Product:
                kernel = few.kernel(configuration, product, Activation.SILU, torch.bfloat16, architecture)
                wanted[kernel.label] = kernel

    def compile_one(kernel: Any) -> None:
        try:
            compile_kernel(kernel)
        except BuildError as error:
            print(f"{kernel.label}: {error}", flush=True)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compile_one, wanted.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", action="append", help="only cases whose name begins so")
    parser.add_argument("--products", action="store_true", help="also time the products alone")
    arguments = parser.parse_args()
    cases = [c for c in CASES if not arguments.case or any(c.name.startswith(n) for n in arguments.case)]
    make_context_current(0)
    build(cases, device_of(0).architecture)
    results = []
    for case in cases:
        results += run(case, arguments.products)
        torch.cuda.empty_cache()
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
