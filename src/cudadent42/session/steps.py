"""What a user does with a session: start it, work at a checkpoint, go on to the next, note, end it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.runs.changes import count
from cudadent42.session import folder as folders
from cudadent42.session import protocol as protocols
from cudadent42.session import tree as trees
from cudadent42.session.clock import Clock
from cudadent42.session.desk import (
    BudgetReachedError,
    Desk,
    GateFailedError,
    ended_of,
    stop_reason,
    take_back,
)
from cudadent42.session.events import (
    SCHEMA_VERSION,
    Attempted,
    Decision,
    End,
    Ended,
    Kept,
    Noted,
    Passed,
    Profiled,
    Reverting,
    Settings,
    Started,
    Warned,
    WorkEnded,
    WorkOutcome,
    WorkStarted,
)
from cudadent42.session.folder import Session
from cudadent42.session.judging import gate_of, judge
from cudadent42.session.lock import locked
from cudadent42.session.protocol import Work
from cudadent42.session.state import (
    BUDGET_RULE,
    PROFILE_RULE,
    Attempt,
    AttemptOutcome,
    CheckpointState,
    RunRecord,
    gate_rule,
)
from cudadent42.session.workshop import Judgement, Workshop
from cudadent42.version import __version__

Asks = Callable[[str], bool | None]
"""Asked whether a failed change is to be reverted; None where nobody can be asked."""


@dataclass(frozen=True)
class Choice:
    """What the user says beforehand."""

    override: str = ""
    """Why a rule is not followed; empty: it is."""
    revert: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Step:
    """What came of a step."""

    exit_code: ExitCode
    lines: tuple[str, ...]
    """For the user."""
    run: str = ""
    """The run folder, relative to the session's."""


def start(
    here: Path, name: str, protocol: str, settings: Settings, workshop: Workshop, clock: Clock
) -> Session:
    """Make a session for the project that ``here`` is in.

    Raises UsageError where another one is open, or the protocol, its gates or the settings are wrong. What the settings
    name is looked for from the current folder, which is to be the project's.
    """
    plan, text = protocols.load(protocol)
    beside = Path(protocol).parent if "/" in protocol or protocol.endswith(".toml") else Path()
    files = {folders.PROTOCOL: text.encode()}
    for checkpoint in plan.checkpoints:
        if checkpoint.gates:
            gates = protocols.gate_text(checkpoint.gates, beside)
            workshop.check_gates(gates, f"the gates of {checkpoint.name}", checkpoint.work, settings)
            files[f"{folders.GATES}/{checkpoint.name}.toml"] = gates.encode()
    settings = replace(
        settings,
        usd_per_hour=workshop.rate(settings.rate),
        budget_minutes=settings.budget_minutes or plan.budget_minutes,
    )
    workshop.check_entry(settings.entry, folders.project(here))
    tree = trees.find(here)
    commit = base = ""
    if tree is not None:
        commit, base = tree.head(), tree.snapshot()
        files[folders.BASE] = tree.patch(commit, base)
        bundle = tree.bundle(base)
        if bundle is not None:
            files[folders.SOURCE] = bundle
    sessions = folders.sessions_folder(here)
    try:
        sessions.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {sessions}: {error.strerror}; check its owner and the disk") from error
    with locked(sessions, name, clock()):
        other = folders.open_session(sessions)
        if other is not None:
            raise UsageError(
                f"the session {other.name} of this project is open: go on with it (`cudadent42 session status`), or "
                "end it with `cudadent42 session abort`; one at a time, or their changes cannot be told apart"
            )
        started = Started(SCHEMA_VERSION, __version__, name, plan, settings, commit, base)
        session = folders.create(sessions, name, started, files, clock)
        if tree is not None:
            tree.keep(f"{session.name}/0", base)
    return session


