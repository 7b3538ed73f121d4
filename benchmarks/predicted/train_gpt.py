"""Training steps of the GPT of ``examples/train_gpt.py`` at 512 tokens, with PyTorch's attention."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import cudadent42

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from train_gpt import GPT, make_batch

LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    batches = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = GPT(LENGTH).to(options.device, torch.bfloat16 if options.device != "cpu" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        ids = make_batch(LENGTH, options.device, batches)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the device

    for _ in range(3):
        step()
    with cudadent42.capture():
        for _ in range(options.steps):
            step()


if __name__ == "__main__":
    main()
