"""What a session's report says, derived from its state once for both formats."""

from __future__ import annotations

from dataclasses import dataclass

from cudadent42.model import text
from cudadent42.session.events import End
from cudadent42.session.protocol import Work
from cudadent42.session.state import Attempt, AttemptOutcome, RunRecord, State
from cudadent42.session.words import outcome_word

Row = tuple[str, ...]


@dataclass(frozen=True)
class View:
    name: str
    state: State

    @property
    def headline(self) -> str:
        state = self.state
        ended = (
            "open" if state.end is None else "finished" if state.end.end is End.FINISHED else "ended early"
        )
        tried, passed = len(state.attempts), sum(a.outcome is AttemptOutcome.PASSED for a in state.attempts)
        words = (
            f"{ended}; {passed} of {text.plural(tried, 'change')} passed"
            if tried
            else f"{ended}; no change raced"
        )
        before, after = self.before_and_after
        return f"{words}; {before} before, {after} after" if before and after else words

    @property
    def before_and_after(self) -> tuple[str, str]:
        """The suite's speed-up at the baseline and at the last measurement after it; empty where there is none."""
        first, last = self.state.baseline, self.state.measured()
        if first is None or last is None or last.run == first.run or first.checkpoint == last.checkpoint:
            return "", ""
        return _speedup(first), _speedup(last)

    @property
    def reason(self) -> str:
        return text.clean(self.state.end.reason) if self.state.end is not None else ""

    @property
    def cost(self) -> str:
        settings = self.state.started.settings
        line = f"{self.state.seconds / 60:.1f} of {settings.budget_minutes:g} min"
        if settings.usd_per_hour:
            line += f"; ${self.state.usd:.2f} at ${settings.usd_per_hour:.2f}/h ({settings.rate})"
        elif settings.rate:
            line += f"; $0.00 ({settings.rate})"
        if settings.budget_usd is not None:
            line += f" of ${settings.budget_usd:.2f}"
        decided = sum(run.verdict in ("faster", "slower", "equal") for run in self.state.runs)
        if settings.usd_per_hour and decided:
            line += (
                f"; ${self.state.usd / decided:.2f} for each of {text.plural(decided, 'decided comparison')}"
            )
        return line

    @property
    def minutes(self) -> list[Row]:
        """Checkpoint, planned, actual, difference, outcome."""
        rows = []
        for index, item in enumerate(self.state.checkpoints):
            actual = item.seconds / 60
            reached = item.passed or index == self.state.position
            outcome = (
                "overridden"
                if item.overridden
                else "passed"
                if item.passed
                else "reached"
                if reached
                else "not reached"
            )
            difference = f"{actual - item.plan.minutes:+.1f}" if item.passed else ""
            rows.append((item.plan.name, f"{item.plan.minutes:g}", f"{actual:.1f}", difference, outcome))
        planned = sum(item.plan.minutes for item in self.state.checkpoints)
        return [*rows, ("sum", f"{planned:g}", f"{self.state.seconds / 60:.1f}", "", "")]

    @property
    def attempts(self) -> list[Row]:
        """Number, what changed, verdict, speed-up over the parent, interval, outcome."""
        return [
            (
                str(item.number),
                text.clean(item.description),
                item.run.verdict if item.run else "",
                _speedup(item.run) if item.run else "",
                _interval(item.run) if item.run else "",
                outcome_word(item.outcome),
            )
            for item in self.state.attempts
        ]

    @property
    def failed(self) -> list[str]:
        """What was tried and did not hold, with the reason."""
        return [
            text.clean(f"attempt {item.number} ({item.description}): {_why(item)}")
            for item in self.state.attempts
            if item.outcome is not AttemptOutcome.PASSED
        ]

    @property
    def runs(self) -> list[Row]:
        """Folder, outcome, verdict, speed-up, interval, samples."""
        return [
            (
                text.clean(item.run or item.checkpoint),
                item.outcome.value if item.outcome else "cut off",
                item.verdict,
                _speedup(item),
                _interval(item),
                str(item.samples),
            )
            for item in self.state.runs
        ]

    @property
    def gates(self) -> list[str]:
        """The gates of the last measured run of each checkpoint."""
        lines = []
        for item in self.state.checkpoints:
            run = self.state.measured(item.plan.name) if item.plan.work is Work.MEASURE else None
            lines += [text.clean(f"{item.plan.name}: {line}") for line in (run.lines if run else ())]
        return lines

    @property
    def diagnosis(self) -> str:
        return text.clean(self.state.profiled.summary) if self.state.profiled else ""

    @property
    def lessons(self) -> list[str]:
        return [text.clean(f"{title} ({name})") for name, title in self.state.lessons]

    @property
    def notes(self) -> list[str]:
        return [text.clean(note) for note in self.state.notes]

    @property
    def remarks(self) -> list[str]:
        """What makes the numbers less than they seem."""
        state = self.state
        remarks = [
            f"overridden{'' if item.attempt is None else f' for attempt {item.attempt}'}: {item.rule} ({item.reason})"
            for item in state.overridden
        ]
        remarks += list(state.warnings)
        remarks += [
            f"the {'minutes' if item.what == 'minutes' else 'money'} were spent: {item.spent:.2f} of {item.limit:g}"
            for item in state.budgets
        ]
        if len(state.stints) > 1:
            remarks.append(
                f"{len(state.stints)} stays on a machine; {state.away_s / 60:.0f} min between them are not counted"
            )
        remarks += [
            f"the clock was set by {jump:+.0f} s; minutes come from one that cannot be"
            for jump in state.jumps_s
        ]
        return [text.clean(line) for line in remarks]


def _why(attempt: Attempt) -> str:
    run = attempt.run
    if run is None:
        return "not raced"
    if run.outcome is None:
        return "cut off"
    failed = [line for line in run.lines if not line.lower().startswith("passed")]
    return "; ".join(failed) or run.detail or outcome_word(attempt.outcome)


def _speedup(run: RunRecord) -> str:
    return text.ratio(run.speedup) if run.speedup is not None else ""


def _interval(run: RunRecord) -> str:
    if run.ci_low is None or run.ci_high is None:
        return ""
    return text.interval(run.ci_low, run.ci_high)
