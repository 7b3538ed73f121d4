"""GPU time of attention for serving where the lab has no case: one cache read in several ways, beside peers.

    python benchmarks/serving.py --output FOLDER [--only decode,window] [--seconds 1.5]
    python benchmarks/serving.py --only decode --first-calls       # compiles what a part needs, and measures nothing
    python benchmarks/serving.py --output FOLDER --tiny --device cpu    # toys, to try the script

Every way is compared with float64 first. Then graphs of calls are replayed in interleaved blocks of random order.
Caches take turns, so that one call's keys are out of the L2 cache before they come again. FlashAttention-3
(`flash_attn_interface`) and FlashInfer are raced where they are installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance
from serving_arms import (
    Call,
    FlashInfer,
    dense,
    flash_attn_3,
    flash_attn_3_packed,
    ours,
    tokens_of_dense,
)
from serving_batches import Batch, KeysOf, error, keys_of, keys_of_dense, make
from torch import Tensor

from cudadent42.decisions.schedule import block_orders
from cudadent42.decisions.statistics import estimate_ratio
from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.timing.cuda_timers import CudaGraphTimer
from cudadent42.timing.flush import cache_bytes
from cudadent42.timing.timers import ClockTimer

CACHES_OF_L2 = 3
"""Keys and values of all sets take at least so many times the L2 cache."""
FEWEST_SETS, MOST_SETS = 2, 48
MIN_BLOCKS, MAX_BLOCKS = 9, 41
MOST_ERROR = 0.01
"""Root mean square over that of the result, for 16 bits; bfloat16 alone rounds to 0.002."""
REFUSALS = (
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    subprocess.CalledProcessError,
)
"""Of a peer that is not there, does not take a call or does not compile."""


@dataclass(frozen=True)
class Scale:
    """Sizes of a run."""

    device: str = "cuda"
    k: int = 1024
    most: int = 64
    """Of equal sequences."""

    def batches(self, queries: tuple[int, ...], keys: tuple[int, ...], *shape: int, **more: Any) -> Any:
        """Of a seed, a batch of such sequences; shape: query heads, key heads, head dim."""
        return lambda seed: make(queries, keys, *shape, seed=seed, device=self.device, **more)

    def cell(self, batch: int, thousands: int) -> tuple[int, int]:
        return min(batch, self.most), thousands * self.k

    def title(self, batch: int, length: int) -> str:
        return f"{batch}x{length // self.k}k" if length >= self.k else f"{batch}x{length}"


@dataclass(frozen=True)
class Arm:
    """One way to compute a batch."""

    prepare: Callable[[Batch], Call]
    keys: Callable[[Batch], KeysOf]
    arrange: Callable[[Tensor], Tensor] = lambda output: output
    """The output as (tokens, heads, dim)."""
    most_error: float = MOST_ERROR
    wide: bool = False
    """Reads a cache of FP8 in the query's dtype, which is made ahead."""


@dataclass(frozen=True)
class Race:
    name: str
    make: Callable[[int], Batch]
    """Of a seed."""
    arms: dict[str, Arm]
    pairs: tuple[tuple[str, str], ...]
    """Ratios to state: time of the first over time of the second."""
    options: dict[str, Any] = field(default_factory=dict)
    """For `serving_batches.error`."""


def paged(page: int, **options: Any) -> Arm:
    return Arm(lambda batch: ours(batch, page, **options), lambda batch: keys_of(batch, page))


def fa3(page: int, **options: Any) -> Arm:
    return Arm(
        lambda batch: flash_attn_3(batch, page, **options),
        lambda batch: keys_of(batch, page),
        lambda output: output.view(-1, *output.shape[-2:]),
    )


def of_dense(*, causal: bool = True, heads_first: bool = True) -> Arm:
    return Arm(
        lambda batch: dense(batch, causal=causal, heads_first=heads_first),
        keys_of_dense if heads_first else lambda batch: keys_of(batch, 0),
        tokens_of_dense,
    )


