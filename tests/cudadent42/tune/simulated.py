"""An engine whose arms have latencies that a test gives them: everything else of a tuning is the real thing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cudadent42.base.errors import LabError
from cudadent42.base.observer import Quiet
from cudadent42.decisions.racing import Rules
from cudadent42.model.records import Plan, Verdict
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.tune.coordinator import Coordinator, Limits
from cudadent42.tune.engine import Block, Confirmation, OnResult, Unfit
from cudadent42.tune.journal import SCHEMA_VERSION, Device, Setup, TuningJournal
from cudadent42.tune.prune import CompiledArm, Target
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import Job, State

CASES = (
    AttentionCase("short", "fp32", 1, 2, 2, 64, 64, 32),
    AttentionCase("long", "fp32", 1, 2, 2, 512, 512, 32),
)


def setup(arms: int = 8, cases: tuple[AttentionCase, ...] = CASES, rules: Rules | None = None) -> Setup:
    names = [DEFAULT, *(f"BLOCK={number}" for number in range(arms))]
    return Setup(
        schema_version=SCHEMA_VERSION,
        version="0",
        space="space.toml",
        space_digest="0",
        kernel="kernel.toml",
        kernel_digest="0",
        arms={name: f"{name}.toml" for name in names},
        settings={name: {"BLOCK": number} for number, name in enumerate(names[1:])},
        regions=("seqlen_q", "seqlen_k"),
        plan=Plan("unit", "cpu", cases, "default.toml", ("default.toml",), repeats=12, warmup=0, seed=1),
        rules=rules or Rules(rungs=(6, 18), margin=0.02),
        target=Target("cpu"),
        device=Device("a CPU"),
    )


@dataclass
class Simulated:
    """An `Engine`."""

    gains: Mapping[str, float] = field(default_factory=dict)
    """How much faster than the default an arm is, as a share; 0 unless said."""
    spread: float = 0.005
    same: tuple[str, ...] = ()
    """Arms of the default's machine code."""
    wrong: Mapping[str, str] = field(default_factory=dict)
    """Arms that cannot be raced, with the reason."""
    failing: int = 0
    """How many of the next jobs end with an error in their second block."""
    confirmed_gains: Mapping[str, float] | None = None
    """What confirmations measure; as ``gains`` unless said."""
    hurried: int = 0
    """How many of the next confirmations the time ends."""
    blocks: int = 0
    jobs: list[tuple[str, int, int]] = field(default_factory=list)
    confirming_blocks: list[int] = field(default_factory=list)
    """That confirmations were asked for."""

    def take(self, setup: Setup) -> None:
        return

    def compile(self, arm: str) -> CompiledArm:
        code = "code of default" if arm in self.same else f"code of {arm}"
        return CompiledArm(arm, {case.id: code for case in CASES})

    def race(self, job: Job, *, run: str, seed: int, on_result: OnResult) -> None:
        chance = random.Random(seed)
        self.jobs.append((job.name, job.attempt, seed))
        for arm in (DEFAULT, *job.arms):
            if arm in self.wrong:
                on_result(Unfit(arm, self.wrong[arm]))
        if DEFAULT in self.wrong:
            return
        for number in range(job.blocks):
            if self.failing and number == 1:
                self.failing -= 1
                raise LabError("the worker died")
            shared = chance.gauss(1.0, self.spread)
            latencies = {
                arm: shared / (1 + self.gains.get(arm, 0.0)) * chance.gauss(1.0, self.spread)
                for arm in (DEFAULT, *job.arms)
                if arm not in self.wrong
            }
            self.blocks += 1
            on_result(Block(number, latencies, ""))

    def confirm(
        self, case: str, arm: str, *, blocks: int, run: str, seed: int, within_s: float | None
    ) -> Confirmation:
        self.confirming_blocks.append(blocks)
        if self.hurried:
            self.hurried -= 1
            return Confirmation(1.0, 0.9, 1.1, Verdict.UNDECIDED, False, "too few blocks", cut_short=True)
        gains = self.gains if self.confirmed_gains is None else self.confirmed_gains
        ratio = 1 + gains.get(arm, 0.0)
        low, high = ratio - 0.01, ratio + 0.01
        verdict = Verdict.FASTER if low > 1.02 else Verdict.UNDECIDED
        holds = verdict is Verdict.FASTER
        return Confirmation(ratio, low, high, verdict, holds, "" if holds else f"measured as {verdict.value}")


def races(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "races").iterdir())


def tune(folder: Path, engine: Simulated, about: Setup | None = None, limits: Limits | None = None) -> State:
    about = about or setup()
    with TuningJournal(folder, about) as journal:
        return Coordinator(folder, journal, about, limits or Limits(), Quiet()).run(engine)
