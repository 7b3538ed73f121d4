"""Host time of tiny calls on CPU tensors, of several versions of this repository by turns.

Usage: python benchmarks/cpu_host.py NAME=CHECKOUT [NAME=CHECKOUT …] [--rounds 5] [--output FOLDER/host.json]

A call's problem is so small that what is measured is the way to the kernel. Each round starts a process for each
version, one after another, which takes the least and the median of its batches of calls; of the rounds the least and
the median are kept. What a version does not have is left out.
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

CALLS, BATCHES, WARM_UP = 1000, 30, 2000
_THREADS = 2


def per_call(call: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds per call: the least and the median of the batches."""
    for _ in range(WARM_UP):
        call()
    taken = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        taken.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(taken), statistics.median(taken)


def calls(ours: Any) -> dict[str, Callable[[], Any]]:
    """Of the package of one version, by what they are."""
    torch.manual_seed(0)
    one = [torch.randn(1, 1, 1, 8) for _ in range(3)]
    other = [torch.randn(1, 1, 2, 8) for _ in range(3)]
    tiny = [torch.randn(1, 1, 32, 64).bfloat16() for _ in range(3)]

    def in_turn() -> None:
        ours.flash_attention(*one)
        ours.flash_attention(*other)

    made: dict[str, Callable[[], Any]] = {
        "flash_attention, one query and key": lambda: ours.flash_attention(*one),
        "the same with its log-sum-exp": lambda: ours.flash_attention(*one, return_lse=True),
        "flash_attention, two shapes in turn, both": in_turn,
        "flash_attention, bf16, 32 queries and keys": lambda: ours.flash_attention(*tiny),
    }
    if hasattr(ours, "fused_moe"):
        layer = (torch.randn(1, 16), torch.randn(2, 32, 16), torch.randn(2, 16, 16))
        routing = (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
        logits = torch.randn(1, 8)
        made["fused_moe, one token"] = lambda: ours.fused_moe(*layer, *routing)
        made["topk_routing, one token"] = lambda: ours.topk_routing(logits, 2)
    if hasattr(ours, "attention_varlen"):
        query, out = torch.randn(1, 1, 64), torch.empty(1, 1, 64)
        key, value = (torch.randn(2, 16, 1, 64) for _ in range(2))
        paged: dict[str, Any] = {
            "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
            "block_table": torch.tensor([[1]], dtype=torch.int32),
            "seqused_k": torch.tensor([8], dtype=torch.int32),
            "max_seqlen_q": 1,
            "max_seqlen_k": 16,
        }
        made["attention_varlen, one token, paged"] = lambda: ours.attention_varlen(query, key, value, **paged)
        made["the same with out="] = lambda: ours.attention_varlen(query, key, value, **paged, out=out)
    return made


def measure() -> dict[str, tuple[float, float]]:
    """What a version that this process has imported takes for each of `calls`."""
    import flashmoe_science

    torch.set_num_threads(_THREADS)
    with torch.no_grad():
        return {name: per_call(call) for name, call in calls(flashmoe_science).items()}


def of_version(checkout: Path) -> dict[str, list[float]]:
    """The same in a process of its own. Raises CalledProcessError if that failed; its own words went to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
    run = subprocess.run(
        [sys.executable, __file__, "--alone"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    measured: dict[str, list[float]] = json.loads(run.stdout)
    return measured


def commit(checkout: Path) -> str:
    """With a plus sign where files differ from it."""
    git = ["git", "-C", str(checkout)]
    names = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    head, changed = (
        subprocess.run([*git, *words], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        for words in names
    )
    return head + ("+" if changed else "")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="NAME=CHECKOUT", help="folders of this repository")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each version; default: 5")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures here, as JSON")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(measure()))
        return
    versions = {
        name: Path(folder) for name, _, folder in (each.partition("=") for each in arguments.versions)
    }
    if not versions:
        parser.error("name at least one version, such as now=.")
    rounds: dict[str, list[dict[str, list[float]]]] = {name: [] for name in versions}
    for _ in range(arguments.rounds):
        for name, folder in versions.items():
            rounds[name].append(of_version(folder))
    host_us = {
        name: {
            call: {
                "least": min(one[call][0] for one in measured),
                "median": statistics.median(one[call][1] for one in measured),
            }
            for call in measured[0]
        }
        for name, measured in rounds.items()
    }
    for call in max(host_us.values(), key=len):
        row = [
            f"{name} {of[call]['least']:.2f} ({of[call]['median']:.2f})"
            for name, of in host_us.items()
            if call in of
        ]
        print(f"{call}, us, least (median): {', '.join(row)}")
    if arguments.output is not None:
        # Loaded here: an earlier version's process has no such modules.
        from provenance import provenance

        from cudadent42.base.files import write_json

        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        commits = {name: commit(folder) for name, folder in versions.items()}
        write_json(
            arguments.output, {**provenance("cpu"), "commits": commits, "host_us": host_us, "rounds": rounds}
        )


if __name__ == "__main__":
    main()
