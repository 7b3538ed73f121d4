"""How long short calls of attention take on all threads of the CPU while other programs compute.

    PYTHONPATH=src python benchmarks/busy_threads.py --load 1 --output FILE.json
    OMP_WAIT_POLICY=passive PYTHONPATH=src python benchmarks/busy_threads.py --load 1 --output FILE.json

`--load` programs for every processor compute meanwhile; they begin and end with the script. The lab has no race for
this: it refuses calls that wait for processors. The file has, for each length and number of threads, how many calls
there were, and of their milliseconds the median, the mean, the ninth tenth, and the share over 4 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from provenance import provenance

from flashmoe_science import flash_attention

LENGTHS = (64, 256, 1024)
MOST_CALLS = 5000
LONG_MS = 4.0
"""No call on a quiet machine takes as long but those of 1,024 keys; about a time slice of Linux."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="of calls of each length")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    about = provenance("cpu")
    threads = torch.get_num_threads()
    with load(arguments.load * (os.cpu_count() or 1)):
        rows = [
            {"keys": length, "threads": number, **timed(length, number, arguments.seconds)}
            for length in LENGTHS
            for number in (1, threads)
        ]
    names = ("OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT")
    settings = {name: os.environ[name] for name in names if name in os.environ}
    document = {**about, "load": arguments.load, "environment": settings, "rows": rows}
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(row)


@contextmanager
def load(programs: int) -> Iterator[None]:
    command = [sys.executable, "-S", "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(programs)]
    try:
        time.sleep(0.5)  # until they compute
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def timed(length: int, threads: int, seconds: float) -> dict[str, float]:
    torch.set_num_threads(threads)
    query, key, value = (torch.randn(1, 8, length, 64, dtype=torch.float32, device="cpu") for _ in range(3))
    flash_attention(query, key, value)
    times: list[float] = []
    stop = time.monotonic() + seconds
    while time.monotonic() < stop and len(times) < MOST_CALLS:
        began = time.perf_counter()
        flash_attention(query, key, value)
        times.append(1e3 * (time.perf_counter() - began))
    return {
        "calls": len(times),
        "median_ms": statistics.median(times),
        "mean_ms": statistics.fmean(times),
        "nine_tenths_ms": sorted(times)[int(0.9 * len(times))],
        "share_over_4_ms": sum(each > LONG_MS for each in times) / len(times),
    }


if __name__ == "__main__":
    main()
