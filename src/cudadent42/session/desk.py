"""A session being worked on: locked, its log open, what was left undone put in order first."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cudadent42.base.errors import ExitCode, LabError, UsageError
from cudadent42.base.observer import Observer
from cudadent42.runs.sessions import EVENTS
from cudadent42.session import folder as folders
from cudadent42.session import tree as trees
from cudadent42.session.clock import Clock
from cudadent42.session.events import (
    End,
    Ended,
    Event,
    LessonsFired,
    Overridden,
    Reverted,
    Warned,
    WorkEnded,
    WorkOutcome,
)
from cudadent42.session.folder import Session
from cudadent42.session.lock import locked
from cudadent42.session.log import EventLog
from cudadent42.session.snapshots import local
from cudadent42.session.state import BUDGET_RULE, State, apply, tick
from cudadent42.session.tree import Tree
from cudadent42.session.workshop import Workshop


class GateFailedError(LabError):
    """A gate or a rule of the protocol stands in the way."""

    exit_code = ExitCode.GATE_FAILED


class BudgetReachedError(GateFailedError):
    """The session's time or money is spent."""


class Desk:
    """The one who writes into a session's log, for one step. Made by `at_work`."""

    def __init__(
        self, session: Session, log: EventLog, workshop: Workshop, observer: Observer, clock: Clock
    ) -> None:
        self.path = session.path
        self.project = folders.project(session.path)
        self.state: State = session.state
        self.workshop = workshop
        self.observer = observer
        self._session = session
        self._log = log
        self._clock = clock
        self._over_budget = False

    @functools.cached_property
    def tree(self) -> Tree:
        """The source under change. Raises UsageError outside of git."""
        tree = trees.find(self.project)
        if tree is None or not self.state.started.base:
            folder = self.path.parent.parent if tree is None else tree.root  # sessions lie in its `sessions`
            raise UsageError(
                f"{folder} was not a git repository with a commit when the session began; changes are told apart "
                "and taken back by git: make one (git init, git add, git commit), then start a new session"
            )
        return tree

    def record(self, event: Event) -> None:
        """Append the event, wait for the disk, and bring the state up to date."""
        entry = self._log.append(event)
        jumps = len(self.state.jumps_s)
        self.state = apply(tick(self.state, entry.at), entry)
        for jump in self.state.jumps_s[jumps:]:
            self.observer.note(
                f"the clock was set {'forward' if jump > 0 else 'back'} by {abs(jump):.0f} s since the last event; "
                "the session's minutes come from a clock that cannot be set"
            )

    def warn(self, text: str) -> None:
        self.record(Warned(text))
        self.observer.note(f"warning: {text}")

    def override(self, rule: str, reason: str, attempt: int | None = None) -> None:
        self.record(Overridden(rule, reason, attempt))
        self._over_budget = self._over_budget or rule == BUDGET_RULE
        self.observer.note(f"overridden: {rule} ({reason})")

    def next_run(self, checkpoint: str) -> str:
        return folders.next_run(Session(self.path, self._session.entries, self.state), checkpoint)

    def gates_of(self, checkpoint: str) -> Path | None:
        return self._session.gates_of(checkpoint)

    def check_budget(self) -> None:
        """Raises BudgetReachedError where time or money is spent and that was not overridden for this step."""
        if self._over_budget:
            return
        now = tick(self.state, self._clock())
        settings = self.state.started.settings
        if now.seconds / 60 >= settings.budget_minutes:
            raise BudgetReachedError(
                f"the session's {settings.budget_minutes:g} minutes are spent ({now.seconds / 60:.1f}); write its "
                "report with `cudadent42 session report`, or go on with --override REASON"
            )
        if settings.budget_usd is not None and now.usd >= settings.budget_usd:
            raise BudgetReachedError(
                f"the session's ${settings.budget_usd:.2f} are spent (${now.usd:.2f}); write its report with "
                "`cudadent42 session report`, or go on with --override REASON"
            )

    def record_budget(self) -> None:
        """Put on record that a budget is reached, once each."""
        recorded = {budget.what for budget in self.state.budgets}
        for budget in tick(self.state, self._clock()).spent:
            if budget.what not in recorded:
                self.record(budget)

    def learn(self, run: str = "") -> None:
        """Put on record which lessons apply to the session, and to one of its runs."""
        from cudadent42.patterns.lessons import usable
        from cudadent42.patterns.matching import match
        from cudadent42.session.evidence import of_state

        lessons, _ = usable()
        matches = match(of_state(self.state, self.path / run if run else None), lessons)
        learned = dict(self.state.lessons)
        new = {item.lesson.id: item.lesson.title for item in matches if item.lesson.id not in learned}
        if new:
            self.record(LessonsFired(new))

    def local(self, commit: str) -> str:
        """A snapshot's commit in this clone; see `snapshots.local`."""
        return local(self.tree, self.path, self.state, commit)

    def attempt_file(self, number: int) -> Path:
        return folders.attempt_file(self.path, number)


