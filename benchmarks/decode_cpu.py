"""Decoding on the processor beside reading the same keys and values in order.

    python benchmarks/decode_cpu.py [--keys 32768] [--rounds 40] [--threads N] --output FOLDER

One sequence, one query, 8 key/value heads of head dimension 128, on all threads: dense calls, and `attention_varlen`
over pages of 64, each with one and with four query heads for each key/value head. Rounds go over several caches, so
that none is in the processor's own memory. Each calls all ways in random order, reading among them. Writes decode.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from provenance import provenance

from cudadent42.timing.cpu_peaks import measure_reading
from flashmoe_science import attention_varlen, flash_attention

HEADS, HEAD_DIM, PAGE = 8, 128, 64
CACHE_BYTES = 640 << 20
"""Of all caches of a dtype together."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 2e-5}
"""Largest difference from the formula in float32, where values are normal numbers: so the call is the right one."""

Way = Callable[[torch.Tensor], torch.Tensor]
"""A call with a cache, (2, keys, heads, head_dim): keys and values."""


@dataclass(frozen=True)
class Calls:
    ways: dict[str, Way]
    one: torch.Tensor
    """(1, heads, head_dim): a query head for each key/value head."""
    four: torch.Tensor
    """The same with four."""


def calls_of(dtype: torch.dtype, keys: int) -> Calls:
    one, four = (torch.randn(1, HEADS * group, HEAD_DIM).to(dtype) for group in (1, 4))
    table = torch.arange(keys // PAGE, dtype=torch.int32).view(1, -1)
    used, begins = torch.tensor([keys], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)

    def dense(query: torch.Tensor) -> Way:
        def call(cache: torch.Tensor) -> torch.Tensor:
            # The same memory, as (1, heads, keys, head_dim).
            key, value = cache.view(2, 1, HEADS, keys, HEAD_DIM)
            out = flash_attention(query.view(1, -1, 1, HEAD_DIM), key, value)
            assert isinstance(out, torch.Tensor)
            return out

        return call

    def paged(query: torch.Tensor) -> Way:
        def call(cache: torch.Tensor) -> torch.Tensor:
            key, value = cache.view(2, keys // PAGE, PAGE, HEADS, HEAD_DIM)
            out = attention_varlen(
                query, key, value, cu_seqlens_q=begins, max_seqlen_q=1, max_seqlen_k=keys,
                block_table=table, seqused_k=used,
            )  # fmt: skip
            assert isinstance(out, torch.Tensor)
            return out

        return call

    ways = {
        "dense": dense(one),
        "dense, 4 heads a key": dense(four),
        "paged": paged(one),
        "paged, 4 heads a key": paged(four),
    }
    return Calls(ways, one, four)


def check(dtype: str, keys: int) -> None:
    """Raises AssertionError unless every way gives the formula's result."""
    calls = calls_of(DTYPES[dtype], keys)
    cache = torch.randn(2, keys, HEADS, HEAD_DIM).to(DTYPES[dtype])
    for name, call in calls.ways.items():
        query = (calls.four if "4" in name else calls.one).float().transpose(0, 1)
        # (heads, keys, head_dim) in the way's own order.
        key, value = (
            cache.float().view(2, HEADS, keys, HEAD_DIM)
            if name.startswith("dense")
            else cache.float().transpose(1, 2)
        )
        key, value = (each.repeat_interleave(len(query) // HEADS, 0) for each in (key, value))
        weights = (query @ key.transpose(1, 2) * HEAD_DIM**-0.5).softmax(-1)
        difference = float((call(cache).float().flatten() - (weights @ value).flatten()).abs().max())
        assert difference < TOLERANCE[dtype], f"{dtype}, {name}: off by {difference}"


def measure(dtype: str, keys: int, rounds: int) -> dict[str, object]:
    calls = calls_of(DTYPES[dtype], keys).ways
    count = max(2, CACHE_BYTES // (2 * keys * HEADS * HEAD_DIM * DTYPES[dtype].itemsize))
    caches = [torch.randn(2, keys, HEADS, HEAD_DIM).to(DTYPES[dtype]) for _ in range(count)]
    size = caches[0].numel() * caches[0].element_size()
    rates: dict[str, list[float]] = {name: [] for name in (*calls, "reading")}
    for turn in range(rounds + 2):
        first = random.randrange(count)
        for turn_of_way, name in enumerate(random.sample(list(rates), len(rates))):
            # Each way meets a cache that the ways before it in this round did not, and over the rounds all of them:
            # some are read faster than others.
            number = (first + turn_of_way) % count
            if name == "reading":
                rate = measure_reading(caches[number])
            else:
                start = time.perf_counter()
                calls[name](caches[number])
                rate = size / (time.perf_counter() - start) * 1e-9
            if turn >= 2:
                rates[name].append(rate)
    reading = rates["reading"]
    return {
        "cache_bytes": size,
        "caches": len(caches),
        "reading_gbps": {"median": statistics.median(reading), "best": max(reading)},
        "ways": {
            name: {
                "gbps_median": statistics.median(rates[name]),
                "gbps_best": max(rates[name]),
                "share_of_median_reading": statistics.median(rates[name]) / statistics.median(reading),
                "share_of_best_reading": statistics.median(rates[name]) / max(reading),
            }
            for name in calls
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dtype in arguments.dtypes:
        check(dtype, 1024)
    record = {
        **provenance("cpu"),
        "keys": arguments.keys,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "dtypes": {},
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    for dtype in arguments.dtypes:
        measured = measure(dtype, arguments.keys, arguments.rounds)
        record["dtypes"][dtype] = measured
        shares = {name: round(way["share_of_median_reading"], 3) for name, way in measured["ways"].items()}
        print(
            dtype,
            {key: round(value, 1) for key, value in measured["reading_gbps"].items()},
            shares,
            flush=True,
        )
    (arguments.output / "decode.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
