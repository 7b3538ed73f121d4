"""One sweep by one device of a host and by two: how long it takes, and whether both come to the same winners.

    python benchmarks/fleet_of_gpus.py benchmarks/spaces/attention-decode.toml --suite decode --timer graph \\
        --output benchmarks/results/<date>-fleet-of-gpus

For each number of ``--devices`` it runs ``cudadent42 tune run SPACE --fleet local:N`` into a folder of its own, with
the same rules, seed and search; options that it does not know go to that command. Before the first one torch is
imported once and every device is used for a moment, so that no sweep pays for a cold disk or a sleeping driver.

All times begin with the command, so they have its imports, its look at the machine, the starts of the workers and what
is compiled or read from the compile cache:

* race: until the last case's race is over;
* whole: until the command has ended: with the confirmations, which every device does for itself, and the report.

A cell is a case. Its leader is who the race ended with, its winner who was confirmed, else the default. Two sweeps are
alike in it where both name the same, or where in each sweep's own blocks the two named lie within the margin.

``--read`` writes the file again from folders that were measured before.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from provenance import provenance

from cudadent42.decisions.margin import upper
from cudadent42.decisions.racing import middle
from cudadent42.tune import journal as events
from cudadent42.tune.journal import Entry, read
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import CaseState, State, fold

FILE = "fleet-of-gpus.json"

COMMAND = "command.json"
"""Beside a sweep's folder: when its command began and how long it took."""

_CLOSING_S = 20.0
"""For a command that was interrupted."""

_WARM = """
import torch
for index in range(torch.cuda.device_count()):
    one = torch.ones(1, 1, 1, 64, dtype=torch.float16, device=f"cuda:{index}")
    torch.nn.functional.scaled_dot_product_attention(one, one, one)
    torch.cuda.synchronize(index)
"""


@dataclass(frozen=True)
class Command:
    """A sweep's command, as it was seen from outside."""

    devices: int
    began: str
    """UTC, ISO 8601."""
    seconds: float
    exit_code: int


@dataclass(frozen=True)
class Sweep:
    """What a sweep took, in seconds since its command began unless said otherwise."""

    devices: int
    units: tuple[str, ...]
    """The pieces of hardware that joined."""
    exit_code: int
    paused: str
    opened_s: float
    """Until the machine was looked at and the tuning was opened."""
    first_race_s: float | None
    """Until the first job was handed out."""
    race_s: float | None
    """Until the last race was over; None where one was not."""
    confirmed_s: float | None
    """Until the last winner was confirmed; None where one was not, or there was none."""
    whole_s: float
    cells: int
    jobs: int
    jobs_of_a_device: dict[str, int]
    busy_s: dict[str, float]
    """That its jobs held each device: races alone."""
    arm_blocks: int
    confirmations: int
    """Of single devices."""
    quarantined: dict[str, str]


@dataclass(frozen=True)
class Named:
    """Whom two sweeps name in a cell."""

    first: str
    second: str
    differences: tuple[float | None, float | None]
    """In each sweep's own blocks, by how much faster the one that it names itself is than the other's, as a share; None
    where one of both has no block there."""
    alike: bool


@dataclass(frozen=True)
class Cell:
    case: str
    leaders: Named | None
    """None where a race is not over in one of both."""
    winners: Named | None
    """None where a winner is not confirmed in one of both."""


def sweep_of(command: Command, state: State, entries: Sequence[Entry]) -> Sweep:
    began = datetime.fromisoformat(command.began)

    def last(*kinds: type) -> float | None:
        times = [_after(began, entry) for entry in entries if isinstance(entry.event, kinds)]
        return max(times, default=None)

    members = {
        each.event.worker: each.event.unit for each in entries if isinstance(each.event, events.Joined)
    }
    returned = [each.event for each in entries if isinstance(each.event, events.JobReturned)]
    jobs: Counter[str] = Counter()
    busy_s: Counter[str] = Counter()
    for job in returned:
        unit = members.get(job.worker, job.worker)
        jobs[unit] += 1
        busy_s[unit] += job.seconds
    first = [_after(began, each) for each in entries if isinstance(each.event, events.JobStarted)]
    return Sweep(
        devices=command.devices,
        units=tuple(sorted(set(members.values()))),
        exit_code=command.exit_code,
        paused=state.paused,
        opened_s=min(_after(began, entry) for entry in entries),
        first_race_s=min(first, default=None),
        race_s=last(events.Settled) if all(case.settled for case in state.cases.values()) else None,
        confirmed_s=last(events.Confirmed) if state.finished else None,
        whole_s=command.seconds,
        cells=len(state.cases),
        jobs=len(returned),
        jobs_of_a_device=dict(jobs),
        busy_s={unit: round(seconds, 3) for unit, seconds in busy_s.items()},
        arm_blocks=state.arm_blocks,
        confirmations=sum(len(case.on_machines) for case in state.cases.values()),
        quarantined=dict(state.quarantined),
    )


def _after(began: datetime, entry: Entry) -> float:
    return (datetime.fromisoformat(entry.time) - began).total_seconds()


def cells_of(first: State, second: State) -> list[Cell]:
    """Of two sweeps of the same cases."""
    margin = first.setup.rules.margin
    rows = []
    for name, one in first.cases.items():
        other = second.cases[name]
        leaders = winners = None
        if one.settled is not None and other.settled is not None:
            leaders = named(one, one.settled.leader, other, other.settled.leader, margin)
        if one.finished and other.finished:
            winners = named(one, winner_of(one), other, winner_of(other), margin)
        rows.append(Cell(name, leaders, winners))
    return rows


