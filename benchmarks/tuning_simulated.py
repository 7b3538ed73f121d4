"""Thousands of tunings' races and confirmations with measured noise: no kernel runs, the rules are the real ones.

    python benchmarks/tuning_simulated.py --sweeps 2000 --output benchmarks/results/<date>-tuning-simulated

Noise is drawn from what was measured: of the kernel of `tuning.py`, by ``--keep``, which takes the blocks of a tuning
whose race was one long rung (``--rungs 240``), and of implementations of an H200's run folder. A block's noise is what
all of its sides share, and what each has of its own; both are drawn from all that was measured.

The spaces: that of `tuning.py`; 24 configurations of which one is 6 % faster than the default, the next 5 %; 24 of
which six lie within 0.5 %; and 12 of the default's own speed. Each is raced by the rules of now, and by those of
before: rungs of 6, 18 and 54 blocks, a race that ends early only where one configuration is left, and 54 blocks that
confirm it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from provenance import provenance

from cudadent42.base.seeds import derived_seed
from cudadent42.decisions.compare import control_offset
from cudadent42.decisions.confirmation import blocks_to_confirm
from cudadent42.decisions.racing import (
    Rules,
    blocks_of,
    chunks,
    exhaustive,
    is_decided,
    leader_of,
    leaving,
)
from cudadent42.decisions.statistics import estimate_ratio
from cudadent42.decisions.verdicts import decide
from cudadent42.model.records import Verdict
from cudadent42.runs.run_folder import load_run
from cudadent42.tune.journal import ARMS_OF_A_JOB, BlockMeasured, read
from cudadent42.tune.space import DEFAULT

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
KERNEL_NOISE = RESULTS / "2026-11-23-cpu-tuning-simulated"
RUN_NOISE = RESULTS / "2026-11-20-h200-hopper"
PLANTED = 94
COSTS = (PLANTED, 103, 106, 110, 115, 120, 130)
MARGIN = 0.02
BEFORE_CONFIRMED = 54

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """Of log latencies: what a block's sides share, and what each has of its own."""

    shared: Floats
    own: Floats

    def block(self, chance: np.random.Generator, sides: int) -> Floats:
        return chance.choice(self.shared) + chance.choice(self.own, sides)


def noise_of(rows: Sequence[Floats]) -> Noise:
    """From groups (blocks, sides) of log latencies of the same implementations on the same case."""
    shared, own = [], []
    for row in rows:
        residuals = row - np.median(row, axis=0)
        middle = residuals.mean(axis=1)
        sides = residuals.shape[1]
        shared.append(middle)
        # What is left behind the mean of few sides is less than a side's own.
        own.append(((residuals - middle[:, None]) * math.sqrt(sides / (sides - 1))).ravel())
    return Noise(np.concatenate(shared), np.concatenate(own))


def kept(folder: Path) -> list[list[list[float]]]:
    """The blocks of a tuning, job by job: latencies in ms, the default's first."""
    jobs: dict[str, list[list[float]]] = defaultdict(list)
    for entry in read(folder)[1]:
        if isinstance(entry.event, BlockMeasured):
            arms = sorted(entry.event.latencies_ms, key=lambda arm: (arm != DEFAULT, arm))
            jobs[entry.event.job].append([round(entry.event.latencies_ms[arm], 6) for arm in arms])
    return list(jobs.values())


def of_run(folder: Path) -> Noise:
    blocks: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for sample in load_run(folder).samples:
        blocks[sample.case][sample.block][sample.implementation] = sample.latency_ms
    rows = []
    for of_case in blocks.values():
        sides = set.intersection(*(set(block) for block in of_case.values()))
        rows.append(np.log([[block[side] for side in sorted(sides)] for block in of_case.values()]))
    return noise_of(rows)


# ---------------------------------------------------------------- spaces


Space = Callable[[np.random.Generator], dict[str, float]]
"""By arm, the logarithm of its gain over the default."""


