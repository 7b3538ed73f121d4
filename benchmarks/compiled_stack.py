"""Four Llama-3-8B layers with the kernels: their GPU time under torch.compile, against the same layers in eager code.

    python benchmarks/compiled_stack.py --output FOLDER
    python benchmarks/compiled_stack.py --output FOLDER --tiny --device cpu     # the same with toys, to try the script

Both are recorded as CUDA graphs and replayed, so launches and the host cost nothing: what is compared is the GPU's
work. Eager code, compiled code and eager code again, as a control, meet in interleaved blocks of random order. A sample
is the mean of as many replays as take 20 ms. On a CPU there are no graphs, and the calls themselves are timed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from models import LLAMA, MOST_APART, SAMPLE_MS, TINY, TINY_SAMPLE_MS, Call, difference, measure
from provenance import provenance
from torch import nn

import flashmoe_science
from cudadent42.decisions.statistics import estimate_ratio
from cudadent42.timing.cuda_timers import capture

LAYERS = 4
TOKENS = (2048, 8192)
EAGER, COMPILED, CONTROL = "eager", "compiled", "eager again"


class Stack(nn.Module):
    """The layers of a model without its embeddings, head and masks."""

    def __init__(self, model: Any, tokens: int) -> None:
        super().__init__()
        self.layers = model.layers
        like = next(model.parameters())
        rows = torch.arange(tokens, device=like.device)[None]
        self.positions = model.rotary_emb(like[:1], rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=self.positions)
        return hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=20.0, help="For the blocks of one length.")
    parser.add_argument(
        "--tiny", action="store_true", help="Toys in place of the layers, compiled without Inductor."
    )
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    versions = {"transformers": transformers.__version__, "tiny": chosen.tiny, "layers": LAYERS}
    document: dict[str, Any] = {**provenance(chosen.device), **versions, "cases": []}
    for tokens in (32, 64) if chosen.tiny else TOKENS:
        row = race(tokens, chosen.device, chosen.seconds, chosen.tiny)
        document["cases"].append(row)
        (chosen.output / "compiled.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        ratio, control = row["ratio"], row["control"]
        print(
            f"{tokens} tokens: eager over compiled {ratio['ratio']:.3f} "
            f"({ratio['ci_low']:.3f} to {ratio['ci_high']:.3f}), over itself {control['ratio']:.3f}",
            flush=True,
        )


@torch.no_grad()
def race(tokens: int, device: str, seconds: float, tiny: bool) -> dict[str, Any]:
    """The row of one length."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    sizes = (TINY if tiny else LLAMA) | {"num_hidden_layers": LAYERS}
    with torch.device(device):
        model = transformers.LlamaModel._from_config(transformers.LlamaConfig(**sizes), dtype=torch.bfloat16)
    taken = flashmoe_science.accelerate(model.eval())
    stack = Stack(model, tokens)
    hidden = torch.randn(1, tokens, sizes["hidden_size"], device=device).bfloat16()
    run = torch.compile(stack, fullgraph=True, dynamic=False, backend="aot_eager" if tiny else "inductor")
    flashmoe_science.reset_report()
    eager, compiled = replayed(lambda: stack(hidden), device), replayed(lambda: run(hidden), device)
    report = str(flashmoe_science.report()).splitlines()
    apart = difference(compiled().float(), eager().float().clone())
    if not apart <= MOST_APART:  # NaN, too
        raise SystemExit(f"{tokens} tokens: the outputs are {apart} apart; expected at most {MOST_APART}")
    aimed_ms = TINY_SAMPLE_MS if tiny else SAMPLE_MS
    calls = {EAGER: eager, COMPILED: compiled, CONTROL: eager}
    blocks = measure(calls, f"compiled-stack-{tokens}", seconds, aimed_ms)
    return {
        "tokens": tokens,
        "accelerated": str(taken).splitlines(),
        "report": report,
        "outputs_apart": apart,
        "blocks_ms": blocks,
        "ratio": over(blocks, COMPILED),
        "control": over(blocks, CONTROL),
    }


def replayed(call: Call, device: str) -> Call:
    """The call as the replay of a CUDA graph; itself on a CPU."""
    call()  # compiles
    if device == "cpu":
        return call
    captured = capture((call,), 1, device)

    def replay() -> torch.Tensor:
        captured.graph.replay()
        return captured.output

    return replay


def over(blocks: list[dict[str, float]], name: str) -> dict[str, float]:
    """Above 1 it takes less time than eager code."""
    eager, other = (np.array([block[each] for block in blocks]) for each in (EAGER, name))
    estimate = estimate_ratio(eager, other, 0)
    low, high = estimate.interval()
    return {"ratio": estimate.ratio, "ci_low": low, "ci_high": high}


if __name__ == "__main__":
    main()
