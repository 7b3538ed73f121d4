"""Bisection over real repositories. What a race would have found is told by a line in the kernel's file, so that no
test depends on timing; everything else, gates included, is the real thing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import repositories as r
from hypothesis import given, settings
from hypothesis import strategies as st

from cudadent42.base.errors import BuildFailedError, ExitCode, UsageError
from cudadent42.base.journal import Journal
from cudadent42.decisions.compare import compare
from cudadent42.fleet.engine import Joined
from cudadent42.fleet.folder import FolderEngine
from cudadent42.fleet.spread import MACHINES, Spread
from cudadent42.fleet.task import Returned, Task, Worker
from cudadent42.fleet.worker import tree_digest
from cudadent42.flows import pipeline
from cudadent42.flows.race import RaceOptions
from cudadent42.flows.race.bisect import FILES, BisectResult, Ending, Role, bisect
from cudadent42.flows.race.history import Mark
from cudadent42.model.records import (
    BuildFailure,
    BuildReport,
    Comparison,
    MachineReport,
    Results,
    Sample,
    TimerKind,
    Verdict,
    VerifiedCase,
    VerifyReport,
    Version,
)
from cudadent42.plan import Choices, RunOptions
from cudadent42.runs.run_folder import RunWriter
from cudadent42.stages import gates
from cudadent42.timing.contention import Contention
from cudadent42.versions.sources import folder_of


class Nobody:
    def stage(self, name: str) -> None: ...
    def advance(self, fraction: float, what: str) -> None: ...
    def note(self, text: str) -> None: ...
    def detail(self, text: str) -> None: ...


def told(version: Version) -> dict[str, str]:
    """What the kernel's file says of itself: ``# slowdown: 0.1``, ``# build: fails``..."""
    return dict(re.findall(r"# (\w+): (\S+)", (folder_of(version) / "kernels/mine.py").read_text()))


class Track:
    """Stands for the stages from building to timing: writes the run folder that they would have written."""

    def __init__(self) -> None:
        self.raced: list[str] = []
        self.timers: set[TimerKind] = set()
        self.die_at = -1

    def __call__(
        self, prepared: pipeline.Prepared, request: RunOptions, observer: object, opened: object
    ) -> pipeline.Outcome:
        plan = prepared.plan
        parent, child = plan.versions.values()
        assert request.output is not None
        with RunWriter(request.output, plan, prepared.machine, None, request.command) as folder:
            if len(self.raced) == self.die_at:
                self.die_at = -1
                raise KeyboardInterrupt
            self.raced.append(child.commit)
            self.timers.add(plan.timer)
            facts = told(child)
            if facts.get("build") == "fails":
                raise BuildFailedError("1 of the kernels could not be built")
            verified = VerifyReport(
                (
                    VerifiedCase(
                        "one/fp32", list(plan.versions)[1], "random", None, None, None, "wrong" not in facts
                    ),
                )
            )
            speedup = (1 + float(told(parent)["slowdown"])) / (1 + float(facts["slowdown"]))
            half = 0.5 if "unclear" in facts else 0.001
            results = results_of(plan.baseline, list(plan.versions)[1], speedup, half)
            folder.write_verify(verified)
            folder.write_results(results)
        judged = gates.judge(request.gate, request.output) if request.gate else None
        return pipeline.Outcome(request.output, verified, results, judged)


def results_of(baseline: str, name: str, speedup: float, half: float) -> Results:
    row = Comparison(
        *("one", "fp32", name, baseline, speedup, speedup - half, speedup + half),
        *(Verdict.UNDECIDED, 1.0, 1.0, 25),
    )
    return Results(
        *(baseline, name, speedup, speedup - half, speedup + half, Verdict.UNDECIDED, 0.01, 0.0), cases=(row,)
    )


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    stand_in = Track()

    def prepared(request: RunOptions, observer: Any) -> pipeline.Prepared:
        return pipeline.Prepared(pipeline._plan(request, "cpu"), MachineReport((), "", {}))

    monkeypatch.setattr(pipeline, "prepare", prepared)
    monkeypatch.setattr(pipeline, "probe", lambda: Contention(100, 0, 0.0))
    monkeypatch.setattr(pipeline, "execute", stand_in)
    return stand_in


