"""Greedy generation with a mixture of experts in the shape of Qwen3-MoE, random weights: the library's parts and ours.

python examples/serve_qwen3_moe.py [--device cuda] [--tokens 32]        needs: pip install '.[transformers]'
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import flashmoe_science


def generate(model: Qwen3MoeForCausalLM, prompt: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float]:
    """The text, and seconds for each token."""
    began = time.perf_counter()
    text = model.generate(prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    return text, (time.perf_counter() - began) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    configuration = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    library = Qwen3MoeForCausalLM(configuration).eval().to(options.device, dtype)
    ours = copy.deepcopy(library)
    print(flashmoe_science.accelerate(ours))

    prompt = torch.randint(1, 512, (2, 16), device=options.device)
    for model in (library, ours):
        generate(model, prompt, 2)  # compiles the kernels
    flashmoe_science.reset_report()
    expected, library_seconds = generate(library, prompt, options.tokens)
    text, seconds = generate(ours, prompt, options.tokens)
    print(flashmoe_science.report())
    print("the same text" if torch.equal(text, expected) else "another text: a tie that rounding decides")
    print(
        f"a token takes {library_seconds * 1e3:.1f} ms, {seconds * 1e3:.1f} ms with ours: "
        f"{library_seconds / seconds:.2f}x"
    )


if __name__ == "__main__":
    main()