def decode(scale: Scale) -> Iterator[Race]:
    """Pages against dense tensors and against peers."""
    flashinfer = FlashInfer(scale.device)
    for batch, length in (scale.cell(*each) for each in itertools.product((1, 8, 64), (1, 8, 32))):
        arms = {
            "dense": of_dense(),
            "pages of 64": paged(64),
            "pages of 16": paged(16),
            "pages of 1": paged(1),
            "fa3": fa3(64),
            "fa3 planned": fa3(64, planned=True),
            "flashinfer": Arm(lambda batch: flashinfer(batch, 64), lambda batch: keys_of(batch, 64)),
        }
        over_dense = tuple((f"pages of {page}", "dense") for page in (64, 16, 1))
        peers = tuple((name, "pages of 64") for name in ("fa3", "fa3 planned", "flashinfer"))
        made = scale.batches((1,) * batch, (length,) * batch, 32, 8, 128, pages=(64, 16, 1))
        yield Race(scale.title(batch, length), made, arms, over_dense + peers)


def ragged(scale: Scale) -> Iterator[Race]:
    flashinfer = FlashInfer(scale.device)
    case = VarlenCase("ragged", "bf16", scale.most, 32, 8, 64 * scale.k, 200, 128)
    arms = {
        "pages of 64": paged(64),
        "pages of 16": paged(16),
        "fa3": fa3(64),
        "fa3 planned": fa3(64, planned=True),
        "flashinfer": Arm(lambda batch: flashinfer(batch, 64), lambda batch: keys_of(batch, 64)),
    }
    made = scale.batches((1,) * scale.most, case.seqlens_k, 32, 8, 128, pages=(64, 16))
    peers = tuple((name, "pages of 64") for name in arms if name != "pages of 64")
    yield Race("64 sequences of 200 to 64k (Zipf)", made, arms, peers)


def window(scale: Scale) -> Iterator[Race]:
    sinks = torch.linspace(-1, 1, 64, device=scale.device).bfloat16()
    cells = ((1, 8), (1, 32), (1, 128), (8, 8), (64, 8))
    for batch, length in ((1, 128), *(scale.cell(*each) for each in cells)):
        arms = {
            "pages of 64": paged(64, window=(127, -1), sinks=sinks.float()),
            "fa3": fa3(64, window=127, sinks=sinks),
            "fa3 planned": fa3(64, window=127, sinks=sinks, planned=True),
        }
        made = scale.batches((1,) * batch, (length,) * batch, 64, 8, 64, pages=(64,))
        peers = (("fa3", "pages of 64"), ("fa3 planned", "pages of 64"))
        yield Race(scale.title(batch, length), made, arms, peers, {"window": 127, "sinks": sinks.float()})


def split(scale: Scale) -> Iterator[Race]:
    sizes = (256, 512, 1024, 2048, 4096)
    for batch, length in (
        scale.cell(*each) for each in ((1, 8), (1, 32), (8, 8), (8, 32), (64, 8), (64, 32))
    ):
        arms = {"free": paged(64)} | {f"split_keys={size}": paged(64, split_keys=size) for size in sizes}
        pairs = tuple((f"split_keys={size}", "free") for size in sizes)
        yield Race(
            scale.title(batch, length),
            scale.batches((1,) * batch, (length,) * batch, 32, 8, 128, pages=(64,)),
            arms,
            pairs,
        )