def work(desk: Desk, choice: Choice, asks: Asks) -> Step:
    """Do the work of the current checkpoint."""
    current = _current(desk)
    kind = current.plan.work
    if kind is Work.DOCUMENT:
        return _document(desk)
    pending = desk.state.pending
    if pending is not None and choice.revert:
        return _revert(desk, pending)
    if kind is Work.CHANGE and choice.revert and _reverted_already(desk):
        return Step(ExitCode.PASS, (f"attempt {desk.state.attempts[-1].number} is taken back already",))
    _within_budget(desk, choice)
    if kind is Work.MEASURE:
        return _measure(desk, current)
    if kind is Work.PROFILE:
        return _profile(desk, current)
    return _change(desk, current, choice, asks)


def advance(desk: Desk, choice: Choice) -> Step:
    """Check the current checkpoint's gate and go on to the next one. Raises GateFailedError where it does not hold."""
    current = _current(desk)
    name = current.plan.name
    if current.plan.work is not Work.DOCUMENT:
        _within_budget(desk, choice)
    try:
        code, why = gate_of(desk, current, bool(choice.override))
    except UsageError as puzzle:  # a gate that cannot be judged holds no more than one that fails
        if not choice.override:
            raise
        code, why = puzzle.exit_code, (str(puzzle),)
    if code is not ExitCode.PASS:
        if not choice.override:
            if desk.state.stopped_by:
                why = (*why, *_stopped(desk))
            error = GateFailedError(
                "\n".join((f"the checkpoint {name} is not passed:", *(f"  {line}" for line in why)))
            )
            error.exit_code = code
            raise error
        desk.override(gate_rule(name), choice.override)
    desk.record(Passed(name))
    following = desk.state.current
    if following is None:
        desk.record(Ended(End.FINISHED))
        return replace(_document(desk), lines=("the session is finished", *_report_lines(desk)))
    return Step(ExitCode.PASS, (*why, f"{name} passed; next: {following.plan.name}. {following.plan.goal}"))


def note(desk: Desk, text: str) -> Step:
    """Keep a remark of the user's for the report."""
    if not text.strip():
        raise UsageError("the note is empty; expected what was seen or learnt, in a sentence")
    desk.record(Noted(text.strip()))
    return Step(ExitCode.PASS, ("noted",))


def abort(desk: Desk, reason: str) -> Step:
    """End the session before its last checkpoint. Everything stays, the source too."""
    if desk.state.end is not None:
        raise UsageError(f"the session {desk.path.name} has ended already ({desk.state.end.end.value})")
    desk.record(Ended(End.ABORTED, reason))
    return replace(_document(desk), lines=("the session is ended", *_report_lines(desk)))


def _current(desk: Desk) -> CheckpointState:
    current = desk.state.current
    if desk.state.end is not None or current is None:
        raise UsageError(
            f"the session {desk.path.name} has ended; begin another with `cudadent42 session start`"
        )
    return current


def _within_budget(desk: Desk, choice: Choice) -> None:
    try:
        desk.check_budget()
    except BudgetReachedError:
        desk.record_budget()
        if not choice.override:
            raise
        desk.override(BUDGET_RULE, choice.override)


# ---------------------------------------------------------------- work


def _measure(desk: Desk, current: CheckpointState) -> Step:
    run = desk.next_run(current.plan.name)
    settings = desk.state.started.settings
    _do(
        desk,
        WorkStarted(current.plan.name, run),
        lambda: desk.workshop.measure(settings, desk.path / run, desk.observer),
    )
    judgement = judge(desk, current, run)
    desk.learn(run)
    return _step(judgement, run, (_result(desk),))


def _profile(desk: Desk, current: CheckpointState) -> Step:
    measured = desk.state.measured()
    if measured is None:
        raise UsageError("there is no finished run to profile; pass the baseline first")
    said: list[str] = []

    def diagnose() -> None:
        said.append(desk.workshop.diagnose(desk.path / measured.run, desk.observer))
        desk.record(Profiled(measured.run, said[0]))

    _do(desk, WorkStarted(current.plan.name, ""), diagnose)
    desk.learn(measured.run)
    return Step(ExitCode.PASS, tuple(said), measured.run)


