"""The estimated time of the small-shape kernel against what was measured, and what follows from it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.configs.attention.small import RowSlices, SmallConfiguration, beside, stream
from flashmoe_science.configs.attention.small_passes import Work, fastest, measured, microseconds
from flashmoe_science.cuda.attention import KernelKind, Problem, select, small
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.jit.nvrtc import compile_kernel
from problems import H200, contiguous

SWEEP = Path(__file__).parents[4] / "benchmarks/results/2026-11-21-h200-small-rows/sweep.json"
NOISE = 1.012


def measurements() -> list[dict[str, Any]]:
    if not SWEEP.exists():
        pytest.skip("the committed measurements are not beside the tests")
    rows: list[dict[str, Any]] = json.loads(SWEEP.read_text(encoding="utf-8"))["shapes"]
    return rows


def problem(shape: list[Any]) -> Problem:
    """Of a row's batch, heads, key/value heads, rows, keys, head dim and mask; contiguous bfloat16."""
    return contiguous(*shape, return_lse=False)


def work(sets: int, keys: int, seen: float = 1.0, multiprocessors: int = 132) -> Work:
    return Work(keys, RowSlices(slices=1, rows=16 * sets), multiprocessors, seen)


def name(choice: Choice) -> str:
    if choice.kernel is not KernelKind.SMALL:
        return choice.kernel.value
    c: SmallConfiguration = choice.configuration
    splits = f"s{c.splits}" if c.splits > 1 else ""
    return f"r{c.rows}w{c.warps}k{c.key_tiles}c{c.cluster}{splits}{' one pass' if c.single_pass else ''}"


def test_no_measured_shape_is_slower_than_before_or_than_pytorch() -> None:
    """Before: what had been chosen when it was measured, where that was timed itself."""
    compared, slower = 0, []
    for row in measurements():
        us, now = row["us"], name(select(problem(row["shape"]), H200))
        if now not in us:
            continue
        compared += 1
        if us[now] > NOISE * us.get(row["chosen"], us[now]) or us[now] > min(us["sdpa"], us["cudnn"]):
            slower.append((row["shape"], now, us[now]))
    assert compared > 350
    assert not slower


def test_the_estimate_is_near_what_was_measured() -> None:
    errors = []
    for row in measurements():
        call, causal = problem(row["shape"]), row["shape"][-1]
        asked = Work(call.seqlen_k, RowSlices(call.num_heads, call.seqlen_q), 132, 0.5 if causal else 1.0)
        for cluster in (1, 2, 5, 6, 8):
            one = stream("sm_90", call.head_dim, call.seqlen_q, cluster)
            if name(Choice(KernelKind.SMALL, one)) in row["us"]:
                errors.append(microseconds(one, asked) / row["us"][name(Choice(KernelKind.SMALL, one))] - 1)
    assert len(errors) > 1000
    assert abs(statistics.median(errors)) < 0.05
    assert statistics.quantiles([abs(each) for each in errors], n=10)[-1] < 0.25


@pytest.mark.parametrize(
    ("sets", "keys", "head_dim", "cluster", "warps"),
    [
        (96, 768, 128, 2, 4),  # 2 heads of 768 rows: 9.8 us; in clusters of 8, in four turns, 18.7
        (48, 768, 128, 4, 4),
        (64, 1024, 128, 2, 4),
        (32, 1024, 128, 6, 4),
        (133, 256, 128, 1, 4),  # one turn of single blocks rather than two of pairs
        (64, 1024, 64, 2, 8),
        (100, 768, 64, 1, 8),
        (192, 512, 64, 2, 4),  # three blocks beside each other
    ],
)
def test_one_turn_of_the_clusters_that_find_room(
    sets: int, keys: int, head_dim: int, cluster: int, warps: int
) -> None:
    taken = fastest("sm_90", head_dim, work(sets, keys))
    assert (taken.cluster, taken.warps) == (cluster, warps)


def test_a_turn_more_and_a_neighbour_cost_time() -> None:
    pair = stream("sm_90", 128, 16, 2)
    alone, beside_each_other, in_two_turns = (microseconds(pair, work(sets, 1024)) for sets in (66, 67, 133))
    assert alone < beside_each_other < in_two_turns
    assert in_two_turns - beside_each_other > 2
    masked = microseconds(pair, work(133, 1024, seen=0.5))
    assert masked < in_two_turns
    assert microseconds(pair, work(67, 1024, multiprocessors=264)) == alone


def test_where_the_figures_hold() -> None:
    assert measured("sm_90", 128, work(96, 768))
    assert not measured("sm_80", 128, work(96, 768))
    assert not measured("sm_90", 128, Work(768, RowSlices(slices=1, rows=8), 132, 1.0))
    assert not measured("sm_90", 128, work(96, 100_000)), "more than L2 holds"


@pytest.mark.usefixtures("nvrtc")
def test_blocks_of_a_multiprocessor_are_those_that_its_registers_hold() -> None:
    kernels = {
        stream("sm_90", 64, 16, 2): 1,
        beside("sm_90", 64, 16)[1]: 3,
        stream("sm_90", 128, 16, 2): 2,
        stream("sm_90", 256, 16, 2): 2,
    }
    for configuration, blocks in kernels.items():
        build = compile_kernel(small.kernel(configuration, torch.bfloat16, "sm_90"))
        assert build.resources is not None
        assert build.resources.blocks_per_sm == blocks
