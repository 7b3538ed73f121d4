"""Attention with grouped heads and a causal mask, held against PyTorch's own.

python examples/attention.py [--device cuda]
"""

from __future__ import annotations

import argparse

import torch

from flashmoe_science import flash_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    generator = torch.Generator(device).manual_seed(0)

    def tensor(heads: int) -> torch.Tensor:
        """(batch, heads, seq, head_dim)"""
        return torch.randn(1, heads, 256, 64, generator=generator, device=device).bfloat16()

    query, key, value = tensor(8), tensor(2), tensor(2)  # 8 query heads share 2 key heads
    output, lse = flash_attention(query, key, value, causal=True, return_lse=True)

    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    difference = (output - expected).abs().max().item()
    print(f"output {tuple(output.shape)}, log-sum-exp {tuple(lse.shape)}")
    print(f"largest difference from PyTorch: {difference:.4f}")


if __name__ == "__main__":
    main()
