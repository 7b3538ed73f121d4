"""What verification keeps from being timed."""

from __future__ import annotations

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
