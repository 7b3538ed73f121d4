"""What a tuning does next: a pure function of its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cudadent42.decisions.racing import Leaving, Row, leader_of, leaving, unseparated
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import CaseState, Job, State, jobs_of


@dataclass(frozen=True)
class Compile:
    """Arms whose code is not known yet."""

    arms: tuple[str, ...]


@dataclass(frozen=True)
class Race:
    job: Job


@dataclass(frozen=True)
class Decide:
    """A rung is measured."""

    case: str
    rung: int
    leader: str
    left: tuple[Leaving, ...]


@dataclass(frozen=True)
class Settle:
    """A race is over."""

    case: str
    leader: str
    unseparated: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Confirm:
    case: str
    arm: str
    attempt: int


Step = Compile | Race | Decide | Settle | Confirm


def next_step(state: State, cases: Collection[str] | None = None) -> Step | None:
    """None where nothing is left to do, of these cases (``Case.id``) or of all.

    The cases take turns, a rung each, so that where a budget ends the tuning, all have come equally far.
    """
    missing = tuple(arm for arm in state.setup.arms if arm not in state.compiled)
    if missing:
        return Compile(missing)
    waiting = [case for case in state.cases.values() if not case.finished]
    for case in sorted((case for case in waiting if cases is None or case.case in cases), key=_turn):
        return _step(state, case)
    return None


def _turn(case: CaseState) -> tuple[bool, int]:
    """A race that is over is confirmed before another goes on."""
    return case.settled is None, case.rung


def _step(state: State, case: CaseState) -> Step:
    rules = state.setup.rules
    if case.settled is not None:
        return Confirm(case.case, case.settled.leader, case.confirmations + 1)
    if DEFAULT not in case.alive:
        reason = case.out.get(DEFAULT) or case.pruned.get(DEFAULT) or "the default cannot be raced"
        return Settle(case.case, DEFAULT, (), f"the default cannot be raced: {reason}")
    if len(case.alive) == 1:
        return Settle(case.case, DEFAULT, (), "no other arm is left")
    jobs = jobs_of(state, case) if case.rung < len(rules.rungs) else []
    if jobs:
        return Race(jobs[0])
    rows = rows_of(case)
    arms = len(case.raced) - 1
    if case.rung == len(rules.rungs):
        leader = leader_of(rows, DEFAULT)
        near = unseparated(rows, leader, DEFAULT, arms, rules)
        reason = "the last rung is measured"
        return Settle(case.case, leader, tuple(near), reason)
    gone = leaving(rows, DEFAULT, arms, rules)
    left = {each.arm for each in gone}
    staying = {arm: row for arm, row in rows.items() if arm not in left}
    return Decide(case.case, case.rung, leader_of(staying, DEFAULT), tuple(gone))


def rows_of(case: CaseState) -> Mapping[str, Row]:
    """Of the arms that are raced."""
    return {arm: case.rows.get(arm, {}) for arm in case.alive}
