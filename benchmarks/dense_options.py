"""`flash_attention` with a window, a cap or sinks on one GPU: as sequences, as the portable kernel, and flex_attention.

    python benchmarks/dense_options.py --output FOLDER
    python benchmarks/dense_options.py --gradients --output FOLDER

With ``--gradients``: a backward pass by autograd, by events around each call, of cases with as many rows as keys: by
the kernels, composed of PyTorch's operations as it was before there were kernels, and by flex_attention.

GPU time by replaying graphs of many calls, in interleaved blocks of random order. Results are compared with the
portable kernel's before they are timed. flex_attention is compiled for the very case, and takes no sinks; its mask of
blocks is made before.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cudadent42.decisions.schedule import block_orders
from cudadent42.decisions.statistics import estimate_ratio
from cudadent42.timing.cuda_timers import CudaGraphTimer
from cudadent42.timing.timers import Reading
from flashmoe_science import flash_attention
from flashmoe_science.cuda.varlen import OVERRIDE_VARIABLE
from flashmoe_science.cuda.varlen.dense import forward
from flashmoe_science.gradients import Needs
from flashmoe_science.varlen.dense_gradients import Options, Recorded, _composed

Call = Callable[[], torch.Tensor]
SEQUENCES, PORTABLE, FLEX = "sequences", "portable", "flex_attention"
KERNELS, COMPOSED = "kernels", "composed"
MOST_APART = 0.01
"""Norm of the difference of two results over that of one."""
INPUT_SETS, MIN_BLOCKS, MAX_BLOCKS = 3, 15, 400


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    window: int = -1
    """Keys before a row's own that it sees; all calls are causal."""
    softcap: float = 0.0
    sinks: bool = False


CASES = (
    Case("gpt-oss-window", 1, 64, 8, 8192, 8192, 64, window=127, sinks=True),
    Case("gpt-oss-full", 1, 64, 8, 8192, 8192, 64, sinks=True),
    Case("mistral-window", 1, 32, 8, 16384, 16384, 128, window=4095),
    Case("batch-window", 4, 32, 8, 2048, 2048, 128, window=1023),
    Case("gemma-2-cap", 1, 16, 8, 8192, 8192, 256, softcap=50.0),
    Case("gemma-2-window", 1, 16, 8, 8192, 8192, 256, window=4095, softcap=50.0),
    Case("short-cap", 8, 16, 16, 512, 512, 64, softcap=30.0),
    Case("decode-window", 8, 64, 8, 1, 8192, 64, window=127, sinks=True),
    Case("decode-sinks", 8, 64, 8, 1, 8192, 64, sinks=True),
    Case("decode-cap", 8, 16, 8, 1, 8192, 128, softcap=50.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="For the blocks of one case.")
    parser.add_argument("--without-flex", action="store_true")
    parser.add_argument("--gradients", action="store_true")
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {**provenance("cuda"), "cases": []}
    name = "dense-gradients.json" if chosen.gradients else "dense-options.json"
    for case in CASES:
        if chosen.gradients and case.seqlen_q < case.seqlen_k:
            continue
        of_case = race_of_gradients if chosen.gradients else race
        document["cases"].append(row := of_case(case, chosen.seconds, with_flex=not chosen.without_flex))
        text = json.dumps(document, indent=1) + "\n"
        (chosen.output / name).write_text(text, encoding="utf-8")
        print(case.name, {name: round(us, 2) for name, us in row["us"].items()}, row["refused"], flush=True)
        torch.cuda.empty_cache()


def race(case: Case, seconds: float, *, with_flex: bool) -> dict[str, Any]:
    sets = [inputs(case, seed) for seed in range(INPUT_SETS)]
    ways = {PORTABLE: kernel, SEQUENCES: kernel} | ({FLEX: flex} if with_flex and not case.sinks else {})
    timer = CudaGraphTimer("cuda", None)
    expected: torch.Tensor | None = None
    readers, refused = {}, {}
    for name, way in ways.items():
        calls = [way(case, *tensors) for tensors in sets]
        os.environ[OVERRIDE_VARIABLE] = "portable" if name == PORTABLE else ""
        # A thread of its own for each way: a thread chooses the kernel once for calls that are alike.
        with ThreadPoolExecutor(max_workers=1) as own:
            output = own.submit(calls[0]).result().float()
            expected = output if expected is None else expected
            apart = float((output - expected).norm() / expected.norm())
            if apart <= MOST_APART:
                readers[name] = own.submit(timer.calibrate, calls).result()
            else:
                refused[name] = f"its result is {apart:.3g} from the portable kernel's"
    timed = {name: functools.partial(graph_microseconds, read) for name, read in readers.items()}
    return raced(case, timed, refused, seconds, baseline=SEQUENCES)


def race_of_gradients(case: Case, seconds: float, *, with_flex: bool) -> dict[str, Any]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs(case, 0)]
    sinks = torch.linspace(-2, 2, case.heads, device="cuda") if case.sinks else None
    output, lse = flash_attention(
        *leaves, causal=True, window=(case.window, 0), softcap=case.softcap, sinks=sinks, return_lse=True
    )
    gradient = torch.randn_like(output)
    total = lse.detach() if sinks is None else torch.logaddexp(lse.detach(), sinks[:, None])
    kept = Recorded(*(tensor.detach() for tensor in (*leaves, output, lse)), sinks)
    options = Options((case.window, 0), case.softcap, case.head_dim**-0.5)
    calls: dict[str, Callable[[], Any]] = {
        KERNELS: lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True),
        COMPOSED: lambda: _composed(gradient, None, kept, total, options, Needs(True, True, True)),
    }
    if with_flex and not case.sinks:
        of_flex = flex(case, *leaves)()
        calls[FLEX] = lambda: torch.autograd.grad(of_flex, leaves, gradient, retain_graph=True)
    expected = [each.float() for each in calls[COMPOSED]()]
    refused = {}
    for name in list(calls):
        apart = max(
            float((mine.float() - right).norm() / right.norm())
            for mine, right in zip(calls[name](), expected, strict=True)
        )
        if not apart <= MOST_APART:
            refused[name] = f"a gradient is {apart:.3g} from the composed one"
            del calls[name]
    timed = {name: functools.partial(microseconds, call) for name, call in calls.items()}
    return raced(case, timed, refused, seconds, baseline=KERNELS)


