"""Fleets that are simulated: intervals across machines, and tunings by many GPUs with the real coordinator and journal.

    python benchmarks/fleet.py --output benchmarks/results/<date>-fleet

What is simulated stands in ``tests/cudadent42/tune/virtual_fleet.py``: hosts of eight GPUs, whose speeds differ by 3 %
and one in a hundred of which takes half as long again; drift, spikes, neighbours; a configuration that suits one GPU
better than another; workers that vanish, results that come late or twice. What decides and writes is the real thing.

* coverage: how often the 95 % interval over 4, 8 and 16 machines holds the truth, by Student's t and by a bootstrap;
* large: 1,000 GPUs and two hours of their time, in a space that they cannot finish; processor seconds, idle GPUs;
* kills: real processes, ended by SIGKILL: a coordinator, or one of three workers whose tasks take a moment;
* budgets: many small fleets with limits of time and money drawn by chance; how often one was passed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests/cudadent42/tune"))

from simulated import setup  # noqa: E402
from virtual_fleet import Nature, VirtualFleet  # noqa: E402

from cudadent42.base.observer import Quiet  # noqa: E402
from cudadent42.decisions.machines import CONFIDENCE, interval  # noqa: E402
from cudadent42.decisions.racing import Rules  # noqa: E402
from cudadent42.fleet.engine import Message  # noqa: E402
from cudadent42.fleet.folder import FOLDER, FolderEngine  # noqa: E402
from cudadent42.fleet.queue import Queue  # noqa: E402
from cudadent42.fleet.task import Block, Returned, Task, Worker  # noqa: E402
from cudadent42.fleet.worker import Identity, work  # noqa: E402
from cudadent42.model.records import MachineReport, Verdict  # noqa: E402
from cudadent42.operations.attention.case import AttentionCase  # noqa: E402
from cudadent42.tune.coordinator import Limits  # noqa: E402
from cudadent42.tune.engine import Confirmation  # noqa: E402
from cudadent42.tune.fleet import FleetCoordinator  # noqa: E402
from cudadent42.tune.journal import FILES, Setup, TuningJournal, read  # noqa: E402
from cudadent42.tune.space import DEFAULT  # noqa: E402
from cudadent42.tune.state import State, fold  # noqa: E402

HOURS = 2.0

Interval = Callable[[Sequence[Sequence[float]], random.Random], tuple[float, float]]


def by_t(blocks: Sequence[Sequence[float]], chance: random.Random) -> tuple[float, float]:
    _, low, high = interval([sum(row) / len(row) for row in blocks], CONFIDENCE)
    return low, high


def by_bootstrap(blocks: Sequence[Sequence[float]], chance: random.Random) -> tuple[float, float]:
    """Machines are drawn, and blocks within them."""
    generator = np.random.default_rng(chance.getrandbits(32))
    table = np.array(blocks)
    machines, each = table.shape
    drawn = generator.integers(machines, size=(400, machines))
    within = generator.integers(each, size=(400, machines, each))
    means = table[drawn[:, :, None], within].mean(axis=(1, 2))
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def by_pooled_blocks(blocks: Sequence[Sequence[float]], chance: random.Random) -> tuple[float, float]:
    """As if blocks of one machine had nothing in common."""
    _, low, high = interval([value for row in blocks for value in row], CONFIDENCE)
    return low, high


def coverage(method: Interval, machines: int, between: float, fleets: int) -> float:
    chance = random.Random(f"{machines}/{between}")
    truth = math.log(1.03)
    held = 0
    for _ in range(fleets):
        suits = [chance.gauss(0.0, between) for _ in range(machines)]
        blocks = [[truth + own + chance.gauss(0.0, 0.005) for _ in range(24)] for own in suits]
        low, high = method(blocks, chance)
        held += low <= truth <= high
    return held / fleets


def coverages(fleets: int) -> list[dict[str, Any]]:
    rows = []
    for machines in (4, 8, 16):
        for between in (0.0, 0.002, 0.005):
            row = {"machines": machines, "between": between, "fleets": fleets}
            row["t"] = coverage(by_t, machines, between, fleets)
            row["bootstrap"] = coverage(by_bootstrap, machines, between, fleets // 5)
            row["pooled_blocks"] = coverage(by_pooled_blocks, machines, between, fleets // 5)
            print(row, flush=True)
            rows.append(row)
    return rows


def tune(about: Setup, fleet: VirtualFleet, limits: Limits, folder: Path) -> State:
    with TuningJournal(folder, about, fleet.clock) as journal:
        coordinator = FleetCoordinator(
            folder, journal, about, limits, Quiet(), clock=fleet.clock, judge=fleet.judge
        )
        return coordinator.run(fleet, fleet.compile([case.id for case in about.plan.cases]))


class Clocked(VirtualFleet):
    """Knows what inventing a world took, which is no work of the coordinator's."""

    processor_s = 0.0

    def wait(self, seconds: float) -> Sequence[Message]:
        began_s = time.process_time()
        messages = super().wait(seconds)
        self.processor_s += time.process_time() - began_s
        return messages


