"""Kernels in the workers of a DataLoader: on the one thread that PyTorch gives each, with the process's own results."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from varlen_cases import Shape, bounds, paged

from flashmoe_science import attention_varlen, flash_attention, fused_moe

Item = tuple[int, list[torch.Tensor]]


def results(seed: int) -> list[torch.Tensor]:
    """Of calls that take several threads where there are some."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    dense = flash_attention(*(normal(1, 8, 256, 32) for _ in range(3)))
    shape = Shape((1, 1), (3000, 1000))
    decode = attention_varlen(**paged(shape, 16, seed), **bounds(shape))  # type: ignore[arg-type]
    ids = torch.randint(4, (64, 2), generator=generator)
    weights = torch.softmax(normal(64, 2), -1)
    experts = fused_moe(normal(64, 64), normal(4, 128, 64), normal(4, 64, 64), weights, ids)
    assert isinstance(dense, torch.Tensor)
    assert isinstance(decode, torch.Tensor)
    return [dense, decode, experts]


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def started_since(before: set[str]) -> int:
    """Threads that stay, and that Python has not started, as it does a queue's."""
    for _ in range(50):
        new = tasks() - before - {str(thread.native_id) for thread in threading.enumerate()}
        if not new:
            return 0
        time.sleep(0.02)
    return len(new)


class Calls(Dataset[Item]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Item:
        assert torch.get_num_threads() == 1
        before = tasks()
        computed = results(index)
        started = started_since(before)
        return started, computed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_start_no_threads_and_compute_the_same_bits() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # The process's own threads have been used when it forks.
        expected = [results(index) for index in range(4)]
    finally:
        torch.set_num_threads(before)
    loader = DataLoader(Calls(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120)
    for (started, computed), own in zip(loader, expected, strict=True):
        assert started == 0
        for mine, right in zip(computed, own, strict=True):
            assert torch.equal(mine, right)