def queries(scale: Scale) -> Iterator[Race]:
    """The first queries of a batch with eight: as many keys in every arm."""

    def with_queries(count: int, arm: Callable[[Batch], Call]) -> Callable[[Batch], Call]:
        return lambda batch: arm(first_queries(batch, count))

    for batch, length in (scale.cell(*each) for each in ((1, 8), (8, 8), (64, 8))):
        for peer in (False, True):
            prefix = "fa3, " if peer else ""
            arms = {
                f"{prefix}{count}": Arm(
                    with_queries(
                        count,
                        (lambda each: flash_attn_3(each, 64)) if peer else (lambda each: ours(each, 64)),
                    ),
                    lambda batch: keys_of(batch, 64),
                )
                for count in (1, 2, 4, 8)
            }
            pairs = tuple((f"{prefix}{count}", f"{prefix}1") for count in (2, 4, 8))
            made = scale.batches((8,) * batch, (length,) * batch, 32, 8, 128, pages=(64,))
            yield Race(
                f"{scale.title(batch, length)}{', fa3' if peer else ''}",
                made,
                arms,
                pairs,
                {"queries": (1, 2, 4, 8)},
            )


def first_queries(batch: Batch, count: int) -> Batch:
    """The last so many queries of each sequence."""
    each = batch.queries[0]
    query = batch.query.view(len(batch.keys), each, batch.heads, batch.dim)[:, each - count :].flatten(0, 1)
    starts = torch.arange(0, len(batch.keys) * count + 1, count, dtype=torch.int32, device=query.device)
    return Batch(
        (count,) * len(batch.keys),
        batch.keys,
        query.contiguous(),
        batch.key,
        batch.value,
        starts,
        batch.starts_k,
        batch.lengths,
        batch.tables,
    )


