"""Run by tools/sanitize.sh under compute-sanitizer: attention over sequences of any lengths, by every kernel that takes
a call, on small shapes.

Usage: python sanitized_varlen_calls.py [KERNEL...]     (of `cuda.varlen.VarlenKernel`; all if none is named)

SANITIZER in the environment names the tool. Each result is compared with float64 on the CPU, so that a kernel that does
nothing does not pass. Prints "passed" when all calls were right; a wrong one raises.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from sanitized_kernels import compile_for_racecheck
from tree_cases import random_tree, tree_mask
from varlen_cases import Call, Shape, bounds, packed, paged, quantized, to
from varlen_quantized import assert_as_exact_as_ideal
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import attention_varlen
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.varlen import mixed_hopper
from flashmoe_science.cuda.varlen.select import MODULES, VarlenKernel, bucket
from flashmoe_science.varlen.arguments import Inputs, Options, check
from flashmoe_science.varlen.problem import Sizes, Tensors

BF16, FP16 = torch.bfloat16, torch.float16
FEW = Shape((1, 0, 2, 1, 1), (300, 5, 17, 0, 64), 8, 2, 128, dtype=BF16)
MANY = Shape((70, 1, 0, 130), (129, 33, 9, 65), 4, 2, 64, dtype=BF16)
TREES = Shape((64, 7, 66), (64, 40, 130), 8, 2, 64, dtype=BF16)
UNEQUAL = Shape((40, 3), (70, 7), 2, 2, 192, 128, FP16)


def cases() -> list[tuple[Shape, Call, dict[str, Any]]]:
    with_sinks = paged(FEW, 1)
    with_sinks["sinks"] = torch.linspace(-2, 3, 8)
    with_slopes = packed(MANY, spare_rows=5)
    with_slopes["alibi_slopes"] = torch.rand(4, 4)
    few_trees = tree_mask([random_tree(nodes, seed) for seed, nodes in enumerate(FEW.queries)])
    many_trees = tree_mask([random_tree(nodes, seed) for seed, nodes in enumerate(TREES.queries)])
    return [
        (FEW, paged(FEW, 16), {}),
        (FEW, {**paged(FEW, 16, garbage=1 << 30), "tree_mask": few_trees}, {}),
        (TREES, {**paged(TREES, 16), "tree_mask": many_trees}, {}),
        (TREES, {**packed(TREES), "tree_mask": many_trees}, {"causal": False}),
        (FEW, with_sinks, {"window": (40, 0)}),
        (MANY, packed(MANY, spare_keys=3), {"causal": False}),
        (MANY, paged(MANY, 48, garbage=1 << 30), {"window": (20, 3), "causal": False}),
        (MANY, with_slopes, {"softcap": 5.0}),
        (UNEQUAL, paged(UNEQUAL, 16), {}),
        (UNEQUAL, paged(UNEQUAL, 1), {}),
        (MANY, paged(MANY, 1, garbage=1 << 30), {}),
        (MANY, paged(MANY, 8, garbage=1 << 30), {}),
    ]


def attend(kind: VarlenKernel, call: Call, shape: Shape, **options: Any) -> bool:
    """Whether the kernel takes the call, which was then right."""
    on_gpu = to(call, "cuda")
    inputs = Inputs(**{name: on_gpu.get(name) for name in Inputs._fields})  # type: ignore[arg-type]
    usual = {"causal": True, "window": (-1, -1), "softcap": 0.0, "softmax_scale": None, "split_keys": None}
    problem = check(inputs, Options(**{**usual, **options}, return_lse=True))
    device, most = device_of(0), bucket(max(shape.queries))
    if MODULES[kind].why_not(problem, device, most) is not None:
        return False
    output = inputs.query.new_empty(*inputs.query.shape[:2], problem.value_dim)
    lse = torch.empty(inputs.query.shape[:2], device="cuda")
    tensors = Tensors(*inputs[:3], output, lse, *(getattr(inputs, name) for name in Tensors._fields[5:]))
    sizes = Sizes(len(shape.queries), max(shape.queries), max(shape.keys))
    MODULES[kind].prepare(problem, device, most)(tensors, sizes)
    assert_as_exact_as_pytorch(output, lse, call, **bounds(shape), **options)
    return True


def attend_to_fp8() -> int:
    """Decode steps over caches of FP8, which the public function sends to the one kernel that reads them. How many."""
    shape = Shape((1, 1, 3, 0), (300, 5, 65, 17), 8, 2, 128, dtype=BF16)
    calls = (
        (paged(shape, 16, garbage=1 << 30), "each key"),
        (paged(shape, 1), "each head"),
        (packed(shape), "one"),
    )
    for call, scales in calls:
        small, wide = quantized(call, scales)
        out, lse = attention_varlen(**to(small, "cuda"), **bounds(shape), return_lse=True)  # type: ignore[arg-type]
        assert_as_exact_as_ideal(out, lse, call, wide, **bounds(shape))
    return len(calls)


def attend_to_one_token_apart() -> int:
    """Prompts beside sequences of one token, which `split_keys` gives a launch of their own. How many calls."""
    wide = replace(MANY, head_dim=128)
    calls = ((MANY, packed(MANY)), (wide, paged(wide, 16)), (wide, paged(wide, 1)))
    for shape, call in calls:
        options = {**bounds(shape), "split_keys": 128}
        out, lse = attention_varlen(**to(call, "cuda"), **options, return_lse=True)  # type: ignore[arg-type]
        assert_as_exact_as_pytorch(out, lse, call, **options)
    return len(calls)


def main() -> None:
    compile_for_racecheck((mixed_hopper, "kernel"))
    torch.zeros((), device="cuda")
    kinds = [VarlenKernel(name) for name in sys.argv[1:]] or list(VarlenKernel)
    launches = {
        kind.value: sum(attend(kind, call, shape, **options) for shape, call, options in cases())
        for kind in kinds
    }
    if VarlenKernel.DECODE in kinds:
        launches["FP8"] = attend_to_fp8()
        launches["one token apart"] = attend_to_one_token_apart()
    torch.cuda.synchronize()
    assert all(launches.values())
    print("passed; launches:", ", ".join(f"{kind} {count}" for kind, count in launches.items()))


if __name__ == "__main__":
    main()