def raced(
    case: Case,
    readers: dict[str, Callable[[], float]],
    refused: dict[str, str],
    seconds: float,
    *,
    baseline: str,
) -> dict[str, Any]:
    """The row of a case: each reader, which gives microseconds, once in every block, and its ratio to the baseline."""
    blocks: list[dict[str, float]] = []
    began = time.monotonic()
    for order in block_orders(list(readers), MAX_BLOCKS, 0, case.name):
        if len(blocks) >= MIN_BLOCKS and time.monotonic() - began > seconds:
            break
        blocks.append({name: readers[name]() for name in order})
    return {
        **asdict(case),
        "us": {name: float(np.median([block[name] for block in blocks])) for name in readers},
        f"over_{baseline}": {name: over(blocks, name, baseline) for name in readers if name != baseline},
        "refused": refused,
        "blocks_us": blocks,
    }


def graph_microseconds(read: Callable[[], Reading]) -> float:
    return read().latency_ms * 1e3


def microseconds(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def over(blocks: list[dict[str, float]], name: str, other: str) -> list[float]:
    """Its time over that of the other, with the interval."""
    estimate = estimate_ratio(*(np.array([block[each] for block in blocks]) for each in (name, other)), 0)
    return [estimate.ratio, *estimate.interval()]


def inputs(case: Case, seed: int) -> tuple[torch.Tensor, ...]:
    """As a model's projections lie: (batch, seqlen, heads, head_dim), transposed."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(seqlen: int, heads: int) -> torch.Tensor:
        memory = torch.randn(case.batch, seqlen, heads, case.head_dim, device="cuda", generator=generator)
        return memory.bfloat16().transpose(1, 2)

    return random(case.seqlen_q, case.heads), *(random(case.seqlen_k, case.kv_heads) for _ in range(2))


def kernel(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Call:
    sinks = torch.linspace(-2, 2, case.heads, device="cuda") if case.sinks else None
    scale = case.head_dim**-0.5

    def call() -> torch.Tensor:
        return forward(
            query,
            key,
            value,
            sinks,
            window=(case.window, 0),
            softcap=case.softcap,
            softmax_scale=scale,
            return_lse=False,
        )[0]

    return call


def flex(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Call:
    ahead = case.seqlen_k - case.seqlen_q

    def seen(batch: Any, head: Any, row: Any, column: Any) -> Any:
        distance = row + ahead - column
        return (distance >= 0) & (distance <= case.window) if case.window >= 0 else distance >= 0

    def capped(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return case.softcap * torch.tanh(score / case.softcap)

    mask = create_block_mask(seen, None, None, case.seqlen_q, case.seqlen_k, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    score_mod = capped if case.softcap else None

    def call() -> torch.Tensor:
        result: torch.Tensor = compiled(
            query, key, value, score_mod=score_mod, block_mask=mask, enable_gqa=case.heads != case.kv_heads
        )
        return result

    return call


if __name__ == "__main__":
    main()
