"""`benchmarks/moe_losses.py` with a toy on the CPU."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    module = importlib.import_module("moe_losses")
    small = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_experts": 4, "vocab_size": 64}
    for name, value in (*small.items(), ("num_experts_per_tok", 2), ("moe_intermediate_size", 32)):
        monkeypatch.setitem(module.SIZES, name, value)
    monkeypatch.setattr(module, "BATCH", 2)
    monkeypatch.setattr(module, "LENGTH", 32)
    return module


def test_all_ways_begin_alike_and_learn(benchmark: ModuleType) -> None:
    steps = 12
    losses = {
        way: benchmark.train(way, 0, steps, "cpu")
        for way in ("float32", "grouped_mm", "loop", "experts", "kernels")
    }
    exact = losses["float32"]
    assert exact[-1] < exact[0]
    for curve in losses.values():
        assert len(curve) == steps
        assert math.isclose(curve[0], exact[0], abs_tol=0.01)
        assert math.isclose(curve[-1], exact[-1], abs_tol=0.05)


def test_a_token_is_followed_by_one_of_a_few(benchmark: ModuleType) -> None:
    followers: dict[int, set[int]] = {}
    for batch in benchmark.language(0, 50):
        for sequence in batch.tolist():
            for token, following in itertools.pairwise(sequence):
                followers.setdefault(token, set()).add(following)
    assert len(followers) > 32
    assert max(map(len, followers.values())) <= benchmark.LIKELY
