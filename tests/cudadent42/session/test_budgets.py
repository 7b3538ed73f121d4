"""Where a session's time or money is spent: between its work and within it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quick
from acting import advance, begin, work

from cudadent42.base.errors import ExitCode
from cudadent42.session import steps
from cudadent42.session.desk import BudgetReachedError
from cudadent42.session.events import WorkOutcome
from cudadent42.session.folder import load
from cudadent42.session.words import status_lines


def test_time_is_up_between_and_within_work(project: Path, workshop: Any, clock: Any) -> None:
    path = begin(project, workshop, clock, budget_minutes=10.0)
    clock.pass_s(601)
    with pytest.raises(BudgetReachedError, match="10 minutes are spent"):
        work(path, workshop, clock)
    assert [budget.what for budget in load(path).state.budgets] == ["minutes"]
    assert BudgetReachedError.exit_code is ExitCode.GATE_FAILED
    work(path, workshop, clock, steps.Choice(override="one more"))
    assert load(path).state.measured() is not None


def test_an_override_of_the_budget_counts_for_its_step_only(project: Path, workshop: Any, clock: Any) -> None:
    path = begin(project, workshop, clock, budget_minutes=10.0)
    assert "over budget" not in status_lines(load(path), clock())[0]
    clock.pass_s(601)
    assert status_lines(load(path), clock())[0].endswith(", over budget")
    work(path, workshop, clock, steps.Choice(override="one more"))
    assert "over budget, overridden" in status_lines(load(path), clock())[0]
    with pytest.raises(BudgetReachedError, match="10 minutes are spent"):
        advance(path, workshop, clock)
    with pytest.raises(BudgetReachedError, match="10 minutes are spent"):
        work(path, workshop, clock)
    advance(path, workshop, clock, override="to see its gate")
    assert [item.reason for item in load(path).state.overridden] == ["one more", "to see its gate"]


def test_money_is_spent_within_work(project: Path, workshop: Any, clock: Any) -> None:
    path = begin(project, workshop, clock, rate="dear", budget_usd=2.0)

    class Slow(quick.QuickWorkshop):  # type: ignore[name-defined,misc]
        def _run(self, folder: Path, observer: Any, speedup: float | None = None) -> None:
            class Passing(quick.Quiet):  # type: ignore[name-defined,misc]
                def advance(self, fraction: float, what: str) -> None:
                    clock.pass_s(61)
                    observer.advance(fraction, what)

            super()._run(folder, Passing(), speedup)

    with pytest.raises(BudgetReachedError, match=r"\$2\.00 are spent"):
        work(path, Slow(), clock)
    run = load(path).state.runs[0]
    assert run.outcome is WorkOutcome.INTERRUPTED
    assert run.samples == 4
    assert [budget.what for budget in load(path).state.budgets] == ["usd"]
