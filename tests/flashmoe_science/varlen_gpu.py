"""What GPU tests of `attention_varlen` share: calls, checked against float64 and for equal bits."""

from __future__ import annotations

import random
from typing import Any

import torch
from varlen_cases import Call, Shape, bounds, to
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import attention_varlen

_REPETITIONS = 20


def attend(call: Call, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result = attention_varlen(**call, **options, return_lse=True)  # type: ignore[arg-type]
    assert isinstance(result, tuple)
    return result


def check(call: Call, shape: Shape, **options: Any) -> None:
    """On the CPU's tensors, against float64; and that equal calls give equal bits."""
    given = {**bounds(shape), **options}
    there = to(call, "cuda")
    out, lse = attend(there, **given)
    assert_as_exact_as_pytorch(out, lse, call, **given)
    for _ in range(_REPETITIONS):
        again, lse_again = attend(there, **given)
        assert torch.equal(again, out)
        assert torch.equal(lse_again, lse)


def lengths(count: int, most: int, seed: int = 0) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(0, most) for _ in range(count))
