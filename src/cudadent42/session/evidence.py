"""What a session offers to lessons: its numbers, its warnings, and the runs in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.patterns.evidence import Log, PatternEvidence, of_run
from cudadent42.session.state import State


def of_state(state: State, run: Path | None = None) -> PatternEvidence:
    """Metrics of the session, its warnings as a log, and one of its run folders."""
    metrics = {
        "machine_starts": float(len(state.stints)),
        "failed_builds_in_a_row": float(state.failed_builds),
    }
    if state.attempts:
        metrics["changed_things"] = float(state.attempts[-1].things)
    evidence = PatternEvidence((Log("session", "\n".join(state.warnings)),), metrics)
    if run is not None:
        try:
            own = of_run(run)
        except UsageError:  # the run was cut off before it had a manifest
            return evidence
        # What changed is what the session compared, not what the lab's tree differs in from its commit.
        metrics = {name: value for name, value in own.metrics.items() if name != "changed_things"}
        evidence = replace(own, metrics=metrics) | evidence
    if state.profiled is not None:
        evidence |= PatternEvidence(metrics={"profiled": 1.0})
    return evidence


def of_session(folder: Path) -> PatternEvidence:
    """A session folder, with the last of its runs."""
    from cudadent42.session.folder import load

    session = load(folder)
    last = session.state.runs[-1] if session.state.runs else None
    return of_state(session.state, folder / last.run if last is not None and last.run else None)
