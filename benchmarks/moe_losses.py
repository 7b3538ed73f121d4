"""Whether a model of experts trains as it does without these kernels: losses in float32 and in bfloat16.

    python benchmarks/moe_losses.py --output losses.json [--seeds 10] [--steps 200] [--device cuda] [--processes 5]

A Qwen3-MoE of two layers with random weights learns a language drawn from a table. Each seed's model is trained on the
same batches in float32 by transformers' `grouped_mm` experts, and in bfloat16 with weights kept in float32 by these, by
transformers' loop over the experts, and by the kernels: `accelerate`, so experts, routers, attention, norms, rotations;
and the experts alone. Seeds are dealt out to processes, as one model of this size leaves most of a GPU idle.
What is compared is how far the losses are from float32's, in the mean over the steps and at most. bfloat16's own spread
is what its two library settings are apart from float32; `tools/figure_training.py` makes the figure of both.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from provenance import provenance

import flashmoe_science
from flashmoe_science.huggingface import IMPLEMENTATION

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
BATCH, LENGTH, LIKELY = 8, 256, 8
"""Sequences of a step, their tokens, and how many tokens may follow each one."""
RATE = 1e-3
EXACT, OURS, EXPERTS = "float32", "kernels", "experts"
NAMES = {"grouped_mm": "grouped_mm", "loop": "eager", EXPERTS: IMPLEMENTATION}
"""transformers' names of its experts, and of this project's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=5)
    chosen = parser.parse_args()
    with ProcessPoolExecutor(chosen.processes, get_context("spawn")) as pool:
        seed_run = partial(run_of_seed, steps=chosen.steps, device=chosen.device)
        runs = list(pool.map(seed_run, range(chosen.seeds)))
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    document = {
        **provenance(chosen.device),
        "transformers": transformers.__version__,
        "steps": chosen.steps,
        "runs": runs,
    }
    chosen.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def run_of_seed(seed: int, steps: int, device: str) -> dict[str, Any]:
    """The losses of every way, and how far each one's are from float32's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    losses = {way: train(way, seed, steps, device) for way in (EXACT, *NAMES, OURS)}
    apart = {
        way: {"mean": float(distance.mean()), "most": float(distance.max())}
        for way, curve in losses.items()
        if way != EXACT
        for distance in [np.abs(np.array(curve) - np.array(losses[EXACT]))]
    }
    ends = ", ".join(f"{way} {np.mean(curve[-20:]):.4f}" for way, curve in losses.items())
    print(f"seed {seed}: the last 20 losses {ends}; apart from float32 {apart}", flush=True)
    return {"seed": seed, "apart": apart, "losses": losses}


def train(way: str, seed: int, steps: int, device: str) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(seed)
    configuration = transformers.Qwen3MoeConfig(**SIZES, use_cache=False)
    model = transformers.Qwen3MoeForCausalLM(configuration).to(device).train()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    if way != EXACT:
        model = model.bfloat16()
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation(NAMES.get(way, "grouped_mm"))
    if way == OURS:
        flashmoe_science.accelerate(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=RATE)
    losses = []
    for ids in language(seed, steps):
        on_device = ids.to(device)
        loss = model(input_ids=on_device, labels=on_device).loss
        for weight, gradient in zip(weights, torch.autograd.grad(loss, parameters), strict=True):
            weight.grad = gradient.float()
        optimizer.step()
        torch._foreach_copy_([parameter.detach() for parameter in parameters], weights)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def language(seed: int, steps: int) -> list[torch.Tensor]:
    """Batches (BATCH, LENGTH) of tokens, each of which is followed by one of a few."""
    draw = np.random.default_rng(seed)
    vocabulary = SIZES["vocab_size"]
    followers = draw.integers(vocabulary, size=(vocabulary, LIKELY))
    tokens = np.empty((steps, BATCH, LENGTH), dtype=np.int64)
    tokens[..., 0] = draw.integers(vocabulary, size=(steps, BATCH))
    for position in range(1, LENGTH):
        choice = draw.integers(LIKELY, size=(steps, BATCH))
        tokens[..., position] = followers[tokens[..., position - 1], choice]
    return list(torch.from_numpy(tokens))


if __name__ == "__main__":
    main()
