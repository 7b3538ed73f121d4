"""The backward pass on streams of unequal priority, in a process that can be ended."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

_TWO_PRIORITIES = """
import itertools, torch
from flashmoe_science import flash_attention

leaves = [torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
gradient = torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16)
streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1, -2)]
for options in ({}, {"causal": True}, {"causal": True, "window": (300, 0)}):
    output = flash_attention(*leaves, **options)
    expected = torch.autograd.grad(output, leaves, gradient, retain_graph=True)
    results = []
    torch.cuda.synchronize()
    for round, stream in itertools.product(range(40), streams):
        with torch.cuda.stream(stream):
            own = flash_attention(*leaves, **options)
            results.append(torch.autograd.grad(own, leaves, gradient))
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(*both) for both in zip(result, expected))
print("the same bits")
"""


def test_streams_of_unequal_priority() -> None:
    """Grids take multiprocessors from each other there: blocks that waited for others would wait for ever. A process of
    its own can be ended."""
    program = [sys.executable, "-c", _TWO_PRIORITIES]
    ended = subprocess.run(program, timeout=120, stdout=subprocess.PIPE, text=True, check=True)
    assert ended.stdout == "the same bits\n"