def prefill(scale: Scale) -> Iterator[Race]:
    shapes = (
        (4, 4 * scale.k, 32, 8, True),
        (1, 16 * scale.k, 16, 16, True),
        (1, 16 * scale.k, 32, 8, True),
        (8, 2 * scale.k, 16, 16, False),
        (8, 2 * scale.k, 32, 8, True),
        (32, scale.k // 2, 16, 16, True),
    )
    for batch, length, heads, kv_heads, causal in shapes:
        batch = min(batch, scale.most)
        arms = {
            "dense": of_dense(causal=causal),
            "dense, a token's heads together": of_dense(causal=causal, heads_first=False),
            "packed": paged(0, causal=causal),
            "pages of 64": paged(64, causal=causal),
            "pages of 16": paged(16, causal=causal),
            "pages of 8": paged(8, causal=causal),
            "pages of 1": paged(1, causal=causal),
            "fa3": Arm(
                lambda batch, causal=causal: flash_attn_3_packed(batch, causal=causal),  # type: ignore[misc]
                lambda batch: keys_of(batch, 0),
            ),
        }
        pairs = (
            *(("dense", name) for name in arms if not name.startswith(("dense", "fa3"))),
            ("dense, a token's heads together", "packed"),
            ("fa3", "packed"),
        )
        made = scale.batches((length,) * batch, (length,) * batch, heads, kv_heads, 128, pages=(64, 16, 8, 1))
        name = f"{scale.title(batch, length)} {heads}/{kv_heads}{'' if causal else ' full'}"
        yield Race(name, made, arms, pairs, {"causal": causal})


def chunk(scale: Scale) -> Iterator[Race]:
    """A chunk of 2k and 128 decodes of 2k: one launch, two launches, and FlashAttention-3's one."""
    decodes = 2 * scale.most
    counts, keys = (2 * scale.k, *(1,) * decodes), (2 * scale.k,) * (decodes + 1)
    for page in (64, 16):
        arms = {
            "one launch": Arm(
                lambda batch, page=page: into_one(batch, page),  # type: ignore[misc]
                lambda batch, page=page: keys_of(batch, page),  # type: ignore[misc]
            ),
            "two launches": Arm(
                lambda batch, page=page: in_two(batch, page),  # type: ignore[misc]
                lambda batch, page=page: keys_of(batch, page),  # type: ignore[misc]
            ),
            "fa3": fa3(page),
        }
        pairs = (("two launches", "one launch"), ("fa3", "one launch"))
        yield Race(
            f"2k + {decodes} decodes of 2k, pages of {page}",
            scale.batches(counts, keys, 32, 8, 128, pages=(page,)),
            arms,
            pairs,
        )


def into_one(batch: Batch, page: int) -> Call:
    return ours(batch, page, out=torch.empty_like(batch.query))


def in_two(batch: Batch, page: int) -> Call:
    """The prompt's chunk, then the decodes, into one output."""
    out = torch.empty_like(batch.query)
    rows = batch.queries[0]
    parts = []
    for some, sequences in ((slice(0, rows), slice(0, 1)), (slice(rows, None), slice(1, None))):
        counts = batch.queries[sequences]
        starts = np.cumsum([0, *counts])
        part = Batch(
            counts,
            batch.keys[sequences],
            batch.query[some],
            batch.key,
            batch.value,
            torch.tensor(starts, dtype=torch.int32, device=out.device),
            batch.starts_k,
            batch.lengths[sequences],
            {page: batch.tables[page][sequences]},
        )
        parts.append(ours(part, page, out=out[some]))

    def call() -> Tensor:
        for part in parts:
            part()
        return out

    return call


def fp8(scale: Scale) -> Iterator[Race]:
    loose = 0.1  # FlashAttention-3's queries are in FP8 as well
    for batch, length in (scale.cell(*each) for each in ((1, 8), (1, 32), (8, 8), (8, 32), (64, 8))):
        arms = {
            "16 bits": Arm(lambda batch: ours(batch, 64), lambda batch: keys_of(batch, 64), wide=True),
            "fp8": paged(64),
            "fa3, queries in fp8": Arm(
                fa3(64).prepare, lambda batch: keys_of(batch, 64), fa3(64).arrange, most_error=loose
            ),
            "fa3, making them so": Arm(
                fa3(64, quantise=True).prepare,
                lambda batch: keys_of(batch, 64),
                fa3(64).arrange,
                most_error=loose,
            ),
        }
        pairs = tuple((name, "fp8") for name in arms if name != "fp8")
        made = scale.batches((1,) * batch, (length,) * batch, 32, 8, 128, pages=(64,), fp8=True)
        yield Race(scale.title(batch, length), made, arms, pairs)


PARTS: dict[str, Callable[[Scale], Iterator[Race]]] = {
    part.__name__: part for part in (decode, ragged, window, split, queries, prefill, chunk, fp8)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help="Parts, by commas.")
    parser.add_argument("--seconds", type=float, default=1.5, help="For the blocks of one race.")
    parser.add_argument("--limit", type=float, default=3600.0, help="Seconds after which no race begins.")
    parser.add_argument(
        "--first-calls", action="store_true", help="Make every call once, on one set; measure nothing."
    )
    parser.add_argument(
        "--share", default="0/1", help="i/n: the races whose number leaves i when divided by n."
    )
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="Toys in place of the sizes.")
    chosen = parser.parse_args()
    scale = Scale(chosen.device, 64, 2) if chosen.tiny else Scale(chosen.device)
    share, shares = map(int, chosen.share.split("/"))
    began = time.monotonic()
    document: dict[str, Any] = {"tiny": chosen.tiny, "races": []}
    if not chosen.first_calls:
        document = provenance(scale.device) | document
    races = ((part, race) for part in chosen.only.split(",") for race in PARTS[part](scale))
    for number, (part, race) in enumerate(races):
        if number % shares != share:
            continue
        if time.monotonic() - began > chosen.limit:
            print(f"{part} {race.name}: not begun, after {chosen.limit:.0f} s", flush=True)
            continue
        if chosen.first_calls:
            first_calls(race)
            continue
        row = {"part": part, **run(race, scale.device, chosen.seconds)}
        document["races"].append(row)
        print(line(row), flush=True)
        if chosen.output is not None:
            chosen.output.mkdir(parents=True, exist_ok=True)
            text = json.dumps(document, indent=1) + "\n"
            (chosen.output / "serving.json").write_text(text, encoding="utf-8")


