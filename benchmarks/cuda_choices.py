"""Every kernel and tile that could take a call, raced: what the choice of kernel and the configurations rest on.

    PYTHONPATH=src python benchmarks/cuda_choices.py 1,8,1024,64 1,8,2048,64,causal

Shapes are batch, heads, seqlen, head_dim; bf16, graph replay, median of six interleaved blocks, microseconds.
"""

from __future__ import annotations

import sys

import torch
from cuda_hopper import race

from flashmoe_science.configs.attention import hopper as hopper_configs
from flashmoe_science.configs.attention import portable as portable_configs
from flashmoe_science.cuda.attention import KernelKind, forward
from flashmoe_science.cuda.choice import Choice


def choices(seqlen: int, head_dim: int, causal: bool) -> dict[str, Choice]:
    by_case = {
        f"hopper {tile.block_m}x{tile.block_n}": Choice(KernelKind.HOPPER, tile)
        for tile in hopper_configs.all_configurations()
        if tile.head_dim == hopper_configs.compiled_head_dim(head_dim) and tile.causal == causal
    }
    for tile in (
        portable_configs.tall("sm_90", head_dim, causal, seqlen),
        portable_configs.short("sm_90", head_dim),
    ):
        by_case[f"portable {tile.block_m}x{tile.block_n}"] = Choice(KernelKind.PORTABLE, tile)
    return by_case


def main() -> None:
    for text in sys.argv[1:]:
        *numbers, mask = text.split(",") if text.endswith("causal") else [*text.split(","), "full"]
        batch, heads, seqlen, head_dim = map(int, numbers)
        causal = mask == "causal"
        query, key, value = (
            torch.randn(batch, heads, seqlen, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        calls = {
            name: lambda choice=choice: forward(query, key, value, causal=causal, choice=choice)  # noqa: B023
            for name, choice in choices(seqlen, head_dim, causal).items()
        }
        calls["selected"] = lambda: forward(query, key, value, causal=causal)  # noqa: B023
        calls["sdpa"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            query,  # noqa: B023
            key,  # noqa: B023
            value,  # noqa: B023
            is_causal=causal,  # noqa: B023
        )
        times = race(calls, 0.02, 6)
        print(text, "  ".join(f"{name} {ms * 1e3:.2f}" for name, ms in times.items()), flush=True)


if __name__ == "__main__":
    main()