def history(root: Path, facts: list[str]) -> list[str]:
    """A commit for each text, and their names."""
    r.git(r.repository(root), "checkout", "-q", "--orphan", "history")
    commits = []
    for number, text in enumerate(facts):
        r.write_kernel(
            root, extra=f"# number: {number}\n" + "\n".join(f"# {line}" for line in text.split(", "))
        )
        commits.append(r.commit(root, f"Change {number}"))
    return commits


def search(
    tmp_path: Path,
    good: str,
    bad: str,
    observer: Nobody | None = None,
    execute: pipeline.Execute | None = None,
    **choices: int,
) -> BisectResult:
    (tmp_path / "unit.toml").write_text(r.SUITE)
    options = RaceOptions(
        run=RunOptions(
            choices=Choices(suite=str(tmp_path / "unit.toml"), **choices),  # type: ignore[arg-type]
            device="cpu",
            output=tmp_path / "bisection",
            gate=gates.load("default"),
        ),
        repository=tmp_path / "repo",
        entry=r.ENTRY,
    )
    return bisect(good, bad, options, observer or Nobody(), execute)


FAST, SLOW = "slowdown: 0.0", "slowdown: 0.1"


def test_the_commit_is_found_and_confirmed_against_its_parent(tmp_path: Path, track: Track) -> None:
    commits = history(tmp_path / "repo", [FAST] * 9 + [SLOW] * 7)
    before = (r.git(tmp_path / "repo", "for-each-ref"), r.git(tmp_path / "repo", "status", "--porcelain=v2"))
    result = search(tmp_path, commits[0], "HEAD")
    assert (result.ending, result.commit, result.subject) == (Ending.FOUND, commits[9], "Change 9")
    assert result.exit_code is ExitCode.PASS
    assert (result.steps[0].role, result.steps[-1].role) == (Role.ENDPOINTS, Role.CONFIRMATION)
    assert result.steps[-1].mark is Mark.BAD
    assert len(track.raced) <= 2 + 5
    for step in result.steps:
        assert (tmp_path / "bisection" / step.run / "gates.json").is_file()
    after = (r.git(tmp_path / "repo", "for-each-ref"), r.git(tmp_path / "repo", "status", "--porcelain=v2"))
    assert before == after
    assert not list((tmp_path / "repo/.git").glob("BISECT*"))