@contextmanager
def at_work(session: Session, workshop: Workshop, observer: Observer, clock: Clock) -> Iterator[Desk]:
    """The session, locked and in order: work whose process was killed is put on record first.

    Raises UsageError where another process works on a session of the project, or the folder cannot be written to.
    """
    with locked(session.path.parent, session.name, clock()) as left:
        session = folders.load(session.path)  # as it is now that nobody else writes
        with EventLog(session.path / EVENTS, session.entries, clock) as log:
            desk = Desk(session, log, workshop, observer, clock)
            if left is not None:
                observer.note(f"a lock was left behind by {left.describe()}; taken over")
            _tell_move(desk, clock)
            recover(desk)
            yield desk


def _tell_move(desk: Desk, clock: Clock) -> None:
    """Numbers of another machine, or of another start of it, do not compare with those before."""
    here, last = clock(), desk.state.last
    if desk.state.end is not None or last.same_stint(here):
        return
    if here.host != last.host:
        desk.warn(
            "the session goes on on another machine; measure the baseline again before comparing with it"
        )
    else:
        desk.warn("the session goes on after a restart of the machine; its clocks and neighbours may differ")


def recover(desk: Desk) -> None:
    """Finish what a killed process left: work without an end, a change half taken back, a last gate passed."""
    working = desk.state.working
    if working is not None:
        ended = ended_of(desk.path / working.run if working.run else None, None)
        desk.record(ended)
        desk.observer.note(f"the last work was cut off; {ended.detail}")
    attempts = desk.state.attempts
    if attempts and attempts[-1].reverting:
        try:
            take_back(desk, attempts[-1].number)
        except UsageError as error:
            desk.warn(str(error))
    if desk.state.stopped_by and desk.state.end is None:
        desk.record(Ended(End.ABORTED, stop_reason(desk.state.stopped_by)))
    if desk.state.current is None and desk.state.end is None:
        desk.record(Ended(End.FINISHED))


def stop_reason(gate: str) -> str:
    """Why a session ended by a gate."""
    return f'the gate "{gate}" failed, and it ends the session (on_failure = "stop")'


def take_back(desk: Desk, number: int) -> tuple[str, ...]:
    """Revert an attempt whose ``Reverting`` is on record; the files. May be done again after a kill."""
    attempt = desk.state.attempts[number - 1]
    paths = desk.tree.revert(desk.local(attempt.parent), desk.local(attempt.commit))
    desk.record(Reverted(number))
    return paths


def ended_of(folder: Path | None, error: BaseException | None) -> WorkEnded:
    """How work ended, by its run folder and the error that ended it, if one did."""
    from cudadent42.runs.run_folder import MANIFEST, RunStatus, load_run
    from cudadent42.stages.gates.evidence import control_excess

    interrupted = error is None or isinstance(error, (KeyboardInterrupt, BudgetReachedError))
    outcome = WorkOutcome.INTERRUPTED if interrupted else WorkOutcome.FAILED
    said = str(error) or type(error).__name__ if error is not None else ""
    if folder is None or not (folder / MANIFEST).is_file():
        return WorkEnded(outcome, said or "nothing was measured yet", 0)
    try:
        run = load_run(folder)
    except UsageError as damage:
        return WorkEnded(WorkOutcome.FAILED, said or str(damage), 0)
    samples = len(run.samples)
    if run.manifest.status is RunStatus.FINISHED and run.results is not None and error is None:
        results = run.results
        return WorkEnded(
            WorkOutcome.FINISHED,
            f"{samples} samples",
            samples,
            speedup=_finite(results.speedup_geomean),
            ci_low=_finite(results.speedup_geomean_ci_low),
            ci_high=_finite(results.speedup_geomean_ci_high),
            control_excess=control_excess(results),
            verdict=results.verdict.value,
        )
    if error is None and run.manifest.status is RunStatus.FAILED:
        outcome, said = WorkOutcome.FAILED, run.manifest.error
    build_failed = run.build is not None and not run.build.passed
    return WorkEnded(outcome, f"{said}; {samples} samples kept".lstrip("; "), samples, build_failed)


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
