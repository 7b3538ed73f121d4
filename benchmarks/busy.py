"""How often a run on a busy CPU is wrong: of the same code under two names, and of a true tenth more.

    python benchmarks/busy.py --output FOLDER                      # at most 90 minutes; may be ended and called again
    python benchmarks/busy.py --output FOLDER --minutes 5 --loads 2

Under each load (programs that compute, for every processor), four kinds of race, by turns:

    same         PyTorch against itself, with the timer that a run chooses
    slower       PyTorch against itself with a tenth of its processor time added, likewise
    same-call    as ``same``, with ``--timer call``: such a race has to be refused, or right
    slower-call  as ``slower``, likewise

A race is the timing and the comparison of a run, in a worker process as a run has it, after the probe that chooses the
timer. ``FOLDER/busy.json`` has every race, and a summary: of the races, and of their single cases. A word is false if
the same code is called faster or slower, or the slower code faster or equal. Loads begin and end with the script.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import provenance

from cudadent42.base.observer import Quiet
from cudadent42.decisions.compare import compare
from cudadent42.flows import pipeline
from cudadent42.flows.pipeline import Prepared
from cudadent42.model.events import Event
from cudadent42.model.records import MachineReport, Plan, Results, TimerKind, VerifyReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.plan import Choices, RunOptions
from cudadent42.timing.contention import probe
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage

CANDIDATES = Path(__file__).with_name("busy_candidates.py")
CASES = tuple(
    AttentionCase(name, "bf16", 1, 8, 8, length, length, 64)
    for name, length in (("short", 64), ("long", 256))
)
"""A call that fits many times into a window, and one that several threads share and that fills some."""

BLOCKS = 25
WARM_UP = 3
"""As the default suite has them."""

TRUTH_BLOCKS = 100
BATCH = 5
"""Races with one worker before the next kind or load has its turn."""

LOAD = "while True: pass"


@dataclass(frozen=True)
class Kind:
    name: str
    candidate: str
    timer: TimerKind | None
    share: float
    """Of --races."""


KINDS = (
    Kind("same", "same", None, 1.0),
    Kind("slower", "slower", None, 0.2),
    Kind("same-call", "same", TimerKind.CALL, 0.2),
    Kind("slower-call", "slower", TimerKind.CALL, 0.1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--races", type=int, default=200, help="Of the kind `same`, under each load.")
    parser.add_argument(
        "--loads", default="0,1,2,4", help="Competing programs for every processor, by commas."
    )
    parser.add_argument("--minutes", type=float, default=90.0, help="After which no further batch begins.")
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / "busy.json"
    document = read(path)
    stop = time.monotonic() + 60.0 * chosen.minutes
    for row in races(document["rows"], [int(each) for each in chosen.loads.split(",")], chosen.races, stop):
        document["rows"].append(row)
        document["summary"] = summary(document["rows"])
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(row["load"], row["kind"], row["timer"], row["verdict"], row["cases"], flush=True)
    print(json.dumps(document["summary"], indent=1))


def read(path: Path) -> dict[str, Any]:
    """What an earlier call recorded, which this one adds to."""
    if path.exists():
        parsed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return parsed
    return {"blocks": BLOCKS, **provenance("cpu"), "summary": {}, "rows": []}


def races(
    done: Sequence[dict[str, Any]], loads: Sequence[int], count: int, stop: float
) -> Iterator[dict[str, Any]]:
    """Batches of every kind under every load by turns, until all have their number or the time is over."""
    left = Counter({(load, kind): round(kind.share * count) for load in loads for kind in KINDS})
    for row in done:
        for kind in KINDS:
            if kind.name == row["kind"]:
                left[row["load"], kind] -= 1
    if not any(row["kind"] == "truth" for row in done) and time.monotonic() < stop:
        yield from batch(Kind("truth", "slower", TimerKind.CPU, 0.0), 0, 1)
    while any(number > 0 for number in left.values()):
        for load in loads:
            with competitors(load):
                for kind in KINDS:
                    number = min(BATCH, left[load, kind])
                    if number > 0 and time.monotonic() < stop:
                        left[load, kind] -= number
                        yield from batch(kind, load, number)
        if time.monotonic() >= stop:
            return


@contextmanager
def competitors(load: int) -> Iterator[None]:
    running = [
        subprocess.Popen([sys.executable, "-S", "-c", LOAD]) for _ in range(load * (os.cpu_count() or 1))
    ]
    try:
        time.sleep(0.5 if running else 0.0)
        yield
    finally:
        for each in running:
            each.kill()
        for each in running:
            each.wait()


def batch(kind: Kind, load: int, count: int) -> Iterator[dict[str, Any]]:
    blocks = TRUTH_BLOCKS if kind.name == "truth" else BLOCKS
    request = RunOptions(choices=Choices(timer=kind.timer), device="cpu")
    with Worker() as one_thread, Worker() as all_threads:
        for _ in range(count):
            began = time.monotonic()
            candidate = f"{CANDIDATES}:{kind.candidate}"
            plan = Plan(
                "busy",
                "cpu",
                CASES,
                "pytorch",
                ("pytorch", candidate),
                blocks,
                WARM_UP,
                seed=random.SystemRandom().randrange(1 << 32),
                timer=kind.timer or TimerKind.CALL,
            )
            plan = pipeline.with_timer(Prepared(plan, MachineReport((), "", {})), request, Quiet()).plan
            worker = one_thread if plan.timer is TimerKind.CPU else all_threads
            yield {
                "kind": kind.name,
                "load": load,
                "timer": plan.timer.value,
                "seed": plan.seed,
                "waited_share": round(probe().waited_share, 3),
                **outcome(race(plan, worker)),
                "seconds": round(time.monotonic() - began, 1),
            }


def race(plan: Plan, worker: Worker) -> Results:
    report = run_stage("bench", plan, on_event=ignore, verified=VerifyReport(()), worker=worker)
    return compare(plan, report.samples, report.skipped, {})


def outcome(results: Results) -> dict[str, Any]:
    return {
        "verdict": results.verdict.value,
        "refused": results.refused.value if results.refused else None,
        "speedup": results.speedup_geomean,
        "interval": [results.speedup_geomean_ci_low, results.speedup_geomean_ci_high],
        "cases": {row.name: row.verdict.value for row in results.cases},
        "refused_cases": [row.name for row in results.cases if row.refused],
        "speedups": {row.name: row.speedup for row in results.cases},
        "latency_ms": {row.name: row.baseline_latency_ms for row in results.cases},
        "flagged": {row.name: row.flagged_blocks for row in results.cases},
        "skipped": results.skipped,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By load and kind: the words of races and of cases, and how many of them are false."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(f"{row['load']} per processor, {row['kind']}", []).append(row)
    return {name: _summary(group) for name, group in sorted(groups.items())}


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    false = ("faster", "equal") if "slower" in rows[0]["kind"] else ("faster", "slower")
    cases = [word for row in rows for word in row["cases"].values()]
    words = [row["verdict"] for row in rows]
    return {
        "races": len(rows),
        "timers": dict(Counter(row["timer"] for row in rows)),
        "verdicts": dict(Counter(words)),
        "refused": sum(row["refused"] is not None for row in rows),
        "false_share": sum(word in false for word in words) / len(rows),
        "cases": len(cases),
        "verdicts_of_cases": dict(Counter(cases)),
        "refused_cases": sum(len(row["refused_cases"]) for row in rows),
        "false_share_of_cases": sum(word in false for word in cases) / max(1, len(cases)),
        "median_speedup": sorted(row["speedup"] for row in rows)[len(rows) // 2],
        "median_seconds": sorted(row["seconds"] for row in rows)[len(rows) // 2],
    }


def ignore(event: Event) -> None:
    return


if __name__ == "__main__":
    main()
