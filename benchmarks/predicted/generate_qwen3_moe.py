"""Greedy generation by a small Qwen3-MoE of transformers with random weights, with the library's parts."""

from __future__ import annotations

import argparse

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import cudadent42

CONFIGURATION = Qwen3MoeConfig(
    vocab_size=512,
    hidden_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=256,
    initializer_range=0.1,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(CONFIGURATION).eval().to(options.device, torch.bfloat16)
    prompt = torch.randint(1, 512, (4, 256), device=options.device)

    def generate(tokens: int) -> None:
        model.generate(
            prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        ).sum().item()

    generate(2)
    with cudadent42.capture():
        generate(options.tokens)


if __name__ == "__main__":
    main()
