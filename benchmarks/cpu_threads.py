"""Whether hardware threads that share a core, and nodes of memory, do harm: calls on one thread a core and on all.

    python benchmarks/cpu_threads.py [--turns 3] --output FOLDER

Processes take turns. Each is held to some of the processors, works on as many threads, and times every call: the
median of its rounds. What is stated is the least of a way's processes. Where no two processors share a core, or where
all belong to one node, there is nothing to compare, and the file says so. Writes threads.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from torch.nn.functional import scaled_dot_product_attention

from flashmoe_science import flash_attention, fused_moe, topk_routing

SECONDS = 0.4
"""Of one call's rounds in one process."""
_CPUS = Path("/sys/devices/system/cpu")


def processors() -> dict[int, tuple[int, int]]:
    """Node and core (the first of its processors) of each processor that this process may use."""
    topology = {}
    for processor in sorted(os.sched_getaffinity(0)):
        folder = _CPUS / f"cpu{processor}"
        node = next((int(each.name[4:]) for each in folder.glob("node[0-9]*")), 0)
        siblings = (folder / "topology" / "thread_siblings_list").read_text()
        topology[processor] = node, int(siblings.replace("-", ",").split(",")[0])
    return topology


def ways() -> dict[str, list[int]]:
    """Processors of each way of calling."""
    topology = processors()
    first_of_core = {core: processor for processor, (_, core) in reversed(topology.items())}
    chosen = {"all": list(topology)}
    if len(first_of_core) < len(topology):
        chosen["one a core"] = sorted(first_of_core.values())
    nodes = {node for node, _ in topology.values()}
    if len(nodes) > 1:
        chosen["one node"] = [each for each, (node, _) in topology.items() if node == min(nodes)]
    return chosen


def calls() -> dict[str, Callable[[], Any]]:
    q, k, v = (torch.randn(1, 8, 2048, 64).bfloat16() for _ in range(3))
    row, key, value = torch.randn(1, 8, 1, 128), *(torch.randn(1, 8, 32768, 128) for _ in range(2))
    row, key, value = row.bfloat16(), key.bfloat16(), value.bfloat16()
    x, gate = torch.randn(64, 1024).bfloat16(), torch.randn(64, 32)
    w13, w2 = torch.randn(32, 1024, 1024).bfloat16(), torch.randn(32, 1024, 512).bfloat16()
    weights, ids = topk_routing(gate, 4)
    return {
        "attention, 2048 queries": lambda: flash_attention(q, k, v),
        "the same by PyTorch": lambda: scaled_dot_product_attention(q, k, v),
        "decode, 32768 keys": lambda: flash_attention(row, key, value),
        "the same by PyTorch, decode": lambda: scaled_dot_product_attention(row, key, value),
        "experts, 64 tokens": lambda: fused_moe(x, w13, w2, weights, ids),
    }


def measured() -> dict[str, float]:
    """Milliseconds of each call in this process."""
    times = {}
    for name, call in calls().items():
        call()
        rounds, end = [], time.perf_counter() + SECONDS
        while time.perf_counter() < end or len(rounds) < 5:
            start = time.perf_counter()
            call()
            rounds.append((time.perf_counter() - start) * 1e3)
        times[name] = statistics.median(rounds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--processors", help="measure in this process alone, held to these, and print JSON")
    arguments = parser.parse_args()
    if arguments.processors is not None:
        chosen = {int(each) for each in arguments.processors.split(",")}
        os.sched_setaffinity(0, chosen)
        torch.set_num_threads(len(chosen))
        print(json.dumps(measured()))
        return
    turns: list[dict[str, Any]] = []
    compared = ways()
    for turn in range(arguments.turns):
        for way, chosen in list(compared.items())[:: -1 if turn % 2 else 1]:
            done = subprocess.run(
                [sys.executable, __file__, "--processors", ",".join(map(str, chosen))],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            turns.append({"way": way, "ms": json.loads(done.stdout.splitlines()[-1])})
    least = {
        way: {name: min(each["ms"][name] for each in turns if each["way"] == way) for name in turns[0]["ms"]}
        for way in compared
    }
    for way, times in least.items():
        over = ", ".join(f"{name} {ms:.3f} ms ({ms / least['all'][name]:.2f})" for name, ms in times.items())
        print(f"{way}, {len(compared[way])} threads: {over}", flush=True)
    if len(least) == 1:
        print("No two of these processors share a core, and all belong to one node of memory.")
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        record = {
            **provenance("cpu"),
            "processors": processors(),
            "ways": compared,
            "turns": turns,
            "least_ms": least,
        }
        (arguments.output / "threads.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
