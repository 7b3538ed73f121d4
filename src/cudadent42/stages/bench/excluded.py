"""What is not timed, and why."""

from __future__ import annotations

from collections.abc import Mapping

from cudadent42.model.cases import Case
from cudadent42.model.records import Plan, VerifyReport


def not_timed(plan: Plan, verified: VerifyReport) -> dict[str, str]:
    """``case/implementation`` of the plan that must not be timed, with the reason.

    An implementation that fails an adversarial input is not timed on any case of that dtype.
    """
    reasons: dict[str, str] = {}
    cases = {case.id for case in plan.cases}
    for result in verified.cases:
        if result.passed:
            continue
        if result.case in cases:
            reasons.setdefault(
                f"{result.case}/{result.implementation}", f"failed verification: {result.detail}"
            )
            continue
        dtype = result.case.rpartition("/")[2]
        for case in plan.cases:
            if case.dtype == dtype:
                reason = f"failed verification on {result.case}: {result.detail}"
                reasons.setdefault(f"{case.id}/{result.implementation}", reason)
    for case in plan.cases:
        for name in plan.implementations:
            key = f"{case.id}/{name}"
            for skipped in (key, name):
                if skipped in verified.skipped:
                    reasons.setdefault(key, verified.skipped[skipped])
    return reasons


def not_timed_anywhere(plan: Plan, verified: VerifyReport, unusable: Mapping[str, str]) -> dict[str, str]:
    """As `not_timed`, with implementations that cannot be used, by their reason."""
    reasons = not_timed(plan, verified)
    for name, reason in unusable.items():
        reasons |= {f"{case.id}/{name}": reason for case in plan.cases}
    return reasons


def not_timed_on(plan: Plan, case: Case, unfit: Mapping[str, str]) -> dict[str, str]:
    """Why implementations, or the whole case, cannot be timed."""
    keys = {name: f"{case.id}/{name}" for name in plan.implementations}
    reasons = {key: unfit[key] for key in keys.values() if key in unfit}
    rivals = [key for name, key in keys.items() if name != plan.baseline]
    if keys[plan.baseline] in reasons:
        reasons[case.id] = f"the baseline {plan.baseline} cannot be timed: {reasons[keys[plan.baseline]]}"
    elif rivals and all(key in reasons for key in rivals):
        reasons[case.id] = reasons[rivals[0]]
    return reasons