def large(gpus: int, cases: int, arms: int) -> dict[str, Any]:
    chance = random.Random(0)
    shapes = tuple(AttentionCase(f"c{n}", "fp32", 1, 1, 1, 16 + n, 16 + n, 32) for n in range(cases))
    about = setup(arms=arms, cases=shapes, rules=Rules(rungs=(6, 18, 54), margin=0.01))
    gains = {arm: chance.gauss(-0.05, 0.05) for arm in about.settings}
    nature = Nature(
        gains=gains, lost_per_hour=0.05, failing=0.002, twice=0.01, late=0.5, start_s=12.0, arm_block_s=1.0
    )
    fleet = Clocked(gpus, nature, 1, about.arms, about.device.name)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name) / "t"
        began_s, wall_s = time.process_time(), time.monotonic()
        state = tune(
            about, fleet, Limits(budget_s=HOURS * 3600, usd=4.0 * gpus * HOURS, usd_per_hour=4.0), folder
        )
        spent_s, wall_s = time.process_time() - began_s, time.monotonic() - wall_s
        size = (folder / FILES.entries).stat().st_size
        same = fold(*read(folder)) == state
    working = sum(each.busy_s for each in fleet.machines.values())
    present = sum(each.present_s(fleet.now_s) for each in fleet.machines.values())
    blocks = [job.blocks for job in state.jobs.values()]
    result = {
        "gpus": gpus,
        "cases": cases,
        "configurations": arms,
        "virtual_hours": state.spent_s / 3600,
        "jobs_done": fleet.done,
        "mean_job_s": working / max(1, fleet.done),
        "processor_s": spent_s,
        "processor_s_of_the_invented_world": fleet.processor_s,
        "processor_s_of_coordinator_and_journal": spent_s - fleet.processor_s,
        "wall_s": wall_s,
        "idle_share": 1 - working / present,
        "spent_usd": state.spent_usd,
        "limit_usd": 4.0 * gpus * HOURS,
        "journal_bytes": size,
        "state_is_the_journal_s": same,
        "jobs_with_more_blocks_than_asked": sum(each > 36 for each in blocks),
        "quarantined": len(state.quarantined),
        "workers_lost": sum(each.dead for each in fleet.machines.values()),
        "paused": state.paused,
        "nature": told(nature),
    }
    print(json.dumps(result, indent=2), flush=True)
    return result


BUDGETS_NATURE = Nature(gains={"BLOCK=3": 0.1}, lost_per_hour=20.0, late=0.5, twice=0.1, failing=0.02)


def told(nature: Nature) -> dict[str, Any]:
    """What a part invented; its many gains are drawn by chance from the seed."""
    return asdict(replace(nature, gains={}))


def budgets(seeds: int) -> dict[str, Any]:
    about = setup(arms=13, rules=Rules(rungs=(6, 18), margin=0.02))
    passed = finished = 0
    nearest = 0.0
    for seed in range(seeds):
        chance = random.Random(seed)
        limits = Limits(chance.uniform(60, 600), chance.uniform(0.1, 2.0), 4.0)
        fleet = VirtualFleet(chance.randrange(1, 17), BUDGETS_NATURE, seed, about.arms, about.device.name)
        with tempfile.TemporaryDirectory() as name:
            own = replace(about, plan=replace(about.plan, seed=seed))
            state = tune(own, fleet, limits, Path(name) / "t")
        assert limits.budget_s is not None
        assert limits.usd is not None
        shares = state.spent_s / limits.budget_s, state.spent_usd / limits.usd
        nearest = max(nearest, *shares)
        passed += max(shares) > 1
        finished += state.finished
    result = {
        "seeds": seeds,
        "passed": passed,
        "finished": finished,
        "largest_share": nearest,
        "nature": told(BUDGETS_NATURE),
    }
    print(result, flush=True)
    return result


