"""Who does the work of a tuning on one device: the protocol. It hands over whole blocks, and decides nothing.

What reaches many devices is `cudadent42.fleet.engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cudadent42.model.records import Verdict
from cudadent42.tune.journal import Setup
from cudadent42.tune.prune import CompiledArm
from cudadent42.tune.state import Job


@dataclass(frozen=True)
class Block:
    """A whole block of a job."""

    number: int
    latencies_ms: dict[str, float]
    """By arm, the default's among them."""
    flags: str


@dataclass(frozen=True)
class Unfit:
    """An arm that cannot be raced on a job's case."""

    arm: str
    reason: str


@dataclass(frozen=True)
class Confirmation:
    """What a fresh race came to."""

    ratio: float
    low: float
    high: float
    verdict: Verdict
    holds: bool
    """It was faster, right, and nothing was found that speaks against it."""
    reason: str
    cut_short: bool = False
    """The time ended it before all blocks were measured."""
    default_ms: float = 0.0
    """Median latency of the default; 0 where it was not looked at."""


OnResult = Callable[[Block | Unfit], None]
"""Told of each as it happens; measuring waits for it. What it raises ends the job."""


class Engine(Protocol):
    def take(self, setup: Setup) -> None:
        """The tuning's setup, with the arms that were proposed since."""
        ...

    def compile(self, arm: str) -> CompiledArm:
        """Raises LabError where this machine cannot compile at all."""
        ...

    def race(self, job: Job, *, run: str, seed: int, on_result: OnResult) -> None:
        """Measures a job into the run folder ``run``, relative to the tuning's. Raises LabError."""
        ...

    def confirm(
        self, case: str, arm: str, *, blocks: int, run: str, seed: int, within_s: float | None
    ) -> Confirmation:
        """Races an arm against the default in a new process, on other inputs. Raises LabError."""
        ...
