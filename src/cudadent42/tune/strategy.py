"""Whether every configuration of a space is raced, or a search proposes some: decided before anything runs."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass

from cudadent42.base.errors import UsageError
from cudadent42.tune.journal import Search
from cudadent42.tune.space import DEFAULT, MOST_ARMS, MOST_EXHAUSTIVE, Arm, Space
from cudadent42.tune.wanted import Wanted

ARM_S = 2.0
"""That a configuration is reckoned to take on a case, in seconds: compiled, verified, and raced to the end of the first
rung. A small kernel takes that on a CPU; nothing is measured before there is a plan."""

SHARE = 0.5
"""Of a budget, that configurations may take; after them, the rest of the race and the confirmations have to fit."""


@dataclass(frozen=True)
class Strategy:
    search: Search | None
    """None where every configuration is raced."""
    why: str
    """The end of a sentence that begins with what is done."""
    instead: bool = False
    """A search would have been better, and there is none here."""


def choose(space: Space, cases: int, wanted: Wanted = Wanted.AUTO, budget_s: float | None = None) -> Strategy:
    """For so many cases."""
    if wanted is Wanted.OPTUNA:
        return Strategy(Search(), "as --search optuna asks for")
    if wanted is Wanted.EXHAUSTIVE:
        return Strategy(None, "as --search exhaustive asks for")
    count = sum(1 for _ in itertools.islice(space.configurations(), MOST_EXHAUSTIVE + 1))
    reckoned_s = count * cases * ARM_S
    if count > MOST_ARMS:
        why = f"as more than {MOST_ARMS} configurations meet `where`"
    elif budget_s is not None and reckoned_s > SHARE * budget_s:
        why = (
            f"as all {count} would take about {reckoned_s / 60:.3g} minutes of a budget of {budget_s / 60:.3g}, "
            f"at {ARM_S:.0f} s for one on a case"
        )
    else:
        return Strategy(None, f"as there are {count}, and up to {MOST_ARMS} are")
    if count > MOST_EXHAUSTIVE or can_search():
        return Strategy(Search(), why)
    end = ", and the budget ends it where it is used up" if budget_s is not None else ""
    return Strategy(
        None,
        f"as a search needs Optuna, which is not installed: case after case, all {count}{end}",
        instead=True,
    )


def can_search() -> bool:
    """Whether Optuna is installed."""
    return importlib.util.find_spec("optuna") is not None


def begins_with(space: Space, strategy: Strategy) -> tuple[Arm, ...]:
    """The arms that a tuning knows from its start, the default first. Raises UsageError as `Space.arms`."""
    if strategy.search is None:
        return space.arms(MOST_EXHAUSTIVE)
    if next(space.configurations(), None) is None:
        raise UsageError(f"{space.path}: no configuration meets `where`; loosen a condition")
    return (Arm(DEFAULT, {}),)