def invented(folder: Path, seat: int, about: Setup) -> None:
    """A real worker on the real folder, whose tasks take a moment and whose figures are drawn."""
    os.closerange(3, 1024)  # the journal's lock is its coordinator's alone
    arms = {implementation: arm for arm, implementation in about.arms.items()}

    def perform(task: Task) -> Returned:
        chance = random.Random(task.plan.seed)
        blocks = []
        for number in range(task.plan.repeats):
            time.sleep(0.002)
            level = chance.gauss(1.0, 0.002)
            latencies = {
                name: level / (1.1 if arms[name] == "BLOCK=3" else 1.0) * chance.gauss(1.0, 0.002)
                for name in task.plan.implementations
            }
            blocks.append(Block(number, latencies))
        return Returned(task.key, worker.name, 0.1, tuple(blocks))

    worker = Worker(f"w{seat}-{os.getpid()}", "here", "cpu", about.device.name, f"{folder}/{seat}", "")
    work(
        folder, Queue(folder / FOLDER), Identity(worker, MachineReport((), "", {})), Quiet(), perform=perform
    )


class Forking(FolderEngine):
    """Three workers, each begun again when it is gone. They outlive who began them."""

    def __init__(self, root: Path, about: Setup) -> None:
        super().__init__(root)
        self._root, self._about = root, about
        self._workers: dict[int, Any] = {}

    def wait(self, seconds: float) -> Sequence[Message]:
        for seat in range(3):
            process = self._workers.get(seat)
            if process is None or not process.is_alive():
                if process is not None:
                    for name in list(self.queue.workers()):
                        if name.endswith(f"-{process.pid}"):
                            self.queue.forget(name)
                process = multiprocessing.get_context("fork").Process(
                    target=invented, args=(self._root, seat, self._about)
                )
                process.start()
                with (self._root / "processes").open("a") as file:
                    file.write(f"{process.pid}\n")
                self._workers[seat] = process
        return super().wait(min(seconds, 0.2))


def right(folder: Path, planned: int) -> Confirmation:
    return Confirmation(1.1, 1.09, 1.11, Verdict.FASTER, True, "", default_ms=1.0)


def coordinate(folder: Path, about: Setup) -> None:
    with TuningJournal(folder, about) as journal:
        coordinator = FleetCoordinator(folder, journal, about, Limits(), Quiet(), judge=right)
        cases = [case.id for case in about.plan.cases]
        coordinator.run(Forking(folder, about), VirtualFleet.compile(cases))
    os._exit(0)


def kills(count: int, of_a_tuning: int = 10) -> dict[str, Any]:
    """Real processes, ended by SIGKILL at moments drawn by chance: the coordinator, or a worker of it."""
    chance = random.Random(0)
    about = setup(arms=13, rules=Rules(rungs=(6, 18, 54), margin=0.02))
    context = multiprocessing.get_context("fork")
    tally: Counter[str] = Counter()
    for tuning in range(count // of_a_tuning):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "t"
            before = b""
            process = None
            for _ in range(of_a_tuning):
                if process is None or not process.is_alive():
                    process = context.Process(target=coordinate, args=(folder, about))
                    process.start()
                time.sleep(chance.uniform(0.05, 1.0))
                listed = folder / "processes"
                workers = [int(line) for line in listed.read_text().split()] if listed.is_file() else []
                alive = [number for number in workers if Path(f"/proc/{number}").is_dir()]
                victim = chance.choice([process.pid, process.pid, *alive[-3:]])
                tally["coordinators" if victim == process.pid else "workers"] += 1
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                if victim == process.pid:
                    process.join()
                    journal = folder / FILES.entries
                    after = journal.read_bytes() if journal.is_file() else b""
                    tally["lost"] += not after.startswith(before[: before.rfind(b"\n") + 1])
                    before = after
            if process is not None:
                process.kill()
                process.join()
            last = context.Process(target=coordinate, args=(folder, about))
            last.start()
            last.join()
            state = fold(*read(folder))
            tally["tunings"] += 1
            tally["went_on_to_the_end"] += last.exitcode == 0 and state.finished
            tally["right"] += {winner.arm for winner in state.winners} == {"BLOCK=3"}
            for case in state.cases.values():
                for arm, row in case.rows.items():
                    gone = [each.blocks for each in case.departed if each.leaving.arm == arm]
                    wanted = gone[0] if gone else about.rules.rungs[case.rung - 1]
                    if arm not in (DEFAULT, *case.out):
                        tally["blocks_missing"] += max(0, wanted - len(row))
                        tally["blocks_twice"] += max(0, len(row) - wanted)
            print(tuning, dict(tally), flush=True)
    return dict(tally)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--fleets", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--arms", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--only", default="large,budgets,coverage,kills")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], Any]] = {
        "large": lambda: large(given.gpus, given.cases, given.arms),
        "budgets": lambda: budgets(given.seeds),
        "coverage": lambda: coverages(given.fleets),
        "kills": lambda: kills(given.kills),
    }
    document = {"provenance": provenance("cpu")}
    document |= {name: parts[name]() for name in given.only.split(",")}
    (given.output / "fleet.json").write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