class Notes(Nobody):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_a_busy_machine_and_too_few_blocks_are_said_as_of_a_single_race(
    tmp_path: Path, track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock on the wall every race would be undecided there, and every commit left out."""
    monkeypatch.setattr(pipeline, "probe", lambda: Contention(100, 90, 0.5))
    commits, observer = history(tmp_path / "repo", [FAST, FAST, SLOW]), Notes()
    search(tmp_path, commits[0], commits[2], observer, repeats=5)
    assert track.timers == {TimerKind.CPU}
    assert len([line for line in observer.lines if "processor time on one thread is measured" in line]) == 1
    assert "--repeats 5 allows no verdict: at least 8 blocks are needed" in observer.lines


def test_a_commit_that_is_no_slower_than_its_parent_is_not_confirmed(tmp_path: Path, track: Track) -> None:
    """It became slower in steps, none of which the gate minds."""
    commits = history(tmp_path / "repo", [f"slowdown: {number / 50}" for number in range(6)])
    result = search(tmp_path, commits[0], "HEAD")
    assert (result.ending, result.commit) == (Ending.NOT_CONFIRMED, commits[2])
    assert result.exit_code is ExitCode.GATE_UNDECIDED
    assert (result.steps[-1].role, result.steps[-1].mark) == (Role.CONFIRMATION, Mark.GOOD)


def test_what_does_not_build_is_wrong_or_unclear_is_skipped(tmp_path: Path, track: Track) -> None:
    facts = (
        [FAST] * 4
        + [f"{FAST}, build: fails", f"{SLOW}, wrong: yes"]
        + [SLOW, f"{SLOW}, unclear: yes"]
        + [SLOW] * 2
    )
    commits = history(tmp_path / "repo", facts)
    result = search(tmp_path, commits[0], commits[-1])
    assert result.ending is Ending.ONLY_SKIPPED
    assert set(result.possible) == {commits[4], commits[5], commits[6]}
    assert result.exit_code is ExitCode.GATE_UNDECIDED
    skipped = {step.commit: step.reason for step in result.steps if step.mark is Mark.SKIP}
    assert "does not build" in skipped[commits[4]]
    assert skipped[commits[5]] == "its results are wrong"


def test_an_undecided_race_is_run_once_more_and_then_skipped(tmp_path: Path, track: Track) -> None:
    commits = history(tmp_path / "repo", [FAST, f"{FAST}, unclear: yes", SLOW])
    result = search(tmp_path, commits[0], commits[2])
    assert track.raced.count(commits[1]) == 2
    assert set(result.possible) == {commits[1], commits[2]}


class Elsewhere(FolderEngine):
    """A worker that is always there; its parts say of two versions what their files say."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._root = root
        self._offered: list[Task] = []
        self._joined = False

    def offer(self, task: Task) -> None:
        self._offered.append(task)

    def wait(self, seconds: float):  # type: ignore[no-untyped-def]
        if not self._joined:
            self._joined = True
            return [Joined(Worker("w", "there", "cpu", "k", "u", tree_digest()))]
        tasks, self._offered = self._offered, []
        return [self._done(task) for task in tasks]

    def _done(self, task: Task) -> Returned:
        plan = task.plan
        facts = {name: told(version) for name, version in plan.versions.items()}
        child = list(plan.versions)[1]
        machine = MachineReport((), "", {})
        try:
            with RunWriter(self._root / task.run, plan, machine, None, ()) as part:
                if facts[child].get("build") == "fails":
                    part.set_build(BuildReport((), (BuildFailure("mine.py", "there", "no such module"),)))
                    raise BuildFailedError("1 of the kernels could not be built")
                times = {name: 1 + float(said["slowdown"]) for name, said in facts.items()}
                times[f"{plan.baseline}_control"] = times[plan.baseline]
                samples = [
                    Sample(plan.cases[0].id, name, block, position, latency * (1 + block / 1e4), 1, 0.0, 0.0)
                    for block in range(plan.repeats)
                    for position, (name, latency) in enumerate(times.items())
                ]
                for sample in samples:
                    part.append_sample(sample)
                part.write_verify(
                    VerifyReport((VerifiedCase("one/fp32", child, "random", None, None, None, True),))
                )
                part.write_results(compare(plan, samples, {}, {}))
        except BuildFailedError as error:
            return Returned(task.key, "w", 0.1, error=str(error))
        return Returned(task.key, "w", 0.1)


def test_a_fleet_judges_and_what_does_not_build_there_is_skipped(tmp_path: Path, track: Track) -> None:
    commits = history(tmp_path / "repo", [FAST, FAST, f"{FAST}, build: fails", FAST, SLOW])
    result = search(tmp_path, commits[0], commits[4], execute=Spread(Elsewhere).execute)
    assert (result.ending, result.commit) == (Ending.FOUND, commits[4])
    assert not track.raced
    assert [step.reason for step in result.steps if step.mark is Mark.SKIP] == [
        "it does not build: no such module"
    ]
    for step in result.steps:
        raced = step.mark is not Mark.SKIP
        assert (tmp_path / "bisection" / step.run / MACHINES).is_file() == raced


def test_ends_that_do_not_differ(tmp_path: Path, track: Track) -> None:
    commits = history(tmp_path / "repo", [FAST] * 4)
    assert search(tmp_path, commits[0], commits[3]).ending is Ending.NO_DIFFERENCE
    assert len(track.raced) == 1


def test_ends_that_the_machine_cannot_tell_apart(tmp_path: Path, track: Track) -> None:
    commits = history(tmp_path / "repo", [FAST, FAST, f"{SLOW}, unclear: yes"])
    result = search(tmp_path, commits[0], commits[2])
    assert (result.ending, result.exit_code) == (Ending.UNDECIDED, ExitCode.GATE_UNDECIDED)


def test_commits_with_the_same_sources_are_raced_once(tmp_path: Path, track: Track) -> None:
    history(tmp_path / "repo", [FAST, SLOW])
    root = tmp_path / "repo"
    for _ in range(6):
        r.git(root, "commit", "-q", "--allow-empty", "-m", "Nothing")
    result = search(tmp_path, "HEAD~7", "HEAD")
    assert result.subject == "Change 1"
    assert len(track.raced) == 2  # the ends, and the confirmation
    assert any("same source" in step.reason for step in result.steps)


@pytest.mark.parametrize(
    "killed_at", [0, 3, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 2, 4, 5))]
)
def test_a_bisection_that_was_ended_goes_on_where_it_was(
    tmp_path: Path, track: Track, killed_at: int
) -> None:
    commits = history(tmp_path / "repo", [FAST] * 11 + [SLOW] * 5)
    track.die_at = killed_at
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, commits[0], commits[15])
    entries = tmp_path / "bisection/steps.jsonl"
    with entries.open("a") as file:
        file.write('{"role": "step", "commit": "torn')  # what a kill in the middle of a line leaves
    raced = len(track.raced)
    result = search(tmp_path, commits[0], commits[15])
    assert result.commit == commits[11]
    assert (
        len(track.raced) == len(set(track.raced[:-1])) + 1
    )  # nothing is raced twice but the confirmed commit
    assert len(track.raced) > raced
    again = search(tmp_path, commits[0], commits[15])
    assert again == result


