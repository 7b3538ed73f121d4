"""A session from its start to its report, with a real project under git."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quick
from acting import SETTINGS, advance, begin, change, desk, to_fix, work
from quick import git

from cudadent42.base.errors import ExitCode, LabError, UsageError
from cudadent42.ledger.sessions import SCHEMA_VERSION, read_session
from cudadent42.session import events, steps
from cudadent42.session import folder as folders
from cudadent42.session.desk import GateFailedError
from cudadent42.session.events import Settings, WorkOutcome
from cudadent42.session.folder import load
from cudadent42.session.protocol import Work
from cudadent42.session.state import AttemptOutcome
from cudadent42.session.words import status_document, status_lines
from cudadent42.session.workshop import Lab


def test_from_start_to_report(project: Path, workshop: Any, clock: Any) -> None:
    path = to_fix(project, workshop, clock, rate="dear")
    clock.pass_s(300)
    change(project, 2)
    step = work(path, workshop, clock)
    assert step.exit_code is ExitCode.PASS
    assert any("faster, 1.500x" in line for line in step.lines)
    change(project, 3)
    step = work(path, workshop, clock, ask=True)
    assert step.exit_code is ExitCode.GATE_FAILED
    assert (project / "kernel.py").read_text().startswith("REPEATS = 2\n")
    assert "-REPEATS = 2" in (path / "attempts" / "2.diff").read_text()
    advance(path, workshop, clock)
    workshop.speedup = 1.2
    work(path, workshop, clock)
    advance(path, workshop, clock)
    work(path, workshop, clock)
    with pytest.raises(GateFailedError, match="no note yet"):
        advance(path, workshop, clock)
    with desk(path, workshop, clock) as at_desk:
        steps.note(at_desk, "Doing it thrice was *not* needed <b>")
    advance(path, workshop, clock)

    state = load(path).state
    assert state.end is not None
    assert [attempt.outcome for attempt in state.attempts] == [AttemptOutcome.PASSED, AttemptOutcome.REVERTED]
    assert 300 < state.seconds < 310
    assert state.usd == pytest.approx(state.seconds / 60)
    markdown, html = (path / "report.md").read_text(), (path / "report.html").read_text()
    for words in ("1 of 2 changes passed", "0.800× before, 1.20× after", "taken back", "$5.0"):
        assert words in markdown
        assert words in html
    assert "&lt;b&gt;" in html
    assert "&lt;b&gt;" in markdown
    with pytest.raises(UsageError, match="has ended"):
        work(path, workshop, clock)
    assert status_document(load(path), clock())["status"] == "finished"
    is_counted_alike_by_the_ledger(path)


def is_counted_alike_by_the_ledger(path: Path) -> None:
    """The ledger reads a session's log by itself, as it stands below sessions."""
    state, rows = load(path).state, read_session(path)
    assert events.SCHEMA_VERSION == SCHEMA_VERSION
    assert rows.session["seconds"] == pytest.approx(state.seconds)
    assert rows.session["status"] == ("open" if state.end is None else state.end.end.value)
    assert rows.session["rate"] == state.started.settings.rate
    assert [(row["name"], row["planned_minutes"]) for row in rows.checkpoints] == [
        (each.plan.name, each.plan.minutes) for each in state.checkpoints
    ]
    for row, each in zip(rows.checkpoints, state.checkpoints, strict=True):
        assert row["minutes"] == pytest.approx(each.seconds / 60)
        assert row["outcome"] == ("passed" if each.passed else "open")


def test_what_failed_its_gate_may_be_kept_or_left(project: Path, workshop: Any, clock: Any) -> None:
    path = to_fix(project, workshop, clock)
    change(project, 4)
    step = work(path, workshop, clock)
    assert "--revert takes it back" in step.lines[-1]
    with pytest.raises(UsageError, match="still in the source"):
        work(path, workshop, clock)
    with pytest.raises(GateFailedError, match="attempt 1 is failed"):
        advance(path, workshop, clock)
    assert work(path, workshop, clock, steps.Choice(keep=True)).exit_code is ExitCode.PASS
    assert load(path).state.attempts[0].outcome is AttemptOutcome.KEPT
    with pytest.raises(GateFailedError, match="none of 1 attempts passed"):
        advance(path, workshop, clock)
    with pytest.raises(UsageError, match="nothing changed since the parent"):
        work(path, workshop, clock)
    change(project, 5)
    step = work(path, workshop, clock, steps.Choice(revert=True))
    assert step.exit_code is ExitCode.GATE_FAILED
    assert (project / "kernel.py").read_text().startswith("REPEATS = 4\n")


