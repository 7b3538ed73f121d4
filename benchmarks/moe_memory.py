"""What a mixture of experts takes of device memory beyond inputs and output, on the GPU at hand.

    python benchmarks/moe_memory.py --output memory.json

For each case of the suite moe: the peak of the bytes that a call asks the allocator for, and of those that it hands
out (blocks of over 10 MB in steps of 2 MiB), less the output; over one (tokens x k, intermediate) and one
(tokens x k, hidden) buffer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe.inputs import random_inputs
from cudadent42.suites.loader import load_suite
from flashmoe_science import fused_moe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in load_suite("moe").shapes:
        assert isinstance(case, MoeCase)
        rows.append({"case": case.name, **measured(case)})
        print(rows[-1], flush=True)
    names = ("requested_over_buffers", "allocated_over_buffers")
    figures = {name: max(row[name] for row in rows) for name in names}
    document = {**provenance("cuda"), "cases": rows, "figures": figures}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measured(case: MoeCase) -> dict[str, float]:
    """Bytes, and their share of both buffers."""
    inputs = random_inputs(case, 0, "cuda:0")
    fused_moe(*inputs.tensors, activation=case.activation)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    output = fused_moe(*inputs.tensors, activation=case.activation)
    after = torch.cuda.memory_stats()
    slots = case.tokens * case.top_k
    size = output.element_size()
    buffers = slots * (case.intermediate + case.hidden) * size
    sizes: dict[str, float] = {"output_bytes": output.numel() * size, "buffers_bytes": buffers}
    for name in ("requested", "allocated"):
        key = f"{name}_bytes.all"
        taken = after[f"{key}.peak"] - before[f"{key}.current"] - output.numel() * size
        sizes |= {f"{name}_bytes": taken, f"{name}_over_buffers": taken / buffers}
    return sizes


if __name__ == "__main__":
    main()
