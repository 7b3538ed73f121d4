"""A small Llama with random weights, fine-tuned by transformers' Trainer; `accelerate` is the only line that is ours.

python examples/finetune_llama.py [--device cuda] [--steps 20]        needs: pip install '.[transformers]' accelerate
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

import flashmoe_science

LENGTH, VOCABULARY = 64, 64


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts that count upwards, each in steps of its own."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index + (1 + index % 7) * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def train(model: LlamaForCausalLM, device: str, steps: int) -> tuple[float, float]:
    """The last loss, and seconds for each step, without those of starting."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            use_cpu=device == "cpu",
            bf16=device == "cuda",
            report_to="none",
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
        began = time.perf_counter()
        result = trainer.train()
    return float(result.training_loss), (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    logging.set_verbosity_error()
    configuration = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    torch.manual_seed(0)
    plain = LlamaForCausalLM(configuration)
    ours = copy.deepcopy(plain)
    print(flashmoe_science.accelerate(ours))

    train(copy.deepcopy(ours), options.device, 1)  # compiles the kernels
    flashmoe_science.reset_report()
    expected, plain_seconds = train(plain, options.device, options.steps)
    loss, seconds = train(ours, options.device, options.steps)
    print(flashmoe_science.report())
    print(f"mean loss {expected:.4f} with the library's attention, {loss:.4f} with ours")
    print(
        f"a step takes {plain_seconds * 1e3:.1f} ms, {seconds * 1e3:.1f} ms with ours: "
        f"{plain_seconds / seconds:.2f}x"
    )


if __name__ == "__main__":
    main()