def of_benchmark(chance: np.random.Generator) -> dict[str, float]:
    return {f"COST={cost}": math.log(100 / cost) for cost in COSTS}


def of_24(chance: np.random.Generator) -> dict[str, float]:
    others = np.minimum(chance.normal(-0.03, 0.03, 22), 0.04)
    return {f"other-{number}": float(gain) for number, gain in enumerate(others)} | {
        "best": math.log(1.06),
        "next": math.log(1.05),
    }


def plateau(chance: np.random.Generator) -> dict[str, float]:
    others = np.minimum(chance.normal(-0.03, 0.03, 18), 0.03)
    near = {f"near-{number}": math.log(1.06 - 0.001 * number) for number in range(6)}
    return {f"other-{number}": float(gain) for number, gain in enumerate(others)} | near


def equal(chance: np.random.Generator) -> dict[str, float]:
    return {f"same-{number}": 0.0 for number in range(12)}


SPACES: Mapping[str, Space] = {
    "of tuning.py": of_benchmark,
    "24, one best": of_24,
    "24, six within 0.5 %": plateau,
    "12 as the default": equal,
}


# ---------------------------------------------------------------- one sweep


@dataclass(frozen=True)
class Came:
    """What one sweep came to."""

    leader: str
    arm_blocks: int
    race_blocks: int
    """With the default's."""
    confirmed: int
    """Blocks, of three sides each; 0 where the default leads."""
    installed: bool
    covered: bool
    """Whether the confirmation's interval holds the truth."""


def sweep(
    gains: Mapping[str, float],
    rules: Rules,
    noise: Noise,
    chance: np.random.Generator,
    confirming: int | None,
) -> Came:
    """``confirming``: blocks of a confirmation; None where its size follows from the race."""
    rows: dict[str, dict[str, float]] = {arm: {} for arm in (DEFAULT, *gains)}
    alive = list(gains)
    arm_blocks = race_blocks = 0
    for rung in range(len(rules.rungs)):
        for number, job in enumerate(chunks(alive, ARMS_OF_A_JOB)):
            for block in range(blocks_of(rules, rung)):
                own = noise.block(chance, len(job) + 1)
                for side, arm in enumerate(job, 1):
                    rows[arm][f"{rung}.{number}/{block}"] = gains[arm] + float(own[0] - own[side])
                arm_blocks += len(job)
                race_blocks += len(job) + 1
        gone = {each.arm for each in leaving(_of(rows, alive), DEFAULT, len(gains), rules)}
        alive = [arm for arm in alive if arm not in gone]
        if not alive or is_decided(_of(rows, alive), DEFAULT, len(gains), rules):
            break
    leader = leader_of(_of(rows, alive), DEFAULT)
    if leader == DEFAULT:
        return Came(leader, arm_blocks, race_blocks, 0, installed=False, covered=True)
    others = [row for arm, row in rows.items() if arm not in (leader, DEFAULT)]
    blocks = blocks_to_confirm(rows[leader], others, rules) if confirming is None else confirming
    sides = np.array([noise.block(chance, 3) for _ in range(blocks)])
    default, control, arm = np.exp(sides[:, 0]), np.exp(sides[:, 1]), np.exp(sides[:, 2] - gains[leader])
    estimate = estimate_ratio(default, arm, int(chance.integers(2**31)))
    offset = control_offset(estimate_ratio(default, control, int(chance.integers(2**31))), rules.margin)
    low, high = estimate.interval()
    return Came(
        leader,
        arm_blocks,
        race_blocks,
        blocks,
        decide(estimate, rules.margin, offset) is Verdict.FASTER,
        low <= math.exp(gains[leader]) <= high,
    )


def _of(rows: Mapping[str, dict[str, float]], alive: Sequence[str]) -> dict[str, dict[str, float]]:
    return {arm: rows[arm] for arm in (DEFAULT, *alive)}


# ---------------------------------------------------------------- many


