"""How often a run on a busy CPU is wrong: of the same code under two names, and of a true tenth more.

    python benchmarks/busy.py --output FOLDER                      # at most 90 minutes; may be ended and called again
    python benchmarks/busy.py --output FOLDER --minutes 5 --loads 2
    python benchmarks/busy.py --output A --cores 0,1 --share 1/2   # at the same time as the next one
    python benchmarks/busy.py --output B --cores 2,3 --share 2/2
    python benchmarks/busy.py --output FOLDER --merge A B          # what both recorded, and one summary

Under each load (programs that compute, for every processor), four kinds of race, by turns:

    same         PyTorch against itself, with the timer that a run chooses
    slower       PyTorch against itself with a tenth of its processor time added, likewise
    same-call    as ``same``, with ``--timer call``: such a race has to be refused, or right
    slower-call  as ``slower``, likewise

A race is the timing and the comparison of a run, in a worker process as a run has it, after the probe that chooses the
timer. ``FOLDER/busy.json`` has every race, and a summary: of the races, and of their single cases. A word is false if
the same code is called faster or slower, or the slower code faster or equal. Loads begin and end with the script.

On a machine of many processors, shares of the races can be run at once: ``--cores`` holds a share and its loads to some
processors, ``--share 3/8`` is the third of eight parts of the races. The shares disturb each other through caches and
memory only, which is one more thing that a busy machine does.
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
from collections.abc import Iterator, Mapping, Sequence
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


KINDS = (
    Kind("same", "same", None),
    Kind("slower", "slower", None),
    Kind("same-call", "same", TimerKind.CALL),
    Kind("slower-call", "slower", TimerKind.CALL),
)

TRUTH = Kind("truth", "slower", TimerKind.CPU)
"""How much the slower one is slower, from many blocks on a quiet machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--races",
        type=counts,
        default=counts("same=200,slower=40,same-call=40,slower-call=20"),
        help="Of which kinds how many under each load, by commas: %(default)s.",
    )
    parser.add_argument(
        "--loads", default="0,1,2,4", help="Competing programs for every processor, by commas."
    )
    parser.add_argument("--minutes", type=float, default=90.0, help="After which no further race begins.")
    parser.add_argument("--cores", help="The processors to use, by commas; all if none is named.")
    parser.add_argument(
        "--share", type=share, default=(1, 1), metavar="I/N", help="The I-th of N parts of the races."
    )
    parser.add_argument(
        "--no-truth", action="store_true", help="Do not measure how much slower the slower one is."
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FOLDER", help="Bring shares together; race none."
    )
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / "busy.json"
    if chosen.merge:
        write(path, merged([read(folder / path.name) for folder in chosen.merge]))
        return
    if chosen.cores:
        os.sched_setaffinity(0, {int(each) for each in chosen.cores.split(",")})
    document = read(path)
    stop = time.monotonic() + 60.0 * chosen.minutes
    wanted = {
        (int(load), kind): part_of(count, *chosen.share)
        for load in chosen.loads.split(",")
        for kind, count in chosen.races.items()
    }
    for row in races(document["rows"], wanted, stop, truth=not chosen.no_truth):
        document["rows"].append(row)
        write(path, document)
        print(row["load"], row["kind"], row["timer"], row["verdict"], row["cases"], flush=True)


def counts(text: str) -> dict[Kind, int]:
    """``same=200,slower=40``, for argparse."""
    kinds = {kind.name: kind for kind in KINDS}
    try:
        return {
            kinds[name]: int(count) for name, _, count in (each.partition("=") for each in text.split(","))
        }
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"expected KIND=COUNT,…, the kinds being {', '.join(kinds)}"
        ) from None


def share(text: str) -> tuple[int, int]:
    """``3/8``, for argparse."""
    index, _, parts = text.partition("/")
    if not (index.isdecimal() and parts.isdecimal() and 1 <= int(index) <= int(parts)):
        raise argparse.ArgumentTypeError("expected I/N, such as 3/8")
    return int(index), int(parts)


def part_of(count: int, index: int, parts: int) -> int:
    """Of the ``index``-th of so many parts, from 1. The parts add up to ``count``."""
    return count * index // parts - count * (index - 1) // parts


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of one machine and one revision as one."""
    first = documents[0]
    for name in ("revision", "machine", "blocks"):
        if any(each[name] != first[name] for each in documents):
            raise SystemExit(
                f"the shares differ in {name}; only those of one machine and revision belong together"
            )
    return {**first, "shares": len(documents), "rows": [row for each in documents for row in each["rows"]]}


def write(path: Path, document: dict[str, Any]) -> None:
    document["summary"] = summary(document["rows"])
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """What an earlier call recorded, which this one adds to."""
    if path.exists():
        parsed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return parsed
    return {"blocks": BLOCKS, **provenance("cpu"), "summary": {}, "rows": []}


def races(
    done: Sequence[dict[str, Any]], wanted: Mapping[tuple[int, Kind], int], stop: float, *, truth: bool
) -> Iterator[dict[str, Any]]:
    """Batches of every kind under every load by turns, until all have their number or the time is over."""
    left = Counter(wanted)
    for row in done:
        for kind in KINDS:
            if kind.name == row["kind"]:
                left[row["load"], kind] -= 1
    if truth and not any(row["kind"] == TRUTH.name for row in done):
        yield from batch(TRUTH, 0, 1, stop)
    while any(number > 0 for number in left.values()) and time.monotonic() < stop:
        for load in dict.fromkeys(load for load, _ in wanted):
            with competitors(load):
                for kind in KINDS:
                    number = min(BATCH, left[load, kind])
                    if number > 0 and time.monotonic() < stop:
                        left[load, kind] -= number
                        yield from batch(kind, load, number, stop)


@contextmanager
def competitors(load: int) -> Iterator[None]:
    running = [
        subprocess.Popen([sys.executable, "-S", "-c", LOAD])
        for _ in range(load * len(os.sched_getaffinity(0)))
    ]
    try:
        time.sleep(0.5 if running else 0.0)
        yield
    finally:
        for each in running:
            each.kill()
        for each in running:
            each.wait()


def batch(kind: Kind, load: int, count: int, stop: float) -> Iterator[dict[str, Any]]:
    """So many races with the same workers, or as many as begin in time."""
    blocks = TRUTH_BLOCKS if kind is TRUTH else BLOCKS
    request = RunOptions(choices=Choices(timer=kind.timer), device="cpu")
    with Worker() as one_thread, Worker() as all_threads:
        for _ in range(count):
            began = time.monotonic()
            if began >= stop:
                return
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
        "intervals": {row.name: [row.ci_low, row.ci_high] for row in results.cases},
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
    candidates = {kind.name: kind.candidate for kind in (*KINDS, TRUTH)}
    same = candidates[rows[0]["kind"]] == "same"
    false = ("faster", "slower") if same else ("faster", "equal")
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
