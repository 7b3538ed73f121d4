"""What the report says, before it is a page: pure functions of a tuning's state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudadent42.decisions.machines import POOLED_FROM
from cudadent42.decisions.racing import gain, tail_of
from cudadent42.model import text
from cudadent42.tune.journal import Confirmed
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import CaseState, State
from cudadent42.tune.table import least_certain, winning_areas

Row = tuple[str, ...]

_SHOWN_ARMS = 6
"""Names in one cell of a table."""


@dataclass(frozen=True)
class CaseRow:
    case: str
    outcome: str
    arm: str
    verdict: str
    """A word of `Verdict`; empty where nothing was confirmed."""
    ratio: str
    interval: str
    near: str
    """What was not separated from the leader."""


@dataclass(frozen=True)
class View:
    name: str
    state: State
    headline: str
    subline: str
    cases: tuple[CaseRow, ...]
    regions: tuple[Row, ...]
    """Number, configuration, where, ratio, interval, cases. The figures are those of its least certain case."""
    departures: tuple[Row, ...]
    """Case, configuration, rung, blocks, why, ratio, interval, than."""
    out: tuple[Row, ...]
    """Case, configuration, reason."""
    pruned: tuple[Row, ...]
    """Reason, how many on each case."""


def view_of(folder: Path, state: State) -> View:
    """What there is to say of the tuning in ``folder``."""
    return View(
        name=folder.name,
        state=state,
        headline=headline(state),
        subline=spent(state),
        cases=tuple(case_row(state, case) for case in state.cases.values()),
        regions=tuple(_regions(state)),
        departures=tuple(_departures(state)),
        out=tuple((case.case, arm, why) for case in state.cases.values() for arm, why in case.out.items()),
        pruned=tuple(_pruned(state)),
    )


def headline(state: State) -> str:
    """The result in a sentence."""
    done = [case for case in state.cases.values() if case.finished]
    winners = state.winners
    cases = text.plural(len(state.cases), "case")
    if not state.finished:
        why = f": {state.paused}" if state.paused else ""
        return f"{len(done)} of {cases} finished{why}"
    if not winners:
        return f"Nothing was confirmed to be faster than the default in {cases}"
    arms = {each.arm for each in winners}
    return (
        f"Faster than the default in {len(winners)} of {cases}, by "
        f"{text.plural(len(arms), 'configuration')}, {_where(winners)}"
    )


def _where(winners: Sequence[Confirmed]) -> str:
    machines = min(each.machines for each in winners)
    if machines >= POOLED_FROM:
        return f"on this kind of device, by at least {machines} of them"
    return "on this device" if machines == 1 else f"on each of {machines} devices or more"


def spent(state: State) -> str:
    """Time, money and blocks."""
    parts = [
        f"{state.spent_s / 60:.1f} minutes",
        *([f"${state.spent_usd:.2f}"] if state.spent_usd else []),
        text.plural(state.arm_blocks, "block of a configuration", "blocks of configurations"),
        f"{text.plural(len(state.setup.arms) - 1, 'configuration')} beside the default",
        *_searched(state),
        state.setup.device.name,
    ]
    return " · ".join(parts)


def _searched(state: State) -> list[str]:
    """How far a search has come."""
    if state.setup.search is None:
        return []
    rounds = f"proposed in {text.plural(state.rounds, 'round')}"
    return [f"{rounds}, until {state.searched}" if state.searched else rounds]


def case_row(state: State, case: CaseState) -> CaseRow:
    """How a case stands, in words."""
    settled, confirmed = case.settled, case.confirmed
    if confirmed is not None:
        outcome = "confirmed" if confirmed.holds else f"not confirmed: {confirmed.reason}"
        interval = text.interval(confirmed.low, confirmed.high)
        verdict, ratio = confirmed.verdict.value, text.ratio(confirmed.ratio)
    else:
        verdict, (ratio, interval) = "", _racing(state, case)
        outcome = _unconfirmed(state, case)
    near = settled.unseparated if settled is not None else ()
    return CaseRow(case.case, outcome, case.leader, verdict, ratio, interval, _named(near))


def _unconfirmed(state: State, case: CaseState) -> str:
    if not case.raced:
        return "not compiled yet"
    if case.settled is None:
        return f"rung {case.rung + 1} of {len(state.setup.rules.rungs)}, {len(case.alive) - 1} still raced"
    if case.settled.leader == DEFAULT:
        return f"the default stays: {case.settled.reason}"
    if not case.finished:
        return "to be confirmed"
    return f"its confirmation failed: {case.failed[-1] if case.failed else 'workers went away'}"


def _racing(state: State, case: CaseState) -> tuple[str, str]:
    """Ratio and interval of the leader in the race, which favours it."""
    row = case.rows.get(case.leader, {})
    if case.leader == DEFAULT or not row:
        return "", ""
    estimate = gain(row, tail_of(state.setup.rules, len(case.raced) - 1))
    if not math.isfinite(estimate.half_width):
        return text.ratio(math.exp(estimate.centre)), ""
    return text.ratio(math.exp(estimate.centre)), text.interval(
        math.exp(estimate.low), math.exp(estimate.high)
    )


def _regions(state: State) -> list[Row]:
    rows: list[Row] = []
    for number, area in enumerate(winning_areas(state), 1):
        least = least_certain(state, area)
        where = [
            *(f"{name} {_value(value)}" for name, value in area.region.same.items()),
            *(_range(name, *ends) for name, ends in area.region.between.items()),
        ]
        rows.append(
            (
                str(number),
                area.winner,
                ", ".join(where),
                text.ratio(least.ratio),
                text.interval(least.low, least.high),
                ", ".join(area.cases),
            )
        )
    return rows


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _range(name: str, low: int, high: int) -> str:
    return f"{name} {low}" if low == high else f"{name} {low} to {high}"


def _departures(state: State) -> list[Row]:
    rows: list[Row] = []
    for case in state.cases.values():
        for departure in case.departed:
            left = departure.leaving
            bounds = text.interval(left.low, left.high) if math.isfinite(left.high) else ""
            rows.append(
                (
                    case.case,
                    left.arm,
                    str(departure.rung + 1),
                    str(departure.blocks),
                    left.cause.value,
                    text.ratio(left.ratio),
                    bounds,
                    left.than,
                )
            )
    return rows


def _pruned(state: State) -> list[Row]:
    reasons: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], str] = {}
    for case in state.cases.values():
        for arm, why in case.pruned.items():
            reasons[case.case, why] += 1
            example.setdefault((case.case, why), arm)
    return [(case, why, str(count), example[case, why]) for (case, why), count in reasons.items()]


def _named(arms: tuple[str, ...]) -> str:
    more = len(arms) - _SHOWN_ARMS
    return "; ".join(arms[:_SHOWN_ARMS]) + (f"; and {more} more" if more > 0 else "")