@dataclass(frozen=True)
class Row:
    """Of one space with one noise, by one set of rules."""

    space: str
    noise: str
    rules: str
    sweeps: int
    blocks_share: float
    """Of the race's blocks of configurations, against all of them at the last rung."""
    timed_share: float
    """Of all that is timed, against that sweep with the default in each job and the same confirmation."""
    installed_near_best: int
    """Sweeps that installed the best configuration, or one within half the margin of it."""
    installed: int
    installed_without_gain: int
    """Configurations that are as fast as the default, or slower, and were installed."""
    confirming_blocks: float
    """In the median."""
    covered: float | None
    """Share of the confirmations whose interval held the truth; None where there were fewer than 500."""
    ends: dict[str, int]
    """Who led how often."""


LEAST_FOR_COVERAGE = 500


def many(space: str, named: str, noise: Noise, before: bool, sweeps: int, seed: int) -> Row:
    rules = Rules(rungs=(6, 18, 54), near=0.0, margin=MARGIN) if before else Rules(margin=MARGIN)
    chance = np.random.default_rng(derived_seed(seed, space, named))
    came: list[tuple[Came, float, float]] = []
    timed = exhaustive_timed = arms_timed = all_arms = 0
    for _ in range(sweeps):
        gains = SPACES[space](chance)
        one = sweep(gains, rules, noise, chance, BEFORE_CONFIRMED if before else None)
        came.append((one, max(0.0, *gains.values()), gains.get(one.leader, 0.0)))
        jobs = len(chunks(list(gains), ARMS_OF_A_JOB))
        arms_timed += one.arm_blocks
        all_arms += exhaustive(len(gains), rules)
        timed += one.race_blocks + 3 * one.confirmed
        exhaustive_timed += exhaustive(len(gains) + jobs, rules) + 3 * one.confirmed
    near = math.log(1 + MARGIN / 2)
    confirmed = [each for each, _, _ in came if each.confirmed]
    enough = len(confirmed) >= LEAST_FOR_COVERAGE
    return Row(
        space=space,
        noise=named,
        rules="before" if before else "now",
        sweeps=sweeps,
        blocks_share=arms_timed / all_arms,
        timed_share=timed / exhaustive_timed,
        installed_near_best=sum(one.installed and best - gain <= near + 1e-9 for one, best, gain in came),
        installed=sum(one.installed for one, _, _ in came),
        installed_without_gain=sum(one.installed and gain <= 0.0 for one, _, gain in came),
        confirming_blocks=float(np.median([each.confirmed for each in confirmed])) if confirmed else 0.0,
        covered=sum(each.covered for each in confirmed) / len(confirmed) if enough else None,
        ends=dict(Counter(_short(each.leader) for each, _, _ in came)),
    )


def _short(leader: str) -> str:
    return (
        leader if leader.startswith(("COST", "best", "next", "near", DEFAULT)) else leader.partition("-")[0]
    )


def noises() -> dict[str, Noise]:
    measured = json.loads((KERNEL_NOISE / "noise.json").read_text(encoding="utf-8"))
    both = {
        f"kernel of tuning.py, {how}": noise_of([np.log(rows) for rows in jobs])
        for how, jobs in measured.items()
    }
    return both | {f"rivals on an H200, {RUN_NOISE.name}": of_run(RUN_NOISE)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sweeps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--space", choices=list(SPACES), action="append")
    parser.add_argument(
        "--keep", nargs=2, metavar=("NAME", "TUNING"), help="only add its blocks to noise.json"
    )
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.keep:
        path = given.output / "noise.json"
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        document[given.keep[0]] = kept(Path(given.keep[1]))
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n")
        return 0
    path = given.output / "simulated.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    for space in given.space or list(SPACES):
        for named, noise in noises().items():
            for before in (True, False):
                row = asdict(many(space, named, noise, before, given.sweeps, given.seed))
                print(row, flush=True)
                rows = [each for each in rows if _key(each) != _key(row)] + [row]
            document = {"provenance": provenance("cpu"), "rows": rows}
            path.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["space"], row["noise"], row["rules"]


if __name__ == "__main__":
    sys.exit(main())
