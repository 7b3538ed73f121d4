"""What a tuning does next: a pure function of its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cudadent42.decisions.confirmation import blocks_to_confirm
from cudadent42.decisions.machines import POOLED_FROM
from cudadent42.decisions.racing import (
    BETWEEN_MACHINES,
    Leaving,
    Row,
    gains_too_little,
    is_decided,
    leader_of,
    leaving,
    unseparated,
)
from cudadent42.tune.jobs import in_jobs, jobs_of
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import CaseState, Job, State


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
    blocks: int = 0
    """That confirm the leader; 0 where it is the default."""


@dataclass(frozen=True)
class Confirm:
    case: str
    arm: str
    attempt: int
    blocks: int


@dataclass(frozen=True)
class Propose:
    """A search is to say what is raced next, or that it is over."""


Step = Compile | Race | Decide | Settle | Confirm | Propose


def next_step(state: State) -> Step | None:
    """None where nothing is left to do.

    A case goes on to its end before the next begins, so that where a budget ends the tuning, what it has paid for can
    be installed. While a search proposes, each waits after the first rung for the others.
    """
    missing = tuple(arm for arm in state.setup.arms if arm not in state.compiled)
    if missing:
        return Compile(missing)
    waiting = [case for case in state.cases.values() if not case.finished]
    for case in sorted(waiting, key=_turn):
        steps = steps_of(state, case)
        if steps:
            return steps[0]
    return Propose() if waiting else None


def _turn(case: CaseState) -> tuple[bool, int]:
    """A race that is over is confirmed before another goes on, and whoever has come far before who begins."""
    return case.settled is None, -case.rung


def steps_of(state: State, case: CaseState) -> tuple[Step, ...]:
    """What an unfinished case waits for: all jobs of its rung, or one other step. None while it waits for what a search
    proposes."""
    jobs = () if case.settled is not None else _races(state, case)
    if not jobs and state.searches and case.settled is None and DEFAULT in case.alive:
        return ()
    return jobs or (_step(state, case),)


def _races(state: State, case: CaseState) -> tuple[Race, ...]:
    if DEFAULT not in case.alive or len(case.alive) == 1 or case.rung >= len(state.setup.rules.rungs):
        return ()
    if _is_decided(state, case):
        return ()
    return tuple(Race(job) for job in jobs_of(state, case))


def _step(state: State, case: CaseState) -> Step:
    rules = state.setup.rules
    if case.settled is not None:
        return Confirm(case.case, case.settled.leader, case.confirmations + 1, case.settled.blocks)
    if DEFAULT not in case.alive:
        reason = case.out.get(DEFAULT) or case.pruned.get(DEFAULT) or "the default cannot be raced"
        return Settle(case.case, DEFAULT, (), f"the default cannot be raced: {reason}")
    if len(case.alive) == 1:
        return Settle(case.case, DEFAULT, (), "no other arm is left")
    rows = rows_of(case)
    arms = len(case.raced) - 1
    between = _between(case)
    if case.rung == len(rules.rungs) or _is_decided(state, case):
        leader = leader_of(rows, DEFAULT)
        reason = _why(state, case)
        if leader != DEFAULT and gains_too_little(rows[leader], rules, _between_confirming(case)):
            reason = f"{leader} leads, and is not better than the default by the margin"
            leader = DEFAULT
        near = tuple(unseparated(rows, leader, DEFAULT, arms, rules, between))
        blocks = 0 if leader == DEFAULT else _confirming_blocks(state, case, leader)
        return Settle(case.case, leader, near, reason, blocks)
    gone = leaving(rows, DEFAULT, arms, rules, between)
    left = {each.arm for each in gone}
    staying = {arm: row for arm, row in rows.items() if arm not in left}
    return Decide(case.case, case.rung, leader_of(staying, DEFAULT), tuple(gone))


def _is_decided(state: State, case: CaseState) -> bool:
    """Before a rung begins, where the default is raced."""
    if case.rung == 0 or in_jobs(case):
        return False
    return is_decided(rows_of(case), DEFAULT, len(case.raced) - 1, state.setup.rules, _between(case))


def _confirming_blocks(state: State, case: CaseState, leader: str) -> int:
    """All arms that were raced tell how large the noise is, those too that left."""
    others = [row for arm, row in case.rows.items() if arm not in (leader, DEFAULT)]
    return blocks_to_confirm(case.rows[leader], others, state.setup.rules)


def _why(state: State, case: CaseState) -> str:
    rules = state.setup.rules
    if case.rung == len(rules.rungs):
        return "the last rung is measured"
    if len(case.alive) == 2:
        return "no other arm is left, and it beats the default by the margin"
    more = f"{100 * rules.near * rules.margin:.3g} %"
    return f"it beats the default by the margin, and no other arm can be better by {more}"


def _between(case: CaseState) -> float:
    """Of machines, where a fleet races."""
    return BETWEEN_MACHINES if case.default_ms else 0.0


def _between_confirming(case: CaseState) -> float:
    """Of few machines each has to find the winner better, those too that raced it."""
    return _between(case) if len(case.default_ms) >= POOLED_FROM else 0.0


def rows_of(case: CaseState) -> Mapping[str, Row]:
    """Of the arms that are raced."""
    return {arm: case.rows.get(arm, {}) for arm in case.alive}
