"""A session's state in words and as a document."""

from __future__ import annotations

from typing import Any

from cudadent42.base.serialise import encode
from cudadent42.session.clock import Instant, now
from cudadent42.session.folder import Session
from cudadent42.session.lock import holder_of
from cudadent42.session.protocol import Work
from cudadent42.session.state import BUDGET_RULE, AttemptOutcome, State, tick

_COMMANDS = {
    Work.MEASURE: "cudadent42 session run",
    Work.PROFILE: "cudadent42 session run",
    Work.CHANGE: "change one thing in the source, then cudadent42 session run",
    Work.DOCUMENT: "cudadent42 session note TEXT, then cudadent42 session next",
}


def as_of(state: State, here: Instant) -> State:
    """The state with the time up to now, where the meter still runs: on the machine that it last ran on."""
    return tick(state, here) if state.last.same_stint(here) else state


def status_document(session: Session, here: Instant | None = None) -> dict[str, Any]:
    """The state for programs. Minutes and dollars are up to now."""
    state = as_of(session.state, here or now())
    settings, current = state.started.settings, state.current
    holder = holder_of(session.path.parent)
    return {
        "session": session.name,
        "folder": str(session.path),
        "status": state.end.end.value if state.end else "open",
        "checkpoint": current.plan.name if current and not state.end else None,
        "do": next_step(state),
        "minutes": round(state.seconds / 60, 3),
        "budget_minutes": settings.budget_minutes,
        "usd": round(state.usd, 4),
        "budget_usd": settings.budget_usd,
        "working": holder is not None and holder.session == session.name,
        "cut_off": state.working.run if state.working is not None and holder is None else None,
        "checkpoints": [
            {
                "name": item.plan.name,
                "work": item.plan.work.value,
                "planned_minutes": item.plan.minutes,
                "minutes": round(item.seconds / 60, 3),
                "passed": item.passed,
                "overridden": item.overridden,
            }
            for item in state.checkpoints
        ],
        "attempts": encode(state.attempts),
        "runs": encode(state.runs),
        "warnings": list(state.warnings),
        "overridden": encode(state.overridden),
        "lessons": dict(state.lessons),
        "notes": list(state.notes),
        "clock_jumps_s": list(state.jumps_s),
        "machines": len(state.stints),
    }


def status_lines(session: Session, here: Instant | None = None) -> list[str]:
    """The state for people."""
    state = as_of(session.state, here or now())
    settings = state.started.settings
    spent = f"{state.seconds / 60:.1f} of {settings.budget_minutes:g} min"
    if settings.usd_per_hour or settings.budget_usd is not None:
        limit = f" of ${settings.budget_usd:.2f}" if settings.budget_usd is not None else ""
        spent += f", ${state.usd:.2f}{limit} ({settings.rate})"
    if state.spent:
        overridden = any(item.rule == BUDGET_RULE for item in state.overridden)
        spent += ", over budget, overridden" if overridden else ", over budget"
    lines = [f"{session.name}: {state.end.end.value if state.end else 'open'}, {spent}"]
    for index, item in enumerate(state.checkpoints):
        mark = (
            "overridden"
            if item.overridden
            else "passed"
            if item.passed
            else "now"
            if _now(state, index)
            else ""
        )
        lines.append(
            f"  {item.plan.name:12} {item.seconds / 60:6.1f} of {item.plan.minutes:g} min  {mark}".rstrip()
        )
    for attempt in state.attempts:
        figure = (
            f", {attempt.run.speedup:.3f}x {attempt.run.verdict}"
            if attempt.run and attempt.run.speedup
            else ""
        )
        lines.append(
            f"  attempt {attempt.number}: {outcome_word(attempt.outcome)}{figure}; {attempt.description}"
        )
    lines += [f"  warning: {text}" for text in state.warnings]
    if state.working is not None:
        holder = holder_of(session.path.parent)
        lines.append(
            f"  {'at work' if holder else 'cut off'}: {state.working.run or state.working.checkpoint}"
        )
    step = next_step(state)
    return [*lines, f"next: {step}"] if step else lines


def next_step(state: State) -> str:
    """What the user is to do; empty where the session has ended."""
    current = state.current
    if state.end is not None or current is None:
        return ""
    pending = state.pending
    if current.plan.work is Work.CHANGE and pending is not None:
        if pending.outcome is AttemptOutcome.FAILED:
            return (
                "cudadent42 session run --revert (or --keep), or change something and cudadent42 session run"
            )
        return "cudadent42 session run"
    if _done(state):
        return "cudadent42 session next"
    return _COMMANDS[current.plan.work]


def outcome_word(outcome: AttemptOutcome) -> str:
    return {
        AttemptOutcome.OPEN: "not decided",
        AttemptOutcome.PASSED: "passed",
        AttemptOutcome.FAILED: "did not pass",
        AttemptOutcome.KEPT: "did not pass, kept",
        AttemptOutcome.REVERTED: "taken back",
    }[outcome]


def _done(state: State) -> bool:
    """Whether the current checkpoint's work is done, whatever its gates say."""
    current = state.current
    if current is None:
        return False
    if current.plan.work is Work.MEASURE:
        return state.measured(current.plan.name) is not None
    if current.plan.work is Work.PROFILE:
        return state.profiled is not None
    if current.plan.work is Work.CHANGE:
        return any(attempt.outcome is AttemptOutcome.PASSED for attempt in state.attempts)
    return bool(state.notes)


def _now(state: State, index: int) -> bool:
    return state.end is None and index == state.position
