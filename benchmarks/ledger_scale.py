"""The ledger with a million samples: how long a rebuild takes, and what asks it afterwards.

    PYTHONPATH=src python benchmarks/ledger_scale.py OUTPUT.json [--samples 1000000] [--ledger URL]

Copies of a committed run, each with a time of its own and whole in every file that the ledger reads, are written into a
temporary folder until they hold that many samples. Then the command line is timed as a user has it, process start
included: a rebuild from nothing, and ``ledger list``, ``ledger status``, ``cost`` and ``history``, the best of three;
the processor time of each beside it, which other work on the machine does not stretch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from provenance import provenance

from cudadent42.runs import run_folder

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "benchmarks" / "results" / "2026-11-20-cpu-default"
REPEATS = 3
QUESTIONS = {
    "list": ("ledger", "list"),
    "status": ("ledger", "status"),
    "cost": ("cost",),
    "history": ("history", "seq-1024/bf16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--ledger", help="a URL instead of a new SQLite file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cudadent42-scale-") as name:
        folder = Path(name)
        began = time.perf_counter()
        count, samples, size = _write_runs(folder / "runs", arguments.samples)
        print(
            f"{count} run folders with {samples} samples, {size / 1e6:.0f} MB, in {time.perf_counter() - began:.0f} s"
        )
        ledger = arguments.ledger or str(folder / "ledger.sqlite")
        figures: dict[str, object] = {"runs": count, "samples": samples, "run_folder_bytes": size}
        for name in ("rebuild", "rebuild_again"):
            once = _timed("ledger", "rebuild", str(folder / "runs"), "--ledger", ledger)
            figures |= {f"{name}_s": once.wall_s, f"{name}_cpu_s": once.cpu_s}
        for question, command in QUESTIONS.items():
            asked = [_timed(*command, "--ledger", ledger) for _ in range(REPEATS)]
            figures[f"{question}_s"] = min(each.wall_s for each in asked)
            figures[f"{question}_cpu_s"] = min(each.cpu_s for each in asked)
        contents = json.loads(_timed("ledger", "status", "--ledger", ledger, "--json").out)["contents"]
        assert contents["samples"] == samples, contents
        figures["rows"] = contents["rows"]
        if arguments.ledger is None:
            figures["ledger_bytes"] = Path(ledger).stat().st_size
    for key, value in figures.items():
        print(f"{key}: {value}")
    database = "sqlite" if arguments.ledger is None else arguments.ledger.partition(":")[0]
    document = {"schema_version": 1, "database": database, **provenance("cpu"), "figures": figures}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _write_runs(root: Path, wanted: int) -> tuple[int, int, int]:
    """Run folders with at least that many samples: their number, the samples, the bytes."""
    manifest = json.loads((TEMPLATE / run_folder.MANIFEST).read_text(encoding="utf-8"))
    each = (TEMPLATE / run_folder.SAMPLES).read_bytes().count(b"\n") - 1
    first = datetime.fromisoformat(manifest["started"])
    took = datetime.fromisoformat(manifest["ended"]) - first
    count = -(-wanted // each)
    size = 0
    for number in range(count):
        folder = root / f"{number:05d}"
        folder.mkdir(parents=True)
        started = first + timedelta(hours=number)
        times = {"started": _text(started), "ended": _text(started + took)}
        (folder / run_folder.MANIFEST).write_text(json.dumps(manifest | times, indent=2), encoding="utf-8")
        for name in (run_folder.SAMPLES, run_folder.VERIFY, run_folder.RESULTS, run_folder.LOG):
            shutil.copyfile(TEMPLATE / name, folder / name)
        size += sum(path.stat().st_size for path in folder.iterdir())
    return count, count * each, size


def _text(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Timed:
    wall_s: float
    cpu_s: float
    out: str


def _timed(*arguments: str) -> Timed:
    """A command of the lab in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140"}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "cudadent42", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - began
    if done.returncode != 0:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timed(took, cpu_s, done.stdout)


if __name__ == "__main__":
    main()
