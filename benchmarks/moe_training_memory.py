"""What a mixture of experts that is trained holds between its passes, and the most it takes, on the GPU at hand.

    python benchmarks/moe_training_memory.py --output memory.json [--case qwen3-30b-32768 ...]

For each case of the suite moe-step and each of its implementations: bytes that the allocator holds more after the
forward pass than before it, and the peak of both passes, both less the output's; so the peak has the gradients in it.
Arguments were there before, so hidden states and routing, which the backward pass needs too, are counted by neither.
Before that the implementation has made a step, so what it keeps for all calls is not counted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from torch import Tensor

from cudadent42.model.implementations import UnsupportedCaseError, why_not
from cudadent42.operations.moe import implementations as forward
from cudadent42.operations.moe_backward.case import MoeBackwardCase
from cudadent42.operations.moe_backward.implementations import RECOMPUTING
from cudadent42.operations.moe_backward.inputs import MoeGradientInputs, differentiated, input_sets
from cudadent42.suites.loader import load_suite

WAYS = {item.name: item for item in (*forward.ALL, RECOMPUTING)}
DEVICE = "cuda:0"


def main() -> None:
    suite = load_suite("moe-step")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--case", nargs="+", choices=[case.name for case in suite.shapes])
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in suite.shapes:
        assert isinstance(case, MoeBackwardCase)
        if chosen.case and case.name not in chosen.case:
            continue
        (inputs,) = input_sets(case, 0, 1, DEVICE)
        for name in suite.implementations:
            reason = why_not(WAYS[name], DEVICE)
            try:
                figures = {"left_out": reason} if reason else measured(name, case, inputs)
            except (UnsupportedCaseError, torch.OutOfMemoryError) as failure:
                figures = {"left_out": str(failure).splitlines()[0]}
            rows.append({"case": case.name, "implementation": name, **figures})
            print(rows[-1], flush=True)
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    document = {**provenance("cuda"), "cases": rows}
    chosen.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measured(name: str, case: MoeBackwardCase, inputs: MoeGradientInputs) -> dict[str, Any]:
    """Gigabytes."""
    leaves = inputs.leaves
    call, wanted = WAYS[name].prepare(case, leaves), differentiated(leaves)

    def step() -> tuple[Tensor, int, tuple[Tensor, ...]]:
        output = call()
        kept = torch.cuda.memory_allocated()
        return output, kept, torch.autograd.grad(output, wanted, inputs.output_gradient)

    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output, kept, _ = step()
    torch.cuda.synchronize()
    size = output.nbytes
    return {
        "kept_gb": (kept - before - size) * 1e-9,
        "peak_gb": (torch.cuda.max_memory_allocated() - before - size) * 1e-9,
    }


if __name__ == "__main__":
    main()
