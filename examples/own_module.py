"""A hand-written nn.Module with this attention in the place of PyTorch's: the same training step, and its time.

python examples/own_module.py [--device cuda] [--length 512]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from flashmoe_science import explain, flash_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def pytorch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return flash_attention(query, key, value, causal=True)


class SelfAttention(nn.Module):
    """Causal attention with grouped heads, from (batch, seqlen, hidden) to the same."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, attention: Attention) -> None:
        super().__init__()
        self.sizes, self.head_dim = (heads, kv_heads, kv_heads), hidden // heads
        self.qkv = nn.Linear(hidden, sum(self.sizes) * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # (batch, heads, seqlen, head_dim), as views: no copy is needed.
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        mixed = self.attention(*heads.split(self.sizes, dim=1))
        return self.out(mixed.transpose(1, 2).flatten(2))


def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward; the loss."""
    module.zero_grad()
    loss = module(x).float().square().mean()
    loss.backward()
    return loss.detach()


def seconds(module: nn.Module, x: torch.Tensor) -> float:
    """The fastest of ten steps."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        step(module, x).item()  # waits for the device
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--length", type=int, default=512, help="tokens of each of the two sequences")
    options = parser.parse_args()
    device, length = options.device, options.length
    modules = []
    for attention in (pytorch, ours):
        torch.manual_seed(0)
        modules.append(SelfAttention(512, 8, 2, attention).to(device, torch.bfloat16))
    x = torch.randn(2, length, 512).to(device, torch.bfloat16)
    losses = [step(module, x).item() for module in modules]
    gradients = [module.qkv.weight.grad.float() for module in modules]
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    print(
        f"losses {losses[0]:.6f} and {losses[1]:.6f}; gradients differ by {difference.item():.2%} of their norm"
    )
    heads = [torch.empty(2, heads, length, 64, dtype=torch.bfloat16, device=device) for heads in (8, 2, 2)]
    print(f"taken: {str(explain(flash_attention, *heads, causal=True)).splitlines()[0]}")
    print(f"PyTorch's step over ours: {seconds(modules[0], x) / seconds(modules[1], x):.2f}x")


if __name__ == "__main__":
    main()
