"""Prompts of 1,024 tokens through a small Llama of transformers with random weights, with PyTorch's attention."""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cudadent42

CONFIGURATION = LlamaConfig(
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIGURATION).eval().to(options.device, torch.bfloat16)
    prompts = torch.randint(1, 512, (options.prompts, 1, 1024), device=options.device)
    with torch.no_grad():
        model(prompts[0])
        with cudadent42.capture():
            for prompt in prompts:
                model(prompt).logits[0, -1].argmax().item()  # waits for the device


if __name__ == "__main__":
    main()