def test_what_was_cut_off_and_is_kept_has_not_passed(project: Path, workshop: Any, clock: Any) -> None:
    path = to_fix(project, workshop, clock)
    change(project, 2)
    workshop.broken = True
    with pytest.raises(LabError, match="could not be built"):
        work(path, workshop, clock)
    assert load(path).state.attempts[0].outcome is AttemptOutcome.OPEN
    work(path, workshop, clock, steps.Choice(keep=True))
    assert load(path).state.attempts[0].outcome is AttemptOutcome.KEPT


def test_slow_kernels_are_profiled_before_they_are_changed(project: Path, workshop: Any, clock: Any) -> None:
    workshop.speedup = 0.12
    path = begin(project, workshop, clock)
    work(path, workshop, clock)
    advance(path, workshop, clock)
    with pytest.raises(GateFailedError, match="nothing was profiled"):
        advance(path, workshop, clock)
    advance(path, workshop, clock, override="no profiler here")
    change(project, 2)
    with pytest.raises(GateFailedError, match=r"refused to optimise before profiling.*0\.12x, below 0\.5x"):
        work(path, workshop, clock)
    assert load(path).state.attempts == ()
    work(path, workshop, clock, steps.Choice(override="I know the cause"))
    state = load(path).state
    assert [item.reason for item in state.overridden] == ["no profiler here", "I know the cause"]
    assert "profile-before-optimising" in dict(state.lessons)
    assert "overridden for attempt 1: profile before changing (I know the cause)" in "\n".join(_remarks(path))


def test_an_override_of_profiling_first_is_for_one_attempt(project: Path, workshop: Any, clock: Any) -> None:
    workshop.speedup = 0.12
    path = begin(project, workshop, clock)
    work(path, workshop, clock)
    advance(path, workshop, clock)
    advance(path, workshop, clock, override="no profiler here")
    with pytest.raises(UsageError, match="nothing changed since the parent"):
        work(path, workshop, clock, steps.Choice(override="I know the cause"))
    assert len(load(path).state.overridden) == 1  # nothing was raced: nothing was overridden
    change(project, 4)
    workshop.broken = True
    with pytest.raises(LabError, match="could not be built"):
        work(path, workshop, clock, steps.Choice(override="I know the cause"))
    workshop.broken = False
    work(path, workshop, clock, ask=False)  # the same attempt, taken up again
    change(project, 5)
    with pytest.raises(GateFailedError, match="which is for this attempt"):
        work(path, workshop, clock)
    work(path, workshop, clock, steps.Choice(override="a second guess"), ask=True)
    asked = [(item.reason, item.attempt) for item in load(path).state.overridden]
    assert asked == [("no profiler here", None), ("I know the cause", 1), ("a second guess", 2)]


def test_a_diagnosis_by_hand_lifts_the_refusal(project: Path, workshop: Any, clock: Any) -> None:
    workshop.speedup = 0.12
    path = begin(project, workshop, clock)
    work(path, workshop, clock)
    advance(path, workshop, clock)
    advance(path, workshop, clock, override="it has been looked at")
    change(project, 2)
    with pytest.raises(GateFailedError, match="refused to optimise"):
        work(path, workshop, clock)
    (path / "runs" / "01-baseline" / "diagnosis.json").write_text("{}")
    assert work(path, workshop, clock).exit_code is ExitCode.PASS
    profiled = load(path).state.profiled
    assert profiled is not None
    assert profiled.summary == "seen by hand"


def test_a_gate_that_stops_ends_the_session_once_it_settles(project: Path, workshop: Any, clock: Any) -> None:
    workshop.stops = True
    path = to_fix(project, workshop, clock)
    change(project, 2)
    work(path, workshop, clock)
    advance(path, workshop, clock)
    workshop.speedup = 0.5
    work(path, workshop, clock)
    assert load(path).state.end is None  # it may be measured again
    with pytest.raises(
        GateFailedError, match=r'0\.345 off\n.*the gate "validate" failed, and it ends the session'
    ):
        advance(path, workshop, clock)
    state = load(path).state
    assert state.end is not None
    assert 'on_failure = "stop"' in state.end.reason
    assert "it ends the session" in (path / "report.md").read_text()


