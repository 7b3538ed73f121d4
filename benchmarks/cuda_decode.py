"""Decode in many configurations of the small-shape kernel, on the GPU at hand.

    python benchmarks/cuda_decode.py --output decode.json [--product | --splits | --rows]

One query per sequence, grouped heads, long keys. GPU time of one call in a replayed graph of equal calls (microseconds,
medians of interleaved rounds), each configuration checked against float64 before; PyTorch's choice and ours beside it,
or only these two. With --splits keys are split over the grid; with --rows both ways are raced for
calls with more rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from cuda_small import Call, Shape, expected, name, own, race, sdpa, square
from provenance import provenance

from flashmoe_science.configs.attention.small import (
    KEY_TILE,
    MOST_ARRIVALS,
    SPLIT_CLUSTERS,
    SmallConfiguration,
    stream,
)
from flashmoe_science.cuda.attention import KernelKind, explain, small
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.errors import BuildError, DeviceError
from flashmoe_science.jit.nvrtc import compile_kernel

SHAPES = [
    *[Shape(batch, 32, 8, 1, 32768, 128) for batch in (1, 2, 3, 4, 5, 8, 16)],
    *[Shape(batch, 32, 8, 1, 4096, 128) for batch in (1, 4, 8, 32)],
    *[Shape(batch, 8, 8, 1, 16384, 64) for batch in (1, 4, 8)],
    Shape(4, 64, 8, 1, 8192, 128),
]
SPLITS = ((8, 1), (4, 2), (4, 1), (8, 2))
"""Warps and key tiles of a block."""
CLUSTERS = (1, 2, 3, 4, 5, 6, 8, 16)
SPLIT_SHAPES = [
    *[Shape(1, 32, 8, 1, keys, 128) for keys in (2048, 4096, 8192, 32768, 131072)],
    *[Shape(2, 32, 8, 1, keys, 128) for keys in (2048, 8192, 32768)],
    Shape(3, 32, 8, 1, 32768, 128),
    *[Shape(4, 32, 8, 1, keys, 128) for keys in (2048, 8192, 32768)],
    *[Shape(batch, 32, 8, 1, 32768, 128) for batch in (5, 6, 8, 11)],
    Shape(8, 32, 8, 1, 8192, 128),
    *[Shape(1, 8, 1, 1, keys, 128) for keys in (2048, 8192, 32768, 131072)],
    *[Shape(batch, 8, 1, 1, 32768, 128) for batch in (2, 4, 8)],
    *[Shape(1, 16, 16, 1, keys, 128) for keys in (2048, 8192, 32768)],
    *[Shape(1, 32, 8, 1, keys, 64) for keys in (2048, 8192, 32768, 131072)],
    *[Shape(1, 8, 8, 1, keys, 64) for keys in (600, 1200, 2400, 16384)],
    *[Shape(batch, 8, 8, 1, 16384, 64) for batch in (2, 4)],
    Shape(1, 8, 1, 1, 32768, 64),
    Shape(1, 64, 8, 2, 8192, 128),
    Shape(1, 32, 8, 1, 8192, 256),
]
ROW_SHAPES = [
    *[square(1, 1, keys, 128) for keys in (768, 1024)],
    *[square(1, 1, keys, 256) for keys in (384, 512)],
    *[square(1, 2, 768, head_dim) for head_dim in (64, 128)],
    square(1, 2, 384, 256),
    *[Shape(1, 32, 8, rows, keys, 128, True) for rows in (4, 8, 16, 32) for keys in (1024, 4096, 16384)],
    *[Shape(4, 32, 8, rows, keys, 128, True) for rows in (2, 4, 8) for keys in (1024, 4096, 16384)],
    *[Shape(8, 32, 8, rows, 4096, 128, True) for rows in (4, 8)],
    *[Shape(1, 8, 8, rows, 4096, 64, True) for rows in (8, 16, 32)],
]
SPLIT_BLOCKS = (
    (8, 1, 1),
    (8, 2, 1),
    (4, 1, 1),
    (4, 2, 1),
    (8, 1, 2),
    (8, 2, 2),
    (4, 1, 2),
    (4, 2, 2),
    (8, 1, 4),
)
"""Warps, key tiles and cluster."""
GRIDS = (66, 120, 132, 264)
"""Blocks that a grid may have."""


def configurations(shape: Shape) -> list[SmallConfiguration]:
    candidates = [
        SmallConfiguration(shape.head_dim, True, 1, warps, tiles, cluster, dependent=True)
        for warps, tiles in SPLITS
        for cluster in CLUSTERS
    ]
    blocks = shape.batch * shape.kv_heads
    enough = [one for one in candidates if 32 <= blocks * one.cluster <= 1056 or one.cluster == 1]
    return [one for one in enough if one.warps * one.cluster * KEY_TILE <= shape.seqlen_k]


def for_rows(shape: Shape) -> list[SmallConfiguration]:
    """Clusters and splits in the shape of block that so many rows take."""
    rows = shape.seqlen_q * shape.heads // shape.kv_heads
    candidates = []
    for cluster in CLUSTERS:
        one = stream("sm_90", shape.head_dim, rows, cluster)
        if cluster * one.warps * KEY_TILE > shape.seqlen_k:
            continue
        candidates.append(one)
        if cluster not in SPLIT_CLUSTERS:
            continue
        sets = -(-rows // one.rows) * shape.batch * shape.kv_heads
        most = shape.seqlen_k // (cluster * one.warps * KEY_TILE)
        for blocks in GRIDS:
            count = min(blocks // (sets * cluster), most)
            split = dataclasses.replace(one, splits=count)
            if count >= 2 and small.arrival_counters(shape.problem(), split) <= MOST_ARRIVALS:
                candidates.append(split)
    return list(dict.fromkeys(candidates))


def splits(shape: Shape) -> list[SmallConfiguration]:
    """As many splits as the grids have room for."""
    row_tiles = -(-shape.seqlen_q * shape.heads // shape.kv_heads // 8)
    candidates = []
    for (warps, tiles, cluster), blocks in itertools.product(SPLIT_BLOCKS, GRIDS):
        sets, most = shape.batch * shape.kv_heads, shape.seqlen_k // (cluster * warps * KEY_TILE)
        count = min(blocks // (sets * cluster), most)
        one = SmallConfiguration(shape.head_dim, True, row_tiles, warps, tiles, cluster, dependent=True)
        one = dataclasses.replace(one, splits=count)
        if (
            count >= 2
            and (cluster < 4 or sets <= 4)
            and small.arrival_counters(shape.problem(), one) <= MOST_ARRIVALS
        ):
            candidates.append(one)
    return list(dict.fromkeys(candidates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--product", action="store_true", help="No configurations, only what users get.")
    parser.add_argument("--splits", action="store_true", help="Keys split over the grid instead of clusters.")
    parser.add_argument("--rows", action="store_true", help="Both, for calls with more rows.")
    chosen = parser.parse_args()
    make_context_current(0)
    if chosen.splits or chosen.rows:
        shapes, candidates_of = (SPLIT_SHAPES, splits) if chosen.splits else (ROW_SHAPES, for_rows)
    else:
        shapes, candidates_of = SHAPES, configurations
    asked = {shape: [] if chosen.product else candidates_of(shape) for shape in shapes}
    every = {
        dataclasses.replace(one, splits=min(2, one.splits)): None
        for wanted in asked.values()
        for one in wanted
    }
    with ThreadPoolExecutor() as pool:
        built = dict(zip(every, pool.map(builds, every), strict=True))
    rows = []
    for shape, wanted in asked.items():
        candidates = [one for one in wanted if built[dataclasses.replace(one, splits=min(2, one.splits))]]
        rows.append(row(shape, candidates, chosen.rounds))
        best = sorted(rows[-1]["us"].items(), key=lambda item: item[1])
        print(shape, {label: round(us, 2) for label, us in best}, flush=True)
    document = {**provenance("cuda"), "shapes": rows}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def builds(configuration: SmallConfiguration) -> bool:
    try:
        compile_kernel(small.kernel(configuration, torch.bfloat16, "sm_90"))
    except BuildError as error:
        print("left out:", name(configuration), str(error).splitlines()[0])
        return False
    return True


def row(shape: Shape, candidates: list[SmallConfiguration], rounds: int) -> dict[str, object]:
    tensors = shape.tensors()
    q, k, v = tensors
    calls: dict[str, Call] = {"ours": own(shape, tensors), "sdpa": sdpa(shape, tensors)}
    calls |= {name(one): own(shape, tensors, Choice(KernelKind.SMALL, one)) for one in candidates}
    exact, wrong = expected(shape, tensors), []
    for label, call in list(calls.items()):
        try:
            error = float((call().double() - exact).abs().max())
        except (BuildError, DeviceError) as problem:
            error = float("inf")
            print("refused:", label, problem)
        if not error < 0.01:
            wrong.append(label)
            del calls[label]
    del exact
    times = race(calls, rounds)
    return {
        "shape": dataclasses.asdict(shape),
        "choice": str(explain(q, k, v)),
        "us": times,
        "wrong": wrong,
    }


if __name__ == "__main__":
    main()
