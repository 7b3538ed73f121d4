"""Tunings of a real kernel on this CPU, many times: is what was planted installed, and does a killed one go on?

    python benchmarks/tuning.py --sweeps 20 --kills 100 --output benchmarks/results/<date>-tuning

Shares of it can run beside each other, on two processors each: `--first` says which sweep a share begins with,
`--seconds` when it begins no further one, and `merge_tuning.py` makes one file of them.

The kernel is attention with a loop behind it, whose length is the macro ``COST``: one configuration has 6 % less of it
than the default, the others have more, and each comes twice, with a macro that changes no code. What is counted:

* sweeps in which the planted configuration, and no other, was confirmed and installed;
* configurations of the default's own code that were installed;
* blocks of the race, against those of a sweep that measures every configuration of unlike code with the blocks of the
  last rung: ``blocks_share``;
* everything that is timed, with the default in each job, and the winner, the default and its control in the
  confirmation, against that sweep with the default in each job and the same confirmation behind it: ``timed_share``;
* kills, by SIGKILL at moments drawn evenly from the time of a whole sweep, behind which the same command went on;
  blocks that were on record before and not after, and blocks that are there twice. Only a process that was killed
  counts: what ended before its moment had come is the end of that tuning, and another begins.

Run it on an idle machine: it times by the processor's clock, but the sweeps of a busy machine take long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provenance import provenance

from cudadent42.decisions.racing import chunks, exhaustive
from cudadent42.scaffold import Kind, create
from cudadent42.tune.journal import ARMS_OF_A_JOB, FILES, read
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import fold

ROOT = Path(__file__).resolve().parent.parent

PLANTED = 94
COSTS = (PLANTED, 100, 103, 106, 110, 115, 120, 130)

CONFIRMED_SIDES = 3
"""In each block of a confirmation: the default, its control and the winner."""

SUITE = """
name = "unit"
dtypes = ["fp32"]
repeats = 25
warmup = 2
case = [{ name = "one", batch = 1, num_heads = 1, seqlen = 16, head_dim = 8 }]
"""

LOOP = """
CUDADENT42_EXPORT int k(const Cudadent42Attention *problem) {
    const int status = attention(problem);
    volatile double product = 1.0;
    for (long long i = 0; i < 400LL * COST; i++) product = product * 1.0000001;
    return status;
}
"""


@dataclass(frozen=True)
class Sweep:
    """One tuning to its end."""

    seed: int
    winners: tuple[str, ...]
    installed: int
    arm_blocks: int
    """Of configurations beside the default."""
    exhaustive_blocks: int
    timed_blocks: int
    """Everything that was timed, the default's blocks and the confirmations' among them."""
    exhaustive_timed_blocks: int
    seconds: float


@dataclass(frozen=True)
class Killed:
    """One tuning that was killed some times."""

    kills: int
    failures: tuple[str, ...]
    """What the same command said where it did not go on."""
    lost: int
    twice: int


def project(folder: Path) -> Path:
    """The kernel, its suite and its space."""
    create("k", Kind.CPU, folder)
    source = folder / "k/k.cpp"
    text = source.read_text()
    head, mark, rest = text.partition("CUDADENT42_EXPORT int k(")
    if not mark:
        raise SystemExit("the scaffold's kernel is not what this script expects")
    source.write_text(f"{head}static int attention({rest}{LOOP}")
    kernel = folder / "k/k.toml"
    kernel.write_text(kernel.read_text() + "\n[[configuration]]\nmacros = { COST = 100, UNUSED = 0 }\n")
    (folder / "suite.toml").write_text(SUITE)
    space = f'schema_version = 1\nname = "s"\nkernel = "k/k.toml"\n[space]\nCOST = {list(COSTS)}\nUNUSED = [0, 1]\n'
    (folder / "space.toml").write_text(space)
    return folder


def command(folder: Path, seed: int) -> list[str]:
    return [
        *(sys.executable, "-m", "cudadent42", "tune", "run", "space.toml", "--suite", "./suite.toml"),
        *("--device", "cpu", "--timer", "cpu", "--seed", str(seed), "--ignore-preflight", "--json"),
        *("--output-dir", str(folder / "tuning")),
    ]


def environment(folder: Path) -> dict[str, str]:
    own = {"XDG_CONFIG_HOME": str(folder / "config"), "CUDADENT42_LEDGER": "none"}
    return {**os.environ, **own, "PYTHONPATH": str(ROOT / "src")}


def sweep(seed: int) -> Sweep:
    with tempfile.TemporaryDirectory() as name:
        folder = project(Path(name))
        began = time.monotonic()
        options: dict[str, Any] = {
            "cwd": folder,
            "env": environment(folder),
            "capture_output": True,
            "text": True,
        }
        subprocess.run(command(folder, seed), check=True, **options)
        seconds = time.monotonic() - began
        install = [sys.executable, "-m", "cudadent42", "tune", "install", str(folder / "tuning"), "--json"]
        done = subprocess.run(install, check=False, **options)
        installed = len(json.loads(done.stdout)["entries"]) if done.returncode == 0 else 0
        state = fold(*read(folder / "tuning"))
        rows = [len(row) for case in state.cases.values() for arm, row in case.rows.items() if arm != DEFAULT]
        rules = state.setup.rules
        raced = sum(len(case.raced) - 1 for case in state.cases.values())
        jobs = sum(len(chunks(case.raced[1:], ARMS_OF_A_JOB)) for case in state.cases.values())
        confirming = CONFIRMED_SIDES * sum(
            case.confirmations * case.settled.blocks for case in state.cases.values() if case.settled
        )
        return Sweep(
            seed,
            tuple(winner.arm for winner in state.winners),
            installed,
            arm_blocks=sum(rows),
            exhaustive_blocks=exhaustive(raced, rules),
            timed_blocks=state.arm_blocks + confirming,
            exhaustive_timed_blocks=exhaustive(raced + jobs, rules) + confirming,
            seconds=seconds,
        )


def killed(seed: int, kills: int, whole_s: float, chance: random.Random) -> Killed:
    failures: list[str] = []
    lost = done = 0
    with tempfile.TemporaryDirectory() as name:
        folder = project(Path(name))
        journal = folder / "tuning" / FILES.entries
        options: dict[str, Any] = {"cwd": folder, "env": environment(folder), "text": True}
        while done < kills:
            before = journal.read_bytes() if journal.exists() else b""
            process = subprocess.Popen(
                command(folder, seed), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options
            )
            said = ""
            with suppress(subprocess.TimeoutExpired):
                _, said = process.communicate(timeout=chance.uniform(0.0, whole_s))
            process.kill()
            process.wait()
            after = journal.read_bytes() if journal.exists() else b""
            lost += not after.startswith(before[: before.rfind(b"\n") + 1])
            if process.returncode != -signal.SIGKILL:
                failures += [said[-300:]] if process.returncode else []
                break
            done += 1
        last = subprocess.run(command(folder, seed), check=False, capture_output=True, **options)
        if last.returncode != 0:
            failures.append(last.stderr[-300:])
        blocks = Counter(
            (entry.event.job, entry.event.attempt, entry.event.block)
            for entry in read(folder / "tuning")[1]
            if type(entry.event).event == "block"
        )
        return Killed(done, tuple(failures), lost, sum(count - 1 for count in blocks.values()))


def summary(sweeps: Sequence[Sweep], kills: Sequence[Killed]) -> dict[str, float]:
    """What is quoted."""
    planted = f"COST={PLANTED}, UNUSED=0"
    exhaustive_blocks = sum(each.exhaustive_blocks for each in sweeps)
    return {
        "planted_installed": sum(each.winners == (planted,) and each.installed == 1 for each in sweeps),
        "others_installed": sum(each.installed > 0 and each.winners != (planted,) for each in sweeps),
        "sweeps": len(sweeps),
        "blocks_share": sum(each.arm_blocks for each in sweeps) / max(1, exhaustive_blocks),
        "timed_share": sum(each.timed_blocks for each in sweeps)
        / max(1, sum(each.exhaustive_timed_blocks for each in sweeps)),
        "kills": sum(each.kills for each in kills),
        "kills_that_did_not_go_on": sum(len(each.failures) for each in kills),
        "blocks_lost": sum(each.lost for each in kills),
        "blocks_twice": sum(each.twice for each in kills),
    }


def write(
    output: Path, measured_on: dict[str, Any], sweeps: Sequence[Sweep], kills: Sequence[Killed]
) -> dict[str, float]:
    """``tuning.json``; its summary."""
    said = summary(sweeps, kills)
    document = {
        "provenance": measured_on,
        "summary": said,
        "sweeps": [asdict(each) for each in sweeps],
        "kills": [asdict(each) for each in kills],
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "tuning.json").write_text(json.dumps(document, indent=2) + "\n")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first sweep")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kills-per-tuning", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, help="after which no sweep is begun that may not end in time"
    )
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    began_s = time.monotonic()
    measured_on = provenance("cpu")
    sweeps: list[Sweep] = []
    for seed in range(given.first, given.first + given.sweeps):
        longest_s = max((each.seconds for each in sweeps), default=0.0)
        if given.seconds is not None and time.monotonic() - began_s + longest_s > given.seconds:
            break
        sweeps.append(sweep(seed))
        print(sweeps[-1], flush=True)
        write(given.output, measured_on, sweeps, ())
    timed = sweeps or ([sweep(given.first)] if given.kills else [])
    whole_s = sorted(each.seconds for each in timed)[len(timed) // 2] if timed else 0.0
    chance = random.Random(given.first)
    kills: list[Killed] = []
    while (left := given.kills - sum(each.kills for each in kills)) > 0:
        kills.append(killed(given.first + len(kills), min(left, given.kills_per_tuning), whole_s, chance))
        print(kills[-1], flush=True)
        write(given.output, measured_on, sweeps, kills)
        if kills[-1].failures and not kills[-1].kills:
            break
    print(json.dumps(write(given.output, measured_on, sweeps, kills), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