def test_an_attempt_that_a_stopping_gate_fails(project: Path, workshop: Any, clock: Any) -> None:
    workshop.stops = True
    path = to_fix(project, workshop, clock)
    change(project, 5)
    step = work(path, workshop, clock, steps.Choice(override="one more idea"), ask=True)
    assert step.exit_code is ExitCode.GATE_FAILED
    state = load(path).state
    assert state.end is None
    assert [(item.rule, item.attempt) for item in state.overridden] == [("end by the gate fix", 1)]
    change(project, 6)
    step = work(path, workshop, clock, ask=True)
    assert "it ends the session" in step.lines[-1]
    state = load(path).state
    assert state.end is not None
    assert (project / "kernel.py").read_text().startswith("REPEATS = 3\n")


def _remarks(path: Path) -> list[str]:
    from cudadent42.session.report.view import View

    return View("x", load(path).state).remarks


def test_a_profile_lifts_the_refusal(project: Path, workshop: Any, clock: Any) -> None:
    workshop.speedup = 0.12
    path = to_fix(project, workshop, clock)
    assert [folder.name for folder in workshop.diagnosed] == ["01-baseline"]
    change(project, 2)
    assert work(path, workshop, clock).exit_code is ExitCode.PASS


def test_more_than_one_change_is_warned_about(project: Path, workshop: Any, clock: Any) -> None:
    path = to_fix(project, workshop, clock)
    change(project, 2)
    (project / "other.py").write_text("BLOCK = 32\n")
    (project / "README.md").write_text("words do not count\n")
    work(path, workshop, clock)
    state = load(path).state
    assert state.attempts[0].things == 2
    assert state.warnings[0].startswith(
        "2 things: kernel.py: REPEATS; other.py: BLOCK changed since the parent"
    )
    assert "one-variable-at-a-time" in dict(state.lessons)
    (project / "other.py").write_text("BLOCK = 16\n")
    work(path, workshop, clock)
    assert load(path).state.attempts[1].things == 1


def test_reverting_spares_what_was_worked_on_since(project: Path, workshop: Any, clock: Any) -> None:
    path = to_fix(project, workshop, clock)
    change(project, 9)
    (project / "new.py").write_text("NEW = 1\n")
    work(path, workshop, clock)
    (project / "kernel.py").write_text("REPEATS = 9\nmine = 1\n")
    with pytest.raises(UsageError, match=r"kernel\.py changed since the attempt"):
        work(path, workshop, clock, steps.Choice(revert=True))
    assert (project / "new.py").exists()
    assert (project / "kernel.py").read_text() == "REPEATS = 9\nmine = 1\n"
    change(project, 9)
    (project / "kernel.py").write_text(git(project, "show", "HEAD:kernel.py").replace("= 3", "= 9"))
    (project / "unrelated.txt").write_text("mine")
    work(path, workshop, clock, steps.Choice(revert=True))
    assert git(project, "status", "--porcelain").split() == ["??", "unrelated.txt"]


def test_a_mode_and_a_link_are_taken_back_too(project: Path, workshop: Any, clock: Any) -> None:
    (project / "which.py").symlink_to("kernel.py")
    path = to_fix(project, workshop, clock)
    kernel, link = project / "kernel.py", project / "which.py"
    kernel.chmod(0o755)
    link.unlink()
    link.symlink_to("other.py")
    (project / "new.sh").write_text("true\n")
    (project / "new.sh").chmod(0o755)
    work(path, workshop, clock)
    said = work(path, workshop, clock, steps.Choice(revert=True)).lines[0]
    assert all(name in said for name in ("kernel.py", "new.sh", "which.py"))
    assert not kernel.stat().st_mode & 0o111
    assert link.readlink() == Path("kernel.py")
    assert not (project / "new.sh").exists()
    with pytest.raises(UsageError, match="nothing changed since the parent"):
        work(path, workshop, clock)


def test_a_mode_that_was_taken_back_by_hand_is_no_obstacle(project: Path, workshop: Any, clock: Any) -> None:
    path = to_fix(project, workshop, clock)
    (project / "kernel.py").chmod(0o755)
    work(path, workshop, clock)
    (project / "kernel.py").chmod(0o644)
    assert "nothing was left of it" in work(path, workshop, clock, steps.Choice(revert=True)).lines[0]


