"""A hand-written transformer block: compiled in one graph, exported, saved and loaded; what its operators count.

python examples/compile_and_export.py [--device cuda] [--backend inductor]
"""

from __future__ import annotations

import argparse
import io
import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flashmoe_science import flash_attention, fused_moe, topk_routing


class Block(nn.Module):
    """Attention with grouped heads, then a mixture of experts."""

    def __init__(self, hidden: int = 256, heads: int = 8, kv_heads: int = 2, experts: int = 8) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.router = nn.Linear(hidden, experts, bias=False)
        self.w13 = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) / hidden**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen, hidden) to the same."""
        batch, seqlen, hidden = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, seqlen, -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        mixed = flash_attention(query, key, value, causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seqlen, hidden))
        tokens = self.norm2(x).view(-1, hidden)
        weights, ids = topk_routing(self.router(tokens), k=2)
        return x + fused_moe(tokens, self.w13, self.w2, weights, ids).view(x.shape)


def seconds(function: nn.Module, x: torch.Tensor) -> float:
    """The fastest of five calls."""
    times = []
    for _ in range(5):
        if x.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()  # what is exported is for inference
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile; inductor is PyTorch's own")
    options = parser.parse_args()
    torch.manual_seed(0)
    block = Block().to(options.device, torch.bfloat16)
    x = torch.randn(2, 128, 256).to(options.device, torch.bfloat16)
    expected = block(x)

    compiled = torch.compile(block, backend=options.backend, fullgraph=True)  # fails on a graph break
    difference = (compiled(x) - expected).abs().max().item()
    print(f"compiled: one graph, largest difference from eager {difference:.4f}")
    print(f"eager over compiled: {seconds(block, x) / seconds(compiled, x):.2f}x")

    batch, seqlen = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("seqlen", min=2, max=8192)
    program = torch.export.export(block, (x,), dynamic_shapes=({0: batch, 1: seqlen},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    # A process that only loads begins with `import flashmoe_science.operators`, which defines the operators.
    loaded = torch.export.load(file).module()
    other = torch.randn(3, 77, 256).to(options.device, torch.bfloat16)
    print(
        f"exported, {len(file.getvalue())} bytes; same bits at another size: {torch.equal(loaded(other), block(other))}"
    )

    with FlopCounterMode(display=False) as counter:
        block(x)
    ours = {
        str(name): count
        for name, count in counter.get_flop_counts()["Global"].items()
        if str(name).startswith("flashmoe_science")
    }
    for name, count in ours.items():
        print(f"taken by {name}: {count / counter.get_total_flops():.0%} of the floating-point operations")


if __name__ == "__main__":
    main()
