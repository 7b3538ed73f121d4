"""Whether a checkpoint's gates hold, and what speaks against it."""

from __future__ import annotations

import math

from cudadent42.base.errors import ExitCode
from cudadent42.session.desk import Desk
from cudadent42.session.events import Decision, Judged
from cudadent42.session.protocol import Work
from cudadent42.session.state import AttemptOutcome, CheckpointState, RunRecord
from cudadent42.session.workshop import ATTEMPTS_PASSED, IMPROVEMENT, Judgement, SessionMetric


def judge(
    desk: Desk, current: CheckpointState, run: str, attempt: int | None = None, *, settles: bool = False
) -> Judgement:
    """Hold the checkpoint's gates against a run, and put that on record.

    ``settles``: a failed gate that ends sessions ends this one; otherwise the run may still be repeated.
    """
    gates = desk.gates_of(current.plan.name)
    if gates is None:
        judgement = Judgement(Decision.PASSED, ExitCode.PASS, ("no gates",))
    else:
        judgement = desk.workshop.judge(gates, desk.path / run, _extra_metrics(desk, run))
    ends = judgement.stopped_by if settles else ""
    desk.record(Judged(run, judgement.decision, judgement.exit_code, judgement.lines, attempt, ends))
    return judgement


def _extra_metrics(desk: Desk, run: str) -> dict[str, SessionMetric]:
    """``session.*``: what only the session knows."""
    record = next((item for item in reversed(desk.state.runs) if item.run == run), None)
    kept = sum(attempt.outcome is AttemptOutcome.PASSED for attempt in desk.state.attempts)
    return {
        IMPROVEMENT: improvement(record, desk.state.baseline),
        ATTEMPTS_PASSED: SessionMetric(float(kept)),
    }


def improvement(run: RunRecord | None, baseline: RunRecord | None) -> SessionMetric:
    """The speed-up of a run over that of the baseline. They were measured apart, so their errors add up, as squares of
    logarithms; and what either control shows beyond the margin, as it is: it is no chance that blocks average out."""
    if run is None or baseline is None or run.speedup is None or not baseline.speedup:
        return SessionMetric(math.nan)
    value = run.speedup / baseline.speedup
    ends = (run.ci_low, run.ci_high, baseline.ci_low, baseline.ci_high)
    if run is baseline or not all(ends) or run.speedup <= 0:
        return SessionMetric(value)
    low, high, base_low, base_high = (math.log(end) for end in ends if end)
    middle, base = math.log(run.speedup), math.log(baseline.speedup)
    down = math.hypot(middle - low, base_high - base)
    up = math.hypot(high - middle, base - base_low)
    own = (value * math.exp(low - middle), value * math.exp(high - middle))
    excess = (1.0 + run.control_excess) * (1.0 + baseline.control_excess)
    return SessionMetric(value, value * math.exp(-down) / excess, value * math.exp(up) * excess, own)


def gate_of(desk: Desk, current: CheckpointState, overridden: bool) -> tuple[ExitCode, tuple[str, ...]]:
    """Whether the checkpoint's gate holds, and what speaks against it. Where it is overridden no gate ends the
    session."""
    name, kind = current.plan.name, current.plan.work
    if kind is Work.PROFILE:
        return _either(
            desk.state.profiled is not None, "nothing was profiled yet; run `cudadent42 session run`"
        )
    if kind is Work.DOCUMENT:
        return _either(
            bool(desk.state.notes),
            "there is no note yet; `cudadent42 session note TEXT` says what was learnt",
        )
    if kind is Work.CHANGE:
        return _change_gate(desk)
    run = desk.state.measured(name)
    if run is None:
        return _either(False, "nothing was measured yet; run `cudadent42 session run`")
    changed = [item for item in desk.state.runs[desk.state.runs.index(run) :] if item.attempt is not None]
    if changed:
        return _either(
            False, "the source was changed after this was measured; run `cudadent42 session run` again"
        )
    judgement = judge(desk, current, run.run, settles=not overridden)
    return ExitCode(judgement.exit_code), judgement.lines


def _change_gate(desk: Desk) -> tuple[ExitCode, tuple[str, ...]]:
    pending = desk.state.pending
    if pending is not None:
        return ExitCode.GATE_FAILED, (
            f"attempt {pending.number} is {pending.outcome.value}; "
            "`cudadent42 session run` with --revert or --keep settles it",
            *(pending.run.lines if pending.run else ()),
        )
    passed = [attempt for attempt in desk.state.attempts if attempt.outcome is AttemptOutcome.PASSED]
    tried = len(desk.state.attempts)
    return _either(
        bool(passed), f"none of {tried} attempts passed its gates" if tried else "no change was raced yet"
    )


def _either(holds: bool, why: str) -> tuple[ExitCode, tuple[str, ...]]:
    return (ExitCode.PASS, ()) if holds else (ExitCode.GATE_FAILED, (why,))
