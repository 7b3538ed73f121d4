"""How often an honest kernel is accused: all of ``tests/adversaries/honest`` and this project's own, again and again.

    python benchmarks/honest.py --output FOLDER --runs 5
    python benchmarks/honest.py --output FOLDER --runs 5 --audit     # each in the audit as well, as with --sealed
    python benchmarks/honest.py --output FOLDER --device cuda:0      # and those that use what a GPU has
    python benchmarks/honest.py --output FOLDER --device cuda:0 --own --audit    # these alone

A run verifies and times all of them in one worker, on the CPU by processor time, in another order and with other values
each time.
An accusation is a finding or a failed verification; which are not timed is counted apart. ``FOLDER/honest.json`` has
every run. When the script is called again, it adds to that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from provenance import provenance

ADVERSARIES = Path(__file__).resolve().parent.parent / "tests" / "adversaries"
sys.path.insert(0, str(ADVERSARIES))

import lab  # noqa: E402 - of the folder above
from test_honest import NAMES, NAMES_ON_GPU, OWN_ON_GPU  # noqa: E402

from cudadent42.audit.stage import audit  # noqa: E402
from cudadent42.decisions.compare import compare  # noqa: E402
from cudadent42.model.events import Event  # noqa: E402
from cudadent42.model.records import BenchReport, Plan, TimerKind  # noqa: E402
from cudadent42.operations.attention.case import AttentionCase  # noqa: E402
from cudadent42.worker.parent import Worker  # noqa: E402
from cudadent42.worker.stages import run_stage  # noqa: E402

CASE_ON_GPU = AttentionCase("small", "fp16", 2, 8, 8, 1024, 1024, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--audit", action="store_true", help="Put each before the audit too, sealed.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--own", action="store_true", help="Of those for a GPU, only what uses its features.")
    chosen = parser.parse_args()
    on_cpu = chosen.device == "cpu"
    names = NAMES if on_cpu else OWN_ON_GPU if chosen.own else NAMES_ON_GPU
    on_cpu_plan = lab.plan_for(names, TimerKind.CPU)
    on_gpu_plan = replace(on_cpu_plan, device=chosen.device, cases=(CASE_ON_GPU,), timer=TimerKind.CALL)
    plan = on_cpu_plan if on_cpu else on_gpu_plan
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / "honest.json"
    document: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {**provenance(plan.device), "rows": []}
    )
    if on_cpu:
        os.environ["OMP_NUM_THREADS"] = "1"
    for _ in range(chosen.runs):
        document["rows"].append(one_run(plan, audited=chosen.audit))
        document["summary"] = summary(document["rows"])
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(document["summary"]), flush=True)


def one_run(all_of_them: Plan, *, audited: bool) -> dict[str, Any]:
    began_s = time.monotonic()
    seed = random.SystemRandom().getrandbits(31)
    baseline, *names = all_of_them.implementations
    random.Random(seed).shuffle(names)
    plan = replace(all_of_them, implementations=(baseline, *names), seed=seed)
    with tempfile.TemporaryDirectory() as scratch:
        with Worker(Path(scratch, "worker.log")) as worker:
            verified = run_stage("verify", plan, on_event=_ignore, worker=worker)
            benched = run_stage("bench", plan, on_event=_ignore, verified=verified, worker=worker)
        seen = lab.Seen(verified, benched, plan)
        accused = {name: words for name in names if (words := seen.evidence(name).strip())}
        not_timed = {key.rpartition("/")[2]: reason for key, reason in benched.skipped.items()}
        row: dict[str, Any] = {"kernels": len(names), "audited": 0, "not_timed": not_timed}
        if audited:
            accusations, row["audited"] = in_the_audit(plan, benched, Path(scratch, "audit.log"))
            accused |= accusations
    return {
        **row,
        "seed": seed,
        "load": round(os.getloadavg()[0], 1),
        "seconds": round(time.monotonic() - began_s, 1),
        "accused": {name.rpartition("/")[2]: words for name, words in accused.items()},
    }


def in_the_audit(plan: Plan, benched: BenchReport, log: Path) -> tuple[dict[str, str], int]:
    """Who is accused of what, and how many were audited."""
    results = compare(plan, benched.samples, benched.skipped, {})
    audited = audit(plan, results, log=log, measured_s=benched.measuring.processor_s, sealed=True)
    return {each.implementation: each.line for each in audited.findings}, len(audited.confirmations)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "runs": len(rows),
        "kernels": max(row["kernels"] for row in rows),
        "kernel_runs": sum(row["kernels"] for row in rows),
        "audited": sum(row["audited"] for row in rows),
        "accusations": sum(len(row["accused"]) for row in rows),
        "not_timed": sum(len(row["not_timed"]) for row in rows),
        "most_load": max(row["load"] for row in rows),
    }


def _ignore(event: Event) -> None:
    return


if __name__ == "__main__":
    main()
