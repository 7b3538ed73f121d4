"""What the fresh races of a winner on the machines of a fleet come to together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from cudadent42.base.errors import UsageError
from cudadent42.decisions.machines import MachineRatio, combine, deviation, is_far_off
from cudadent42.flows.pipeline import Outcome
from cudadent42.model.records import Verdict
from cudadent42.runs.run_folder import load_run
from cudadent42.tune.engine import Confirmation
from cudadent42.tune.journal import Confirmed, MachineConfirmed
from cudadent42.tune.machine import NO_VERDICT, judged
from cudadent42.tune.state import CaseState


def concluded(case: CaseState, margin: float) -> Confirmed:
    """One answer of all machines that confirmed the case's winner, of which there is one at least.

    A machine whose default takes far longer or shorter than on the others has no say.
    """
    defaults = {each.unit: each.default_ms for each in case.on_machines if each.default_ms > 0}
    trusted = [each for each in case.on_machines if not is_far_off(deviation(defaults, each.unit))]
    combined = combine(
        [MachineRatio(each.unit, each.ratio, each.low, each.high, each.verdict) for each in trusted], margin
    )
    # Faster on a machine, and yet it does not hold there: wrong, or something speaks against it.
    wrong = next((each.reason for each in trusted if each.verdict is Verdict.FASTER and not each.holds), "")
    holds = combined.verdict is Verdict.FASTER and not wrong
    if holds:
        reason = f"confirmed {combined.words}"
    else:
        reason = wrong or f"measured as {combined.verdict.value} {combined.words}{_refusals(trusted)}"
    return Confirmed(
        case=case.case,
        arm=trusted[0].arm,
        attempt=max(each.attempt for each in trusted),
        run=trusted[0].run,
        ratio=combined.ratio,
        low=combined.low,
        high=combined.high,
        verdict=combined.verdict,
        holds=holds,
        reason=reason,
        machines=combined.machines,
        evidence=tuple(each.run for each in trusted),
    )


def _refusals(results: Sequence[MachineConfirmed]) -> str:
    """Why machines gave no verdict at all, each reason once: a disturbed race says nothing of the winner."""
    reasons = dict.fromkeys(each.reason for each in results if each.reason.startswith(NO_VERDICT))
    return f" ({'; '.join(reasons)})" if reasons else ""


def judged_folder(folder: Path, planned: int) -> Confirmation:
    """A run folder as a confirmation. Raises UsageError where it is not whole."""
    run = load_run(folder)
    if run.results is None or run.verify is None:
        raise UsageError(f"{folder} has no results: {run.manifest.error or 'it was cut short'}")
    result = judged(Outcome(folder, run.verify, run.results), planned)
    latencies = [sample.latency_ms for sample in run.samples if sample.implementation == run.plan.baseline]
    return replace(result, default_ms=median(latencies) if latencies else 0.0)