def _change(desk: Desk, current: CheckpointState, choice: Choice, asks: Asks) -> Step:
    pending = desk.state.pending
    commit = desk.tree.snapshot()
    if pending is not None and choice.keep:
        desk.record(Kept(pending.number, failed=True))  # whatever it was to become, it has not passed
        if desk.tree.same(commit, desk.local(pending.commit)):
            return Step(ExitCode.PASS, (f"attempt {pending.number} is kept, and is the parent of the next",))
        pending = None
    if pending is not None and desk.tree.same(commit, desk.local(pending.commit)):
        if pending.outcome is AttemptOutcome.FAILED:
            raise UsageError(
                f"attempt {pending.number} did not pass and is still in the source: take it back with --revert, keep "
                "it with --keep, or change something"
            )
        _profiled_first(desk, pending.number, choice)
        attempt = pending  # it was cut off: race it again
    else:
        parent = desk.local(desk.state.parent)
        if desk.tree.same(commit, parent):
            raise UsageError(
                "nothing changed since the parent; change one thing in the source, then run again"
            )
        _profiled_first(desk, len(desk.state.attempts) + 1, choice)
        attempt = _attempt(desk, parent, commit)
    run = desk.next_run(f"{current.plan.name}-{attempt.number}")
    settings, parent = desk.state.started.settings, desk.local(attempt.parent)
    _do(
        desk,
        WorkStarted(current.plan.name, run, attempt.number),
        lambda: desk.workshop.race(settings, desk.project, parent, commit, desk.path / run, desk.observer),
    )
    judgement = judge(desk, current, run, attempt.number, settles=not choice.override)
    desk.learn(run)
    lines = (f"attempt {attempt.number}: {attempt.description}", _result(desk))
    if judgement.decision is Decision.PASSED:
        desk.record(Kept(attempt.number, failed=False))
        return _step(judgement, run, lines)
    if judgement.stopped_by and choice.override:
        desk.override(f"end by the gate {judgement.stopped_by}", choice.override, attempt.number)
    step = _offer(desk, desk.state.attempts[-1], _step(judgement, run, lines), choice, asks)
    return replace(step, lines=(*step.lines, *_stopped(desk))) if desk.state.stopped_by else step


def _stopped(desk: Desk) -> tuple[str, ...]:
    """End the session by the gate that says so."""
    from cudadent42.session import report

    reason = stop_reason(desk.state.stopped_by)
    desk.record(Ended(End.ABORTED, reason))
    report.write(desk.path)
    return (f"{reason}; everything is kept, and the report is {desk.path / 'report.html'}",)


def _profiled_first(desk: Desk, attempt: int, choice: Choice) -> None:
    """Far below the baseline one thing is badly wrong, and guessing at it costs more than looking.

    An override is for one attempt: who guesses again has to say why again.
    """
    baseline, below = desk.state.baseline, desk.state.started.protocol.profile_below
    speedup = None if baseline is None else baseline.speedup
    if baseline is None or speedup is None or speedup >= below or desk.state.profiled is not None:
        return
    if desk.state.profile_overridden(attempt):
        return
    diagnosis = desk.workshop.known_diagnosis(desk.path / baseline.run)  # by `doctor`, outside of the session
    if diagnosis:
        desk.record(Profiled(baseline.run, diagnosis))
        return
    if choice.override:
        desk.override(PROFILE_RULE, choice.override, attempt)
        return
    message = (
        f"refused to optimise before profiling: the baseline's speed-up is {speedup:.2f}x, below {below:g}x. "
        "Look first (the profile checkpoint, or `cudadent42 doctor` on its run folder), or give --override REASON, "
        "which is for this attempt"
    )
    desk.record(Warned(message))
    raise GateFailedError(message)


