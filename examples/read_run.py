"""The verdicts of a run folder, and what the samples say of one case.

python examples/read_run.py benchmarks/results/2026-11-20-cpu-default
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    results = json.loads((folder / "results.json").read_text())
    print(f"{results['candidate']} over {results['baseline']}: {results['verdict']}")
    for case in results["cases"]:
        interval = f"{case['ci_low']:.2f} to {case['ci_high']:.2f}"
        print(f"  {case['name']}/{case['dtype']}: {case['speedup']:.2f} ({interval}), {case['verdict']}")

    first = results["cases"][0]
    with open(folder / "samples.csv", newline="") as file:
        latencies = [
            float(row["latency_ms"])
            for row in csv.DictReader(file)
            if (row["case"], row["dtype"], row["implementation"])
            == (first["name"], first["dtype"], results["candidate"])
        ]
    median = statistics.median(latencies)
    print(f"{first['name']}/{first['dtype']}: {len(latencies)} samples, median {median:.4f} ms")


if __name__ == "__main__":
    main()
