"""Development bench of mixture of experts on CUDA: each way and configuration beside grouped_mm, in one process.

    python benchmarks/cuda_moe.py --cases 4096,2048,768,128,8 --output moe.json [--breakdown] [--compile]

Times are GPU times of CUDA graph replays, the median of rounds that alternate between all of a case. The official
figures come from ``cudadent42 run --suite moe``; this script is for trying variants in little GPU time.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from flashmoe_science.configs.moe import hopper as moe_hopper
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.moe import MoeKind, forward, select
from flashmoe_science.cuda.moe.combine import Combine
from flashmoe_science.cuda.moe.forward import device_of
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.routing import Routing
from flashmoe_science.moe_arguments import Activation, W13Layout

CASES = (
    "32768,2048,768,128,8",
    "4096,2048,768,128,8",
    "256,2048,768,128,8",
    "16,2048,768,128,8",
    "1,2048,768,128,8",
    "8192,4096,14336,8,2",
    "64,4096,14336,8,2",
)
Run = Callable[[], torch.Tensor]


def grouped_mm(x, w13, w2, weights, ids):
    """The composition that users write: sort, gather, two grouped products, scatter."""
    tokens, k = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(w13.shape[0], dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = x[order // k]
    gate, up = F.grouped_mm(rows, w13.transpose(1, 2), offs=ends).chunk(2, dim=1)
    rows = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    scaled = rows * weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return scaled[back].view(tokens, k, -1).sum(dim=1).to(x.dtype)


def capture(run: Run) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def race(runs: dict[str, Run], milliseconds: float) -> dict[str, float]:
    """Microseconds of each: median over rounds of alternating replays, each long enough to time."""
    graphs, repeats = {}, {}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay(graph: torch.cuda.CUDAGraph, count: int) -> float:
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / count

    for name, run in runs.items():
        try:
            graphs[name] = capture(run)
        except RuntimeError as error:  # a peer that cannot be captured is left out
            print(f"  {name}: {type(error).__name__}: {str(error)[:150]}")
            torch.cuda.synchronize()
            continue
        once = replay(graphs[name], 1)
        repeats[name] = max(1, int(milliseconds * 1000 / 5 / max(once, 1)))
    times = defaultdict(list)
    for _ in range(5):
        for name, graph in graphs.items():
            times[name].append(replay(graph, repeats[name]))
    return {name: statistics.median(measured) for name, measured in times.items()}


def breakdown(run: Run) -> dict[str, float]:
    """Microseconds of each kernel of a call, in order; with nothing overlapping where the profiler serialises."""
    run()
    torch.cuda.synchronize()
    repeats = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted(
        (event for event in events if event.name.startswith("moe")), key=lambda e: e.time_range.start
    )
    each = len(kernels) // repeats
    return {
        f"{i} {kernels[i].name}": statistics.median(event.device_time for event in kernels[i::each])
        for i in range(each)
    }


def shared_steps(problem: MoeProblem, tensors: tuple[torch.Tensor, ...]) -> dict[str, Run]:
    """Routing alone and the combination alone."""
    device, architecture = device_of(0), "sm_90a"
    sort, join = Routing(problem, device, architecture), Combine(problem, device, architecture)
    x, _, _, weights, ids = tensors
    bytes_ = {"device": "cuda", "dtype": torch.uint8}
    offsets, slots, counts, tickets = (
        torch.zeros(size + 8, **bytes_)
        for size in (sort.offsets_bytes, sort.slots_bytes, sort.counts_bytes, 8)
    )
    rows = torch.zeros(problem.slots, problem.hidden, device="cuda", dtype=problem.dtype)
    out = torch.empty_like(x)

    def route() -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        sort.launch(*(t.data_ptr() for t in (ids, offsets, slots, counts, tickets)), stream)
        return slots

    def combine() -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        join.launch(*(t.data_ptr() for t in (rows, weights, ids, out)), stream)
        return out

    return {"routing": route, "combination": combine}


def variants(problem: MoeProblem, names: list[str]) -> dict[str, Choice]:
    chosen = select(problem, device_of(0))
    by_name = {f"ours {chosen.kernel.value}": chosen}
    for name in names:
        tile = moe_hopper.MoeHopperConfiguration(*map(int, name.split(",")))
        by_name[f"hopper {name}"] = Choice(MoeKind.HOPPER, tile)
    return by_name


def run_case(case: str, arguments: argparse.Namespace) -> dict[str, object]:
    tokens, hidden, intermediate, experts, k = map(int, case.split(","))
    torch.manual_seed(1)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(tokens, hidden, **make)
    w13 = torch.empty(experts, 2 * intermediate, hidden, **make).normal_(std=hidden**-0.5)
    w2 = torch.empty(experts, hidden, intermediate, **make).normal_(std=intermediate**-0.5)
    weights, ids = torch.randn(tokens, experts, device="cuda").softmax(1).topk(k)
    tensors = (x, w13, w2, (weights / weights.sum(1, keepdim=True)).contiguous(), ids.int())
    problem = MoeProblem(
        tokens=tokens,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=k,
        dtype=torch.bfloat16,
        activation=Activation.SILU,
        w13_layout=W13Layout.CONCAT,
        ids64=False,
    )
    runs: dict[str, Run] = {
        name: functools.partial(forward, *tensors, choice=choice)
        for name, choice in variants(problem, arguments.variants).items()
    }
    ours = next(iter(runs))
    runs["grouped_mm"] = functools.partial(grouped_mm, *tensors)
    if arguments.compile:
        runs["grouped_mm compiled"] = functools.partial(torch.compile(grouped_mm, dynamic=False), *tensors)
    expected = grouped_mm(*tensors).float()
    for name, run in runs.items():
        error = (run().float() - expected).abs().max().item()
        if not error < 0.05 * expected.abs().max().item():
            print(f"  {case} {name}: WRONG, error {error:.3g} of {expected.abs().max().item():.3g}")
    if arguments.breakdown:
        runs |= shared_steps(problem, tensors)
    times = race(runs, arguments.milliseconds)
    touched = ids.unique().numel()
    operations = 2 * tokens * k * 3 * hidden * intermediate
    weight_bytes = touched * 3 * hidden * intermediate * 2
    print(f"{case} ({touched} experts touched)")
    for name, microseconds in times.items():
        print(
            f"  {name:28s} {microseconds:9.1f} us  {operations / microseconds / 1e6:6.1f} TFLOP/s  "
            f"{weight_bytes / microseconds / 1e6:5.2f} TB/s of weights  x{microseconds / times[ours]:.3f}",
            flush=True,
        )
    row: dict[str, object] = {"case": case, "microseconds": times, "touched": touched}
    if arguments.breakdown:
        for name, run in runs.items():
            if name.startswith(("ours", "hopper")):
                row[f"kernels of {name}"] = breakdown(run)
                print(f"    {name}: {row[f'kernels of {name}']}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), help="tokens,hidden,intermediate,experts,k"
    )
    parser.add_argument("--variants", nargs="*", default=[], help="tokens,step,stages of the Hopper tile")
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of each contestant in each case")
    parser.add_argument("--compile", action="store_true", help="also race torch.compile of grouped_mm")
    parser.add_argument("--breakdown", action="store_true", help="also the time of each kernel of ours")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = []
    for case in arguments.cases:
        results.append(run_case(case, arguments))
        torch.cuda.empty_cache()
        if arguments.output:
            document = {"device": torch.cuda.get_device_name(), "results": results}
            arguments.output.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