def _attempt(desk: Desk, parent: str, commit: str) -> Attempt:
    """Put a new change on record: its diff first, then the event that names it."""
    number = len(desk.state.attempts) + 1
    folders.write_file(desk.attempt_file(number), desk.tree.patch(parent, commit))
    desk.tree.keep(f"{desk.path.name}/{number}", commit)
    change = count(desk.tree.places(parent, commit))
    desk.record(Attempted(number, desk.state.parent, commit, change.things, change.describe()))
    if change.things > 1:
        desk.warn(
            f"{change.describe()} changed since the parent; more than one. A function that is touched "
            "counts as one, and so does a constant with another value. Documentation and tests do not count."
        )
    return desk.state.attempts[-1]


def _offer(desk: Desk, attempt: Attempt, step: Step, choice: Choice, asks: Asks) -> Step:
    """What is to become of a change that did not pass."""
    question = f"attempt {attempt.number} did not pass; take its change back?"
    wish = True if choice.revert else False if choice.keep else asks(question)
    if wish is None:
        hint = f"{question} session run --revert takes it back, --keep keeps it"
        return replace(step, lines=(*step.lines, hint))
    if wish:
        return replace(step, lines=(*step.lines, *_revert(desk, attempt).lines))
    desk.record(Kept(attempt.number, failed=True))
    return replace(step, lines=(*step.lines, f"attempt {attempt.number} is kept, although it did not pass"))


def _revert(desk: Desk, attempt: Attempt) -> Step:
    desk.tree.to_revert(
        desk.local(attempt.parent), desk.local(attempt.commit)
    )  # refuses before anything is begun
    desk.record(Reverting(attempt.number))
    paths = take_back(desk, attempt.number)
    said = f"attempt {attempt.number} is taken back ({', '.join(paths) or 'nothing was left of it'})"
    return Step(ExitCode.PASS, (f"{said}; its diff is kept in {desk.attempt_file(attempt.number)}",))


def _reverted_already(desk: Desk) -> bool:
    """Whether the last change is gone from the source: also when a kill came between taking it back and saying so."""
    attempts = desk.state.attempts
    if not attempts or attempts[-1].outcome is not AttemptOutcome.REVERTED:
        return False
    return desk.tree.same(desk.tree.snapshot(), desk.local(desk.state.parent))


def _document(desk: Desk) -> Step:
    from cudadent42.session import report

    report.write(desk.path)
    return Step(ExitCode.PASS, _report_lines(desk))


def _report_lines(desk: Desk) -> tuple[str, ...]:
    lines = [f"report: {desk.path / 'report.html'}"]
    if not desk.state.notes and desk.state.end is None:
        lines.append("add what was learnt with `cudadent42 session note`, then `cudadent42 session next`")
    return tuple(lines)


def _do(desk: Desk, started: WorkStarted, work: Callable[[], None]) -> None:
    """Work with its beginning and its end on record, however it ends."""
    desk.record(started)
    folder = desk.path / started.run if started.run else None
    try:
        work()
    except BaseException as error:
        desk.record(ended_of(folder, error))
        if isinstance(error, BudgetReachedError):
            desk.record_budget()
        if isinstance(error, Exception):
            desk.learn(started.run)
        raise
    desk.record(WorkEnded(WorkOutcome.FINISHED, "", 0) if folder is None else ended_of(folder, None))


def _step(judgement: Judgement, run: str, lines: tuple[str, ...]) -> Step:
    return Step(ExitCode(judgement.exit_code), (*lines, *judgement.lines), run)


def _result(desk: Desk) -> str:
    run: RunRecord = desk.state.runs[-1]
    if run.speedup is None:
        return f"{run.run}: nothing to compare"
    interval = (
        f"95 % interval {run.ci_low:.3f} to {run.ci_high:.3f}"
        if run.ci_low and run.ci_high
        else "no interval"
    )
    return f"{run.run}: {run.verdict}, {run.speedup:.3f}x ({interval}), {run.samples} samples"
