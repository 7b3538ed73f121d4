"""Times of the gradients of a mixture of experts on a Hopper GPU, beside a composition with PyTorch's grouped_mm.

    python benchmarks/moe_backward.py

A line of JSON for each layer: milliseconds of graph replays between events, medians over rounds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from flashmoe_science.cuda.moe import forward
from flashmoe_science.cuda.moe.gradients import backward, forward_keeping
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MoeNeeds

OPTIONS = {"activation": Activation.SILU, "w13_layout": W13Layout.CONCAT}
ROUNDS = 3
REPLAYS = 6


@dataclass(frozen=True)
class Layer:
    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    @property
    def step_flop(self) -> float:
        """Of the forward and the backward pass."""
        return 18.0 * self.tokens * self.top_k * self.hidden * self.intermediate


LAYERS = (
    Layer("qwen3-4096", 4096, 2048, 768, 128, 8),
    Layer("qwen3-32768", 32768, 2048, 768, 128, 8),
    Layer("mixtral-8192", 8192, 4096, 14336, 8, 2),
)


def inputs(layer: Layer) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Arguments of a call, and a gradient of its output."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    scores, ids = normal(layer.tokens, layer.experts).topk(layer.top_k, dim=1)
    arguments = (
        normal(layer.tokens, layer.hidden).bfloat16(),
        (normal(layer.experts, 2 * layer.intermediate, layer.hidden) * layer.hidden**-0.5).bfloat16(),
        (normal(layer.experts, layer.hidden, layer.intermediate) * layer.intermediate**-0.5).bfloat16(),
        scores.softmax(1).contiguous(),
        ids.int().contiguous(),
    )
    return arguments, normal(layer.tokens, layer.hidden).bfloat16()


def composition(arguments: tuple[torch.Tensor, ...], grad_output: torch.Tensor) -> Callable[[], object]:
    """A step with grouped_mm, in eager mode."""
    *floats, ids = arguments
    leaves = [tensor.detach().clone().requires_grad_() for tensor in floats]
    hidden_states, w13, w2, weights = leaves

    def step() -> object:
        experts, order = torch.sort(ids.flatten(), stable=True)
        counts = torch.histc(experts.float(), bins=len(w2), min=0, max=len(w2) - 1)
        offsets = counts.cumsum(0).int()
        rows = hidden_states[order // ids.shape[1]]
        gate, up = functional.grouped_mm(rows, w13.transpose(1, 2), offs=offsets).chunk(2, 1)
        down = functional.grouped_mm(functional.silu(gate) * up, w2.transpose(1, 2), offs=offsets)
        weighted = down * weights.flatten()[order, None].to(down.dtype)
        output = weighted[order.argsort()].view(*ids.shape, -1).sum(1)
        return torch.autograd.grad(output, leaves, grad_output)

    return step


def milliseconds(call: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / REPLAYS)
    return statistics.median(times)


def measured(layer: Layer) -> dict[str, float | str]:
    arguments, grad_output = inputs(layer)
    _, z = forward_keeping(*arguments, **OPTIONS)

    def gradients(*needed: bool) -> Callable[[], object]:
        return lambda: backward(grad_output, *arguments, z, needs=MoeNeeds(*needed), **OPTIONS)

    def step() -> object:
        _, kept = forward_keeping(*arguments, **OPTIONS)
        return backward(grad_output, *arguments, kept, needs=MoeNeeds(True, True, True, True), **OPTIONS)

    calls = {
        "forward": lambda: forward(*arguments, **OPTIONS),
        "forward_keeping": lambda: forward_keeping(*arguments, **OPTIONS),
        "backward": gradients(True, True, True, True),
        "only_hidden_states": gradients(True, False, False, False),
        "only_w13": gradients(False, True, False, False),
        "only_w2": gradients(False, False, True, False),
        "only_topk_weights": gradients(False, False, False, True),
        "step": step,
        "grouped_mm_step": composition(arguments, grad_output),
    }
    times = {name: round(milliseconds(call), 4) for name, call in calls.items()}
    rate = layer.step_flop / times["step"] * 1e-9
    return {"layer": layer.name, **times, "step_tflops": round(rate, 1)}


if __name__ == "__main__":
    for each in LAYERS:
        print(json.dumps(measured(each)), flush=True)
        torch.cuda.empty_cache()
