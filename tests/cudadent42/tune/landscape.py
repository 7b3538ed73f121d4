"""A space of hundreds of configurations whose latencies follow a rule, as those of kernels do.

They are smooth in each parameter, parameters depend on each other, and conditions forbid a part.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from simulated import CASES, Simulated, setup

from cudadent42.base.observer import Quiet
from cudadent42.decisions.racing import Rules
from cudadent42.tune.coordinator import Coordinator, Limits
from cudadent42.tune.engine import OnResult
from cudadent42.tune.grammar import Value
from cudadent42.tune.journal import Search, Setup, TuningJournal
from cudadent42.tune.prune import CompiledArm
from cudadent42.tune.search import propose
from cudadent42.tune.space import Space, parse_space
from cudadent42.tune.state import Job, State

SPACE = """
schema_version = 1
name = "landscape"
kernel = "cudadent42[portable]"
where = "BLOCK_M * BLOCK_N <= 16384 and (not WIDE or BLOCK_N >= 32)"
[space]
BLOCK_M = [16, 32, 48, 64, 96, 128, 192]
BLOCK_N = [16, 32, 48, 64, 96, 128]
STAGES = [1, 2, 3, 4]
WIDE = [true, false]
ORDER = ["rows", "tiles", "heads"]
"""


def space() -> Space:
    return parse_space(SPACE, Path("landscape.toml"))


@dataclass(frozen=True)
class Landscape:
    """Gains over the default, by settings."""

    best: Mapping[str, Value]
    weights: Mapping[str, float]
    top: float = 0.10
    rough: float = 0.004
    """Standard deviation of what follows no rule."""
    seed: int = 0

    def gain(self, settings: Mapping[str, Value]) -> float:
        loss = 0.0
        for name, values in _PARAMETERS.items():
            at, to = values.index(settings[name]), values.index(self.best[name])
            if isinstance(values[0], int) and not isinstance(values[0], bool):
                loss += self.weights[name] * (at - to) ** 2
            else:
                loss += self.weights[name] * (at != to)
        # Tiles share what there is of registers.
        past = sum(
            _PARAMETERS[name].index(settings[name]) - _PARAMETERS[name].index(self.best[name])
            for name in ("BLOCK_M", "BLOCK_N")
        )
        loss += self.weights["both"] * max(0, past) ** 2
        own = random.Random(f"{self.seed}/{sorted(settings.items())}").gauss(0.0, self.rough)
        return self.top - loss - abs(own)


_PARAMETERS = space().parameters


def landscape(seed: int) -> Landscape:
    """One drawn by chance, whose best configuration meets the conditions."""
    chance = random.Random(seed)
    best = dict(chance.choice(list(space().configurations())).settings)
    weights = {name: chance.uniform(0.005, 0.03) for name in _PARAMETERS} | {
        "both": chance.uniform(0.0, 0.01)
    }
    return Landscape(best, weights, seed=seed)


def best_gain(of: Landscape) -> float:
    return max(of.gain(arm.settings) for arm in space().configurations())


class Exploring(Simulated):
    """An `Engine` of a landscape for each case."""

    def __init__(self, lands: Mapping[str, Landscape], spread: float = 0.005) -> None:
        super().__init__(spread=spread)
        self.lands = lands
        self.settings: Mapping[str, Mapping[str, Value]] = {}

    def take(self, setup: Setup) -> None:
        self.settings = setup.settings

    def compile(self, arm: str) -> CompiledArm:
        return CompiledArm(arm, dict.fromkeys(self.lands, f"code of {arm}"))

    def race(self, job: Job, *, run: str, seed: int, on_result: OnResult) -> None:
        self.gains = {arm: self.lands[job.case].gain(self.settings[arm]) for arm in job.arms}
        super().race(job, run=run, seed=seed, on_result=on_result)

    def confirm(self, case, arm, *, blocks, run, seed, within_s):  # type: ignore[no-untyped-def]
        self.gains = {arm: self.lands[case].gain(self.settings[arm])}
        return super().confirm(case, arm, blocks=blocks, run=run, seed=seed, within_s=within_s)


def about(seed: int, cases: int = 1, search: Search | None = None) -> Setup:
    base = setup(arms=0, cases=CASES[:cases], rules=Rules(margin=0.01))
    return replace(base, plan=replace(base.plan, seed=seed), search=search or Search(), regions=())


def explore(folder: Path, engine: Exploring, setup: Setup, limits: Limits | None = None) -> State:
    """A tuning that searches, to its end."""
    with TuningJournal(folder, setup) as journal:
        return Coordinator(
            folder, journal, setup, limits or Limits(), Quiet(), lambda state: propose(space(), state, folder)
        ).run(engine)
