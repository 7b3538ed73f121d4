"""Run by tools/sanitize.sh under compute-sanitizer: the kernel that writes rows into a paged cache, on small shapes.

Each result is compared with that of PyTorch's operations on the CPU, so that a kernel that does nothing does not pass.
Prints "passed" when all calls were right; a wrong one raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from flashmoe_science import paged_append
from flashmoe_science.varlen.transform import Rotary

FP8 = torch.float8_e4m3fn
PAGES, PAGE_SIZE, HEADS, KV_HEADS, DIM = 4, 16, 4, 2, 128


def calls() -> Iterator[dict[str, Any]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens in (1, 37):
            for fp8, transforms in ((False, False), (False, True), (True, True)):
                yield call(dtype, tokens, fp8=fp8, transforms=transforms)


def call(dtype: torch.dtype, tokens: int, *, fp8: bool, transforms: bool) -> dict[str, Any]:
    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    shape = (PAGES, PAGE_SIZE, KV_HEADS, DIM)
    slots = torch.randperm(PAGES * PAGE_SIZE)[:tokens]
    slots[::5] = -1
    made: dict[str, Any] = {
        "key": rows(tokens, KV_HEADS, DIM),
        "value": rows(tokens, KV_HEADS, DIM),
        "key_cache": torch.zeros(shape).to(FP8 if fp8 else dtype),
        "value_cache": torch.zeros(shape).to(FP8 if fp8 else dtype),
        "slot_mapping": slots,
    }
    if fp8:
        made |= {"key_scale": torch.zeros(shape[:3]), "value_scale": torch.full((KV_HEADS,), 0.25)}
    if transforms:
        made |= {
            "query": rows(tokens, HEADS, DIM),
            "rotary": Rotary(rows(50, DIM), torch.randint(0, 50, (tokens,)), interleaved=False),
            "query_norm": rows(DIM),
            "key_norm": rows(DIM),
        }
    return made


def on_gpu(value: Any) -> Any:
    if isinstance(value, Rotary):
        return value._replace(cos_sin=value.cos_sin.cuda(), positions=value.positions.cuda())
    return value.cuda()


def assert_alike(ours: torch.Tensor, right: torch.Tensor) -> None:
    """But for a rounding: products are added in another order, and codes of FP8 may then be neighbours."""
    step = 2.0**-3 if right.dtype is FP8 else 4 * torch.finfo(right.dtype).eps
    torch.testing.assert_close(ours.cpu().float(), right.float(), rtol=step, atol=step)


def main() -> None:
    os.environ["FLASHMOE_CUDA_APPEND"] = "fused"
    torch.manual_seed(0)
    launches = 0
    for right in calls():
        ours = {name: on_gpu(value) for name, value in right.items()}
        query, expected = paged_append(**ours), paged_append(**right)
        if expected is not None:
            assert query is not None
            assert_alike(query, expected)
        for name in ("key_cache", "value_cache", "key_scale"):
            if name in right:
                assert_alike(ours[name], right[name])
        launches += 1
    torch.cuda.synchronize()
    print("passed; launches:", launches)


if __name__ == "__main__":
    sys.exit(main())