def test_without_modes_on_the_file_system_a_change_is_taken_back(
    project: Path, workshop: Any, clock: Any
) -> None:
    git(project, "config", "core.fileMode", "false")
    path = to_fix(project, workshop, clock)
    change(project, 5)
    for name in ("kernel.py", "new.py"):
        (project / name).touch()
        (project / name).chmod(0o755)  # as every file there
    work(path, workshop, clock)
    work(path, workshop, clock, steps.Choice(revert=True))
    assert (project / "kernel.py").read_text().startswith("REPEATS = 3\n")
    assert not (project / "new.py").exists()


def test_what_is_measured_beside_a_session_is_not_part_of_a_change(
    project: Path, workshop: Any, clock: Any
) -> None:
    """Nor taken back with it."""
    path = to_fix(project, workshop, clock)
    change(project, 5)
    kept = [
        "runs/a/manifest.json",
        "bisects/b/steps.jsonl",
        "mine/run/samples.csv",
        "mine/run/deep/x.csv",
        "o.log",
    ]
    for name in [*kept, "mine/run/manifest.json", "mine/run/log.jsonl", "mine/new.py"]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("X = 1\n")
    work(path, workshop, clock, ask=True)
    assert load(path).state.attempts[0].description == "2 things: mine/new.py: top level; kernel.py: REPEATS"
    assert not (project / "mine" / "new.py").exists()
    assert [name for name in kept if not (project / name).exists()] == []


def test_the_users_index_and_branch_are_not_touched(project: Path, workshop: Any, clock: Any) -> None:
    (project / "staged.py").write_text("x = 1\n")
    git(project, "add", "staged.py")
    before = git(project, "status", "--porcelain", "--branch"), git(project, "rev-parse", "HEAD")
    path = to_fix(project, workshop, clock)
    change(project, 4)
    work(path, workshop, clock, ask=True)
    assert (git(project, "status", "--porcelain", "--branch"), git(project, "rev-parse", "HEAD")) == before


def test_gates_that_cannot_be_judged_are_overridden(project: Path, workshop: Any, clock: Any) -> None:
    class Puzzled(quick.QuickWorkshop):  # type: ignore[name-defined,misc]
        def judge(self, gates: Path, folder: Path, extra: Any) -> Any:
            raise UsageError("gate 'x': verdict is a word")

    path = begin(project, workshop, clock)
    with pytest.raises(UsageError, match="is a word"):
        work(path, Puzzled(), clock)
    with pytest.raises(UsageError, match="is a word"):
        advance(path, Puzzled(), clock)
    step = advance(path, Puzzled(), clock, override="the gate is wrong, the run is not")
    assert "is a word" in step.lines[0]
    checkpoint = load(path).state.checkpoints[0]
    assert (checkpoint.passed, checkpoint.overridden) == (True, True)


@pytest.mark.parametrize(
    "entry", ["nowhere.py:attention", "kernel.py", "../kernel.py:attention", "kernel.toml"]
)
def test_what_is_to_be_changed_is_in_the_project(project: Path, entry: str) -> None:
    lab = Lab(("test",), lambda folder: None)
    lab.check_entry("kernel.py:attention", project)
    lab.check_entry("", project)
    with pytest.raises(UsageError, match=r"expected path/to/file\.py:callable or"):
        lab.check_entry(entry, project)


@pytest.mark.parametrize("kind", [Work.MEASURE, Work.CHANGE])
@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ('metric = "speedpu"\nat_least = 1', "unknown metric 'speedpu'.*did you mean 'speedup'"),
        ('metric = "session.improvment"\nat_least = 1', "did you mean 'session.improvement'"),
        ('metric = "slowdown"\ncases = ["nowhere"]\nat_most = 0', "no case 'nowhere'"),
    ],
)
def test_gates_on_what_a_run_cannot_have(kind: Work, gate: str, words: str) -> None:
    lab = Lab(("test",), lambda folder: None)
    settings = Settings("portable", "race-cpu", device="cpu")
    for name in ("improvement", "attempts_passed"):
        text = f'[[gate]]\nname = "x"\nmetric = "session.{name}"\nat_least = 1\n'
        lab.check_gates(text, "the gates of fix", kind, settings)
    with pytest.raises(UsageError, match=words):
        lab.check_gates(f'[[gate]]\nname = "x"\n{gate}\n', "the gates of fix", kind, settings)


