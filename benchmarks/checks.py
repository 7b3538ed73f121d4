"""What the checks against cheats cost: whole runs of an honest plug-in, by processor time and on the wall.

    python benchmarks/checks.py --output FOLDER                      # suite small, 25 repeats, and sealed
    python benchmarks/checks.py --output FOLDER --suite default --repeats 25 --mode default

Each run is ``cudadent42 run`` in a process of its own. It counts its checks apart (``integrity`` of results.json: those
in the worker between blocks, and the audit's processes). What is left of the run's processor time is the run without
them, its start and verification included. The branch that an audit's processes are forked from is timed by itself.
Processor time is what to compare on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from provenance import provenance

PLUG_IN = """
from flashmoe_science import flash_attention


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
"""

BRANCH = """
import socket, time
import cudadent42.stages.bench.measurement, cudadent42.stages.verify, cudadent42.worker.child
from cudadent42.operations import definition
from cudadent42.audit.nursery import trunk
from cudadent42.worker.branch import branch_off

definition("attention").implementations()
definition("attention").numerics()
__import__("flashmoe_science")
mine, theirs = socket.socketpair()
began_s = time.process_time()
branch_off(trunk("attention"), theirs.detach())
print(time.process_time() - began_s)
"""
"""Of a worker: what it imports in any case is imported before the clock starts."""


VERIFYING = "whose work"
"""The one check that runs while results are verified."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--suite", default="small")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--count", type=int, default=3, help="Runs of each mode.")
    parser.add_argument("--mode", choices=("default", "sealed"), action="append")
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / "checks.json"
    document = json.loads(path.read_text()) if path.exists() else {**provenance("cpu"), "rows": []}
    document["branch_processor_s"] = min(branch_s() for _ in range(3))
    with tempfile.TemporaryDirectory() as scratch:
        plug_in = Path(scratch, "honest.py")
        plug_in.write_text(PLUG_IN)
        for number in range(chosen.count):
            for mode in chosen.mode or ("default", "sealed"):
                folder = Path(scratch, f"{mode}-{number}")
                row = one(
                    folder, f"{plug_in}:attention", chosen.suite, chosen.repeats, sealed=mode == "sealed"
                )
                document["rows"].append(row)
                path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                print(json.dumps({key: value for key, value in row.items() if key != "checks"}), flush=True)


def branch_s() -> float:
    """Processor seconds of branching off, in a worker that has imported what it needs."""
    done = subprocess.run([sys.executable, "-c", BRANCH], capture_output=True, text=True, check=True)
    return float(done.stdout)


def one(folder: Path, plug_in: str, suite: str, repeats: int, *, sealed: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "cudadent42", "run", "--suite", suite, "--repeats", str(repeats)]
    command += [
        "--implementations",
        plug_in,
        "--timer",
        "cpu",
        "--device",
        "cpu",
        "--output-dir",
        str(folder),
    ]
    command += ["--ignore-preflight", *(["--sealed"] if sealed else [])]
    began_s, ran_s = time.perf_counter(), children_s()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    run_s, wall_s = children_s() - ran_s, time.perf_counter() - began_s
    results = json.loads((folder / "results.json").read_text())
    integrity = results["integrity"]
    checks: Mapping[str, Mapping[str, float]] = integrity["checks"]
    between = [spent for name, spent in checks.items() if name != "audit"]
    verifying_s = checks[VERIFYING]["processor_s"] if VERIFYING in checks else 0.0
    between_s = sum(spent["processor_s"] for spent in between)
    between_wall_s = sum(spent["wall_s"] for spent in between)
    audit = checks.get("audit", {"processor_s": 0.0, "wall_s": 0.0})
    # The audit's processes are no children that the command waits for, so the run's own time is without them.
    without_s = run_s - between_s
    without_wall_s = wall_s - between_wall_s - audit["wall_s"]
    return {
        "suite": suite,
        "repeats": repeats,
        "sealed": sealed,
        "exit_code": done.returncode,
        "verdict": results["verdict"],
        "claim_allowed": results["claim_allowed"],
        "claim_reason": results["claim_reason"],
        "findings": len(integrity["findings"]),
        "evidence": [each["evidence"] for each in integrity["findings"]],
        "audited_cases": len(integrity["confirmations"]),
        "without_checks_processor_s": without_s,
        "measuring_processor_s": integrity["measuring"]["processor_s"] - (between_s - verifying_s),
        "between_blocks_processor_s": between_s - verifying_s,
        "verifying_processor_s": verifying_s,
        "audit_processor_s": audit["processor_s"],
        "share_processor": (between_s + audit["processor_s"]) / without_s,
        "share_wall": (between_wall_s + audit["wall_s"]) / without_wall_s,
        "checks": checks,
    }


def children_s() -> float:
    """Processor seconds of all processes that were started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