def test_a_folder_is_about_one_bisection(tmp_path: Path, track: Track) -> None:
    commits = history(tmp_path / "repo", [FAST, SLOW, SLOW])
    search(tmp_path, commits[0], commits[2])
    with pytest.raises(UsageError, match="about other commits"):
        search(tmp_path, commits[0], commits[1])


def test_killed_while_the_folder_was_made(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".bisect.json.abcd1234").write_text('{"schema_ver')
    with Journal(tmp_path, FILES, Version("a", "", "d", ""), Version, Version) as journal:
        assert journal.entries == ()


def test_two_at_once_are_refused(tmp_path: Path, track: Track) -> None:
    commits = history(tmp_path / "repo", [FAST, SLOW])
    search(tmp_path, commits[0], commits[1])
    text = (tmp_path / "bisection/bisect.json").read_text()
    assert text.startswith('{\n  "schema_version": 1')
    with (tmp_path / "bisection/.lock").open("a") as file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="in use"):
            search(tmp_path, commits[0], commits[1])


def test_only_commits_can_be_bisected(tmp_path: Path, track: Track) -> None:
    history(tmp_path / "repo", [FAST, SLOW])
    with pytest.raises(UsageError, match="not a commit"):
        search(tmp_path, "HEAD~1", "WORKTREE")


def test_a_bad_commit_that_is_older_than_the_good_one(tmp_path: Path, track: Track) -> None:
    commits = history(tmp_path / "repo", [SLOW, SLOW, FAST, FAST])
    with pytest.raises(UsageError, match="git bisect"):
        search(tmp_path, commits[3], commits[0])


@settings(max_examples=10)
@given(st.binary(max_size=40))
def test_any_last_line_that_is_torn_costs_no_other(
    tmp_path_factory: pytest.TempPathFactory, torn: bytes
) -> None:
    folder = tmp_path_factory.mktemp("journal") / "j"
    setup = Version("a", "b", "c")
    with Journal(folder, FILES, setup, Version, Version) as journal:
        journal.append(replace(setup, revision="first"))
    with (folder / "steps.jsonl").open("ab") as file:
        file.write(torn.replace(b"\n", b""))
    with Journal(folder, FILES, setup, Version, Version) as journal:
        journal.append(replace(setup, revision="second"))
    with Journal(folder, FILES, setup, Version, Version) as journal:
        assert [entry.revision for entry in journal.entries] == ["first", "second"]