def winner_of(case: CaseState) -> str:
    """What would be installed."""
    return case.confirmed.arm if case.confirmed is not None and case.confirmed.holds else DEFAULT


def named(first: CaseState, own: str, second: CaseState, others: str, margin: float) -> Named:
    """``own`` is named by the first sweep, ``others`` by the second."""
    differences = difference(first, own, others), difference(second, others, own)
    near = all(each is not None and abs(math.log1p(each)) <= math.log(upper(margin)) for each in differences)
    return Named(own, others, differences, alike=own == others or near)


def difference(case: CaseState, arm: str, other: str) -> float | None:
    """By how much faster an arm is than another in a race's own blocks, as a share."""
    if arm == other:
        return 0.0
    centres = [0.0 if each == DEFAULT else _centre(case, each) for each in (arm, other)]
    if None in centres:
        return None
    return math.expm1(centres[0] - centres[1])  # type: ignore[operator]


def _centre(case: CaseState, arm: str) -> float | None:
    row = case.rows.get(arm)
    return middle(row) if row else None


def summary(sweeps: Sequence[Sweep], cells: Sequence[Cell]) -> dict[str, Any]:
    """What is quoted: the second sweep against the first."""
    first, second = sweeps

    def ratio(name: str) -> float | None:
        before, after = getattr(first, name), getattr(second, name)
        return None if before is None or after is None else after / before

    said: dict[str, Any] = {
        "devices": [first.devices, second.devices],
        "race_s": [first.race_s, second.race_s],
        "race_ratio": ratio("race_s"),
        "whole_s": [first.whole_s, second.whole_s],
        "whole_ratio": ratio("whole_s") if first.confirmed_s and second.confirmed_s else None,
        "cells": len(cells),
    }
    for kind in ("leaders", "winners"):
        told = [getattr(cell, kind) for cell in cells if getattr(cell, kind) is not None]
        said |= {
            f"{kind}_told": len(told),
            f"{kind}_the_same": sum(each.first == each.second for each in told),
            f"{kind}_alike": sum(each.alike for each in told),
            f"{kind}_alike_share": sum(each.alike for each in told) / len(cells) if cells else None,
        }
    return said


def document(output: Path, devices: Sequence[int], measured_on: dict[str, Any]) -> dict[str, Any]:
    """From the folders of the sweeps. Those that are missing or were cut off are told as far as they came."""
    sweeps: list[Sweep] = []
    states: list[State] = []
    for count in devices:
        folder = output / f"devices-{count}"
        if not (folder / COMMAND).is_file() or not (folder / "tuning").is_dir():
            continue
        setup, entries = read(folder / "tuning")
        states.append(fold(setup, entries))
        command = Command(**json.loads((folder / COMMAND).read_text(encoding="utf-8")))
        sweeps.append(sweep_of(command, states[-1], entries))
    said: dict[str, Any] = {"provenance": measured_on}
    if states:
        plan = states[0].setup.plan
        said |= {
            "space": states[0].setup.space.rpartition("/")[2],
            "suite": plan.suite,
            "timer": plan.timer.value,
            "configurations": len(states[0].setup.settings),
            "rules": asdict(states[0].setup.rules),
        }
    said["sweeps"] = [asdict(each) for each in sweeps]
    if len(sweeps) == 2:
        cells = cells_of(*states)
        said |= {"summary": summary(sweeps, cells), "cells": [asdict(each) for each in cells]}
    return said


def measure(space: Path, folder: Path, devices: int, more: Sequence[str], limit_s: float) -> Command:
    """One sweep, which is interrupted at the limit as by Ctrl-C; what was measured until then is in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cudadent42", "tune", "run", str(space)]
    command += ["--fleet", f"local:{devices}", "--output-dir", str(folder / "tuning"), *more]
    began, began_s = datetime.now(timezone.utc), time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            process.wait(max(0.0, limit_s - _CLOSING_S))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSING_S)
            process.kill()
            process.wait()
    told = Command(
        devices, began.isoformat(timespec="milliseconds"), time.monotonic() - began_s, process.returncode
    )
    (folder / COMMAND).write_text(json.dumps(asdict(told), indent=2) + "\n", encoding="utf-8")
    return told


def write(output: Path, devices: Sequence[int], measured_on: dict[str, Any]) -> dict[str, Any]:
    """``FILE``, and what it says."""
    text = json.dumps(document(output, devices, measured_on), indent=2)
    (output / FILE).write_text(text + "\n", encoding="utf-8")
    told: dict[str, Any] = json.loads(text)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("space", type=Path)
    parser.add_argument("--devices", default="1,2", help="of two sweeps, by a comma, in the order to measure")
    parser.add_argument("--seconds", type=float, default=3600.0, help="that both sweeps may take together")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, whose devices are sets of cores")
    parser.add_argument("--read", action="store_true", help="measure nothing: only read what is there")
    parser.add_argument("--output", type=Path, required=True)
    given, more = parser.parse_known_args()
    devices = [int(each) for each in given.devices.split(",")]
    if given.read:
        before = json.loads((given.output / FILE).read_text(encoding="utf-8"))
        print(json.dumps(write(given.output, devices, before["provenance"]).get("summary"), indent=2))
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    measured_on = provenance(given.device)
    if given.device != "cpu":
        subprocess.run([sys.executable, "-c", _WARM], check=True)
    more += ["--device", given.device]
    for count in devices:
        left_s = given.seconds - (time.monotonic() - began_s)
        told = measure(given.space, given.output / f"devices-{count}", count, more, left_s)
        print(told, flush=True)
        said = write(given.output, devices, measured_on)
    print(json.dumps(said.get("summary"), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
