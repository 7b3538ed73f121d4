"""A session that goes on on another machine, with its folder alone."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from acting import begin, change, to_fix, work
from quick import git

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.session import steps
from cudadent42.session import tree as trees
from cudadent42.session.folder import load
from cudadent42.session.unpack import unpack


def test_it_goes_on_on_another_machine_with_only_the_folder(
    project: Path, workshop: Any, clock: Any, tmp_path: Path
) -> None:
    path = to_fix(project, workshop, clock)
    change(project, 2)
    work(path, workshop, clock)
    other = tmp_path / "elsewhere"
    git(tmp_path, "clone", "-q", str(project), str(other))
    assert git(other, "for-each-ref", "refs/cudadent42") == ""
    shutil.copytree(project / "sessions", other / "sessions")
    there = other / "sessions" / path.name
    git(other, "apply", str(there / "attempts" / "1.diff"))
    change(other, 1)
    clock.host, clock.boot, clock.uptime_s = "host-2", "boot-9", 5.0
    clock.wall_s += 7200
    step = work(there, workshop, clock)
    assert step.exit_code is ExitCode.PASS
    state = load(there).state
    assert state.attempts[1].parent == state.attempts[0].commit
    assert len(state.stints) == 2
    assert state.away_s == pytest.approx(7200, abs=1)
    assert state.seconds < 60
    assert "another machine" in state.warnings[-1]


def test_a_folder_is_all_that_another_machine_needs(
    project: Path, workshop: Any, clock: Any, tmp_path: Path
) -> None:
    (project / "staged.bin").write_bytes(bytes(range(256)))
    path = to_fix(project, workshop, clock)
    change(project, 2)
    work(path, workshop, clock)
    change(project, 5)
    work(path, workshop, clock)
    carried = tmp_path / "carried"
    shutil.copytree(path, carried / path.name)
    shutil.rmtree(project)

    there = unpack(load(carried / path.name), tmp_path / "elsewhere").path
    other = tmp_path / "elsewhere"
    assert there == other / "sessions" / path.name
    assert (other / "kernel.py").read_text().startswith("REPEATS = 5\n")  # not decided yet
    assert (other / "staged.bin").read_bytes() == bytes(range(256))
    assert "sessions" not in git(other, "status", "--porcelain")
    clock.host, clock.boot, clock.uptime_s = "host-2", "boot-9", 5.0
    assert "taken back" in work(there, workshop, clock, steps.Choice(revert=True)).lines[0]
    assert (other / "kernel.py").read_text().startswith("REPEATS = 2\n")
    change(other, 1)
    step = work(there, workshop, clock)
    assert any("faster, 2.000x" in line for line in step.lines)
    assert len(load(there).state.stints) == 2

    with pytest.raises(UsageError, match="not empty"):
        unpack(load(carried / path.name), other)
    (carried / path.name / "source.bundle").unlink()
    with pytest.raises(UsageError, match="does not hold the source"):
        unpack(load(carried / path.name), tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_a_bundle_is_a_repository_to_git(project: Path, workshop: Any, clock: Any, tmp_path: Path) -> None:
    path = begin(project, workshop, clock)
    git(tmp_path, "clone", "-q", str(path / "source.bundle"), "cloned")
    assert git(tmp_path / "cloned", "ls-files").split() == git(project, "ls-files").split()
    assert git(tmp_path / "cloned", "rev-list", "--count", "HEAD").strip() == "1"


def test_more_data_than_source_is_not_put_into_the_folder(
    project: Path, workshop: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "BUNDLE_LIMIT", 10)
    path = begin(project, workshop, clock)
    assert not (path / "source.bundle").exists()
    assert work(path, workshop, clock).exit_code is ExitCode.PASS


def test_a_restart_is_told_and_three_machines_are_a_lesson(project: Path, workshop: Any, clock: Any) -> None:
    path = begin(project, workshop, clock)
    for number in (2, 3):
        clock.boot = f"boot-{number}"
        work(path, workshop, clock)
    state = load(path).state
    assert "restart" in state.warnings[0]
    assert "keep-the-machine" in dict(state.lessons)


@pytest.mark.parametrize("link", ["sessions", "sessions/.gitignore", "sessions/..gitignore.new"])
def test_links_in_the_source_lead_nowhere(
    project: Path, workshop: Any, clock: Any, tmp_path: Path, link: str
) -> None:
    path = begin(project, workshop, clock)
    carried = shutil.copytree(path, tmp_path / "carried" / path.name)
    target = tmp_path / "target"
    if link == "sessions":
        target.mkdir()
    else:
        target.write_text("kept")
    planted = tmp_path / "planted"
    git(tmp_path, "clone", "-q", str(carried / "source.bundle"), str(planted))
    (planted / link).parent.mkdir(exist_ok=True)
    (planted / link).symlink_to(target)
    git(planted, "add", "-A", "--force")
    git(planted, "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-qm", "planted")
    git(planted, "bundle", "create", "-q", str(carried / "source.bundle"), "HEAD")
    with suppress(UsageError):
        unpack(load(carried), tmp_path / "elsewhere")
    if link == "sessions":
        assert list(target.iterdir()) == []
        assert not (tmp_path / "elsewhere").exists()
    else:
        assert target.read_text() == "kept"


def test_links_in_a_session_are_not_unpacked(
    project: Path, workshop: Any, clock: Any, tmp_path: Path
) -> None:
    path = begin(project, workshop, clock)
    carried = shutil.copytree(path, tmp_path / "carried" / path.name)
    shutil.rmtree(carried / "runs", ignore_errors=True)
    (tmp_path / "target").mkdir()
    (carried / "runs").symlink_to(tmp_path / "target")
    os.mkfifo(carried / "pipe")
    there = unpack(load(carried), tmp_path / "elsewhere").path
    assert not (there / "runs").is_symlink()
    assert not (there / "pipe").exists()


@pytest.mark.parametrize("run", ["/etc", "../../x", "runs/../../x", "runs/\0"])
def test_a_run_outside_of_the_session_is_damage(project: Path, workshop: Any, clock: Any, run: str) -> None:
    path = begin(project, workshop, clock)
    work(path, workshop, clock)
    log = path / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        if event["event"] == "WorkStarted":
            event["data"]["run"] = run
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(UsageError, match="does not lie in the session's"):
        load(path)