def first_calls(race: Race) -> None:
    batch = race.make(0)
    for name, arm in race.arms.items():
        try:
            arm.prepare(batch.wide() if arm.wide else batch)()
        except REFUSALS as failure:
            print(f"{race.name}: {name}: {type(failure).__name__}: {failure}"[:300], flush=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(race: Race, device: str, seconds: float) -> dict[str, Any]:
    """The row of a race."""
    first = race.make(0)
    on_gpu = device == "cuda"
    wanted = -(-CACHES_OF_L2 * cache_bytes(device) // first.bytes_of_keys) if on_gpu else FEWEST_SETS
    count = min(MOST_SETS, max(FEWEST_SETS, wanted))
    sets = [first, *(race.make(seed) for seed in range(1, count))]
    timer = CudaGraphTimer(device, None) if on_gpu else ClockTimer(None)
    readers, errors, refused = {}, {}, {}
    for name, arm in race.arms.items():
        try:
            own = [batch.wide() if arm.wide else batch for batch in sets]
            calls = [arm.prepare(batch) for batch in own]
            errors[name] = checked(race, arm, first, calls[0]())
            if not errors[name] <= arm.most_error:  # NaN, too
                refused[name] = f"its error is {errors[name]:.3g}; expected at most {arm.most_error}"
                continue
            readers[name] = timer.calibrate(calls)
        except REFUSALS as failure:
            refused[name] = f"{type(failure).__name__}: {failure}"[:400]
    blocks: list[dict[str, float]] = []
    began = time.monotonic()
    for order in block_orders(list(readers), MAX_BLOCKS, 0, race.name):
        if len(blocks) >= MIN_BLOCKS and time.monotonic() - began > seconds:
            break
        blocks.append({name: readers[name]().latency_ms * 1e3 for name in order})
    for name in list(readers):  # what replays left is right as well
        last = readers[name]()
        after = checked(race, race.arms[name], sets[last.input_set], last.output)
        errors[name] = max(errors[name], after)
        if not after <= race.arms[name].most_error:
            refused[name] = f"after its replays its error is {after:.3g}"
            del readers[name]
    times = {name: float(np.median([block[name] for block in blocks])) for name in readers}
    if on_gpu:
        torch.cuda.empty_cache()
    return {
        "race": race.name,
        "bytes_of_keys_and_values": first.bytes_of_keys,
        "sets": len(sets),
        "blocks": len(blocks),
        "us": times,
        "ratios": [over(blocks, *pair) for pair in race.pairs if set(pair) <= set(readers)],
        "errors": errors,
        "refused": refused,
        "blocks_us": blocks,
    }


def checked(race: Race, arm: Arm, batch: Batch, output: Tensor) -> float:
    options = dict(race.options)
    output = arm.arrange(output)
    if options.pop("queries", None):  # of an arm with fewer of them
        batch = first_queries(batch, output.shape[:-2].numel() // len(batch.keys))
    return error(batch, output.reshape(-1, batch.heads, batch.dim), arm.keys(batch), **options)


def over(blocks: list[dict[str, float]], one: str, other: str) -> dict[str, Any]:
    """Time of one over time of the other."""
    estimate = estimate_ratio(*(np.array([block[name] for block in blocks]) for name in (one, other)), 0)
    low, high = estimate.interval()
    return {"time_of": one, "over": other, "ratio": estimate.ratio, "ci_low": low, "ci_high": high}


def line(row: dict[str, Any]) -> str:
    rate = row["bytes_of_keys_and_values"]
    times = ", ".join(
        f"{name} {us:.1f}" + (f" ({rate / us / 1e6:.2f} TB/s)" if row["part"] in ("decode", "ragged") else "")
        for name, us in row["us"].items()
    )
    ratios = "; ".join(
        f"{each['time_of']} / {each['over']} {each['ratio']:.3f} ({each['ci_low']:.3f} to {each['ci_high']:.3f})"
        for each in row["ratios"]
    )
    refused = "".join(f" | {name} left out: {why}" for name, why in row["refused"].items())
    return f"{row['part']} {row['race']}: {times} us | {ratios}{refused}"


if __name__ == "__main__":
    main()
