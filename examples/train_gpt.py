"""A small GPT trained from scratch, with PyTorch's attention and with ours: one line differs.

python examples/train_gpt.py [--device cuda] [--steps 50] [--length 128]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import flashmoe_science

WIDTH, HEADS, LAYERS, VOCABULARY = 128, 4, 2, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.blocks(self.tokens(ids) + self.positions(positions)))


def make_batch(length: int, device: str, generator: torch.Generator) -> torch.Tensor:
    """Texts that can be learnt: each counts upwards in steps of its own."""
    start, step = torch.randint(1, VOCABULARY, (2, 8, 1), generator=generator)
    return ((start + step * torch.arange(length + 1)) % VOCABULARY).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    batches = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32

    runs = {}
    for name in ("pytorch", "ours"):
        torch.manual_seed(0)
        model = GPT(options.length).to(options.device, dtype)
        runs[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-3), [], [])
    for _ in range(options.steps):
        ids = make_batch(options.length, options.device, batches)
        for name, (model, optimizer, losses, seconds) in runs.items():
            began = time.perf_counter()
            with flashmoe_science.sdpa() if name == "ours" else contextlib.nullcontext():
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the device
            seconds.append(time.perf_counter() - began)

    for name, (_, _, losses, _) in runs.items():
        print(f"{name}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {options.steps} steps")
    pytorch, ours = (statistics.median(seconds) for _, _, _, seconds in runs.values())
    print(flashmoe_science.report())
    print(
        f"a step takes {pytorch * 1e3:.2f} ms with PyTorch's, {ours * 1e3:.2f} ms with ours: {pytorch / ours:.2f}x"
    )


if __name__ == "__main__":
    main()