def test_a_clock_that_jumps_does_not_corrupt_minutes(project: Path, workshop: Any, clock: Any) -> None:
    path = begin(project, workshop, clock)
    clock.pass_s(60)
    clock.wall_s += 86_400
    work(path, workshop, clock)
    clock.pass_s(60)
    clock.wall_s -= 2 * 86_400
    with desk(path, workshop, clock) as at_desk:
        steps.note(at_desk, "late")
        assert any("the clock was set back by 172800 s" in line for line in at_desk.said)
    state = load(path).state
    assert state.seconds == pytest.approx(120, abs=1)
    assert [round(jump / 86_400) for jump in state.jumps_s] == [1, -2]
    is_counted_alike_by_the_ledger(path)


def test_one_session_at_a_time(project: Path, workshop: Any, clock: Any) -> None:
    path = begin(project, workshop, clock)
    with pytest.raises(UsageError, match=r"trial of this project is open.*session abort"):
        begin(project, workshop, clock)
    with desk(path, workshop, clock), pytest.raises(UsageError, match="being worked on by process"):
        work(path, workshop, clock)
    with desk(path, workshop, clock) as at_desk:
        steps.abort(at_desk, "enough")
    assert begin(project, workshop, clock) != path
    assert (path / "report.md").read_text().count("enough") == 1


def test_builds_that_fail_twice_lead_back(project: Path, workshop: Any, clock: Any) -> None:
    path = to_fix(project, workshop, clock)
    workshop.broken = True
    for repeats in (1, 2):
        change(project, repeats)
        with pytest.raises(LabError, match="could not be built"):
            work(path, workshop, clock)
    state = load(path).state
    assert state.failed_builds == 2
    assert "last-working-revision" in dict(state.lessons)
    assert [run.outcome for run in state.runs[-2:]] == [WorkOutcome.FAILED] * 2


def test_without_git_nothing_is_changed_but_all_is_measured(
    tmp_path: Path, workshop: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    path = to_fix(folder, workshop, clock)
    with pytest.raises(UsageError, match="git init"):
        work(path, workshop, clock)


def test_the_source_measured_last_is_the_one_that_is_validated(
    project: Path, workshop: Any, clock: Any
) -> None:
    path = to_fix(project, workshop, clock)
    change(project, 2)
    work(path, workshop, clock)
    advance(path, workshop, clock)
    with pytest.raises(GateFailedError, match="nothing was measured yet"):
        advance(path, workshop, clock)
    workshop.speedup = 0.5
    work(path, workshop, clock)
    with pytest.raises(GateFailedError, match=r"0\.625, 0\.345 off"):
        advance(path, workshop, clock)


def test_wrong_starts(project: Path, workshop: Any, clock: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown protocol"):
        steps.start(project, "x", "defualt", SETTINGS, workshop, clock)
    with pytest.raises(UsageError, match="letters, digits"):
        steps.start(project, "../x", "default", SETTINGS, workshop, clock)
    protocol = tmp_path / "p.toml"
    protocol.write_text(
        'schema_version = 1\nname = "p"\n'
        '[[checkpoint]]\nname = "a"\nwork = "measure"\nminutes = 1\ngates = "./g.toml"\n'
    )
    with pytest.raises(UsageError, match=r"cannot read the gates .*g\.toml"):
        steps.start(project, "x", str(protocol), SETTINGS, workshop, clock)
    (tmp_path / "g.toml").write_text("nothing")
    with pytest.raises(UsageError, match="the gates of a: no metric"):
        steps.start(project, "x", str(protocol), SETTINGS, workshop, clock)
    assert folders.all_sessions(project / "sessions") == []
    with pytest.raises(UsageError, match="session start"):
        folders.find(project / "sessions", None)


def test_status_for_people_and_programs(project: Path, workshop: Any, clock: Any) -> None:
    path = to_fix(project, workshop, clock)
    document = json.loads(json.dumps(status_document(load(path), clock())))
    assert document["checkpoint"] == "fix"
    assert document["do"].startswith("change one thing")
    assert [item["passed"] for item in document["checkpoints"]] == [True, True, False, False, False]
    assert any(line.endswith("now") for line in status_lines(load(path), clock()))
