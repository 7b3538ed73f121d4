"""Where a training step of attention waits for the host: one step at a time, as the GPU sees it between events.

    python benchmarks/training_steps.py [--rounds 60] [--output FOLDER]

Both passes of one call on an idle GPU, of three sets of tensors in turn, by three ways: `flash_attention`; the same
kernels in an autograd Function that checks nothing (the least that Python can do); and cuDNN by way of PyTorch.
Medians in microseconds: the whole step, each pass with an event between them, and the host's time until each returned.
Writes steps.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import provenance
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cudadent42.base.files import write_json
from flashmoe_science import flash_attention
from flashmoe_science.gradients import Needs

forward = importlib.import_module("flashmoe_science.cuda.attention.forward")
backward = importlib.import_module("flashmoe_science.cuda.attention.gradients.backward")
SETS, WARM_UP = 3, 5
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Shape(NamedTuple):
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool

    @property
    def name(self) -> str:
        return f"d{self.head_dim}-{'causal' if self.causal else 'full'}-{self.seqlen}"


SHAPES = (
    Shape(32, 16, 512, 128, False),
    Shape(32, 16, 512, 128, True),
    Shape(32, 32, 512, 64, False),
    Shape(32, 32, 512, 64, True),
    Shape(16, 16, 1024, 128, False),
)


class Bare(torch.autograd.Function):
    """Prepared calls of both passes, and nothing else."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, calls: tuple[Attention, Any]) -> torch.Tensor:
        output, lse = calls[0](query, key, value)
        ctx.call = calls[1]
        ctx.save_for_backward(query, key, value, output.detach(), lse)
        result: torch.Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_query, of_key, of_value = ctx.call(*ctx.saved_tensors, gradient)
        return of_query, of_key, of_value, None


def prepared(tensors: Tensors, gradient: torch.Tensor, causal: bool) -> tuple[Attention, Any]:
    """The calls that the package makes of these tensors, as it keeps them for the next ones."""
    with torch.no_grad():
        for _ in range(SETS):
            output, lse = forward.forward(*tensors, causal=causal, return_lse=True)
            backward.backward(
                gradient,
                *tensors,
                output,
                lse,
                None,
                causal=causal,
                softmax_scale=None,
                needs=Needs(True, True, True),
            )
    return forward.recorded.recent[-1], backward._calls.recent[-1]


def step(
    attention: Attention,
    tensors: Tensors,
    gradient: torch.Tensor,
    events: list[torch.cuda.Event],
    *,
    apart: bool,
) -> tuple[float, float]:
    """The host's microseconds until each pass returned. With ``apart`` there is an event between them."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    events[0].record()
    output = attention(*tensors)
    middle = time.perf_counter()
    if apart:
        events[1].record()
    gradients = torch.autograd.grad(output, tensors, gradient)
    end = time.perf_counter()
    events[2].record()
    torch.cuda.synchronize()
    del gradients
    return (middle - begin) * 1e6, (end - middle) * 1e6


def measure(shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    size = shape[:4]

    def drawn() -> torch.Tensor:
        return torch.randn(size[0], size[1], size[2], size[3], device="cuda", dtype=torch.bfloat16)

    sets: list[Any] = [tuple(drawn().requires_grad_() for _ in range(3)) for _ in range(SETS)]
    gradient = drawn()
    calls = prepared(sets[0], gradient, shape.causal)
    ways: dict[str, Attention] = {
        "flash_attention": lambda q, k, v: flash_attention(q, k, v, causal=shape.causal),
        "its kernels in a bare Function": lambda q, k, v: Bare.apply(q, k, v, calls),  # type: ignore[no-untyped-call]
        "cuDNN": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=shape.causal),
    }
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
    times: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    order = random.Random(0)
    for number in range(rounds):
        # Who comes after whom matters: what a way before has left in the processor's caches, the next one finds there.
        for way, attention in order.sample(sorted(ways.items()), len(ways)):
            backend = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if way == "cuDNN" else contextlib.nullcontext()
            with backend:
                host = step(attention, sets[number % SETS], gradient, events, apart=False)
                whole = events[0].elapsed_time(events[2]) * 1e3
                step(attention, sets[number % SETS], gradient, events, apart=True)
            passes = (events[i].elapsed_time(events[i + 1]) * 1e3 for i in range(2))
            names = ("step", "forward", "backward", "host, forward", "host, backward")
            for name, value in zip(names, (whole, *passes, *host), strict=True):
                times[way].setdefault(name, []).append(value)
    return {
        way: {name: statistics.median(values[WARM_UP:]) for name, values in of_way.items()}
        for way, of_way in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    results = {shape.name: measure(shape, given.rounds) for shape in SHAPES}
    for name, ways in results.items():
        for way, values in ways.items():
            print(f"{name:16} {way:32}", *(f"{key} {value:.0f}" for key, value in values.items()), sep="  ")
        print(
            f"{name:16} cuDNN's step over ours {ways['cuDNN']['step'] / ways['flash_attention']['step']:.3f}"
        )
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        write_json(given.output / "steps.json", {**provenance("cuda"), "us": results})


if __name__ == "__main__":
    main()
