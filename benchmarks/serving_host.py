"""Host time of a decode step's call of `attention_varlen`, eager, made in Python and by the function of C, by turns.

    python benchmarks/serving_host.py --output FOLDER [--turns 3]

Processes take turns, each with one value of FLASHMOE_REPEATED_CALLS. What is stated is the least of many short rounds
of a process, few enough calls each not to fill the launch queue. FlashAttention-3 and PyTorch's SDPA stand beside, and
the parts that no way of making the call can do without: the driver's launch, the allocation, the check of tensors.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from serving_arms import Call, flash_attn_3, ours
from serving_batches import make
from torch.nn.functional import scaled_dot_product_attention

from flashmoe_science.cuda.driver import library
from flashmoe_science.cuda.steady import OVERRIDE_VARIABLE
from flashmoe_science.varlen.arguments import Inputs
from flashmoe_science.varlen.launch import of_thread

WAYS = ("python", "native")
ROUNDS, CALLS = 60, 100
PAGE = 16


def per_call(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds: the least and the median of rounds."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {"least": min(rounds), "median": statistics.median(rounds)}


def measured() -> dict[str, dict[str, float]]:
    """Of this process."""
    batch = make((1,) * 8, (256,) * 8, 32, 8, 128, seed=0, pages=(PAGE,))
    plain, into = ours(batch, PAGE), ours(batch, PAGE, out=torch.empty_like(batch.query))
    calls: dict[str, Callable[[], Any]] = {
        "attention_varlen": plain,
        "attention_varlen, without functools.partial": direct(plain),
        "attention_varlen, out=": into,
        "attention_varlen, with and without out=, in turn, both": lambda: (plain(), into()),
        "attention_varlen, a bound that grows every 32 calls": growing(plain),
        "PyTorch's SDPA": sdpa(),
        "nothing": lambda: None,
    }
    try:
        calls["FlashAttention-3"] = flash_attn_3(batch, PAGE)
    except ImportError as failure:
        print(f"FlashAttention-3 left out: {failure}", file=sys.stderr)
    with torch.no_grad():
        times = {name: per_call(call) for name, call in calls.items()}
        return times | {name: per_call(part) for name, part in parts(into).items()}


def direct(call: Call) -> Callable[[], Any]:
    """The same call as a model writes it. A partial one merges dictionaries first."""
    assert isinstance(call, partial)
    attend, (query, key, value), given = call.func, call.args, call.keywords
    starts, table, lengths = (given[name] for name in ("cu_seqlens_q", "block_table", "seqused_k"))
    queries, keys = given["max_seqlen_q"], given["max_seqlen_k"]
    return lambda: attend(
        query,
        key,
        value,
        cu_seqlens_q=starts,
        max_seqlen_q=queries,
        max_seqlen_k=keys,
        block_table=table,
        seqused_k=lengths,
    )


def parts(call: Call) -> dict[str, Callable[[], Any]]:
    """Of a call with ``out``, as the thread knows it: its launch goes to the tensors that it was last made for."""
    assert isinstance(call, partial)
    call()
    given = dict(zip(Inputs._fields, call.args, strict=False)) | call.keywords
    inputs = tuple(given.get(name) for name in Inputs._fields)
    made = next(each for each in of_thread.recent.values() if each.given(inputs)[3] is given["out"])
    tensors, version = made.given(inputs), ctypes.byref(ctypes.c_int())
    of_driver = library().cuDriverGetVersion
    steps: dict[str, Callable[[], Any]] = {
        "part: the check": lambda: made.matches(*tensors),
        "part: the allocation": lambda: made.allocate(*made.output),
        "part: a function of the driver that does nothing, by ctypes": lambda: of_driver(version),
    }
    if made.steady is not None:
        launcher = made.steady.target.launcher
        steps["part: the launch, by ctypes"] = launcher.again
        alone = launcher.twin(dependent=False)
        ctypes.memmove(alone.buffer, launcher.buffer, len(launcher.buffer))
        alone.config.stream = launcher.config.stream
        steps["part: the launch of a kernel that waits for the one before"] = alone.again
    return steps


def growing(call: Call) -> Callable[[], Any]:
    """As layers of steps do: one step has 32 calls, and the next one key more."""
    assert isinstance(call, partial)
    count, longest = 0, call.keywords["max_seqlen_k"]

    def next_call() -> Any:
        nonlocal count
        count += 1
        return call(max_seqlen_k=longest + count // 32)

    return next_call


def sdpa() -> Callable[[], Any]:
    query = torch.randn(8, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(8, 8, 256, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return partial(scaled_dot_product_attention, query, key, value, enable_gqa=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="Measure in this process alone, and print JSON.")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measured()))
        return
    turns: list[dict[str, Any]] = []
    for turn in range(chosen.turns):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            done = subprocess.run(
                [sys.executable, __file__, "--one"],
                env=os.environ | {OVERRIDE_VARIABLE: way},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            turns.append({"way": way, "us": json.loads(done.stdout.splitlines()[-1])})
            times = ", ".join(f"{name} {us['least']:.2f}" for name, us in turns[-1]["us"].items())
            print(f"{way}: {times} us", flush=True)
    if chosen.output is not None:
        chosen.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**provenance("cuda"), "page_size": PAGE, "turns": turns}, indent=1) + "\n"
        (chosen.output / "host.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
