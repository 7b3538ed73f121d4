"""Killed at every write, with a full disk, with damaged and with newer folders: a clear error or a clean recovery, and
nothing that was measured is lost."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quick

from cudadent42.base.errors import LabError, NewerVersionError, UsageError
from cudadent42.runs import run_folder
from cudadent42.runs.sessions import EVENTS
from cudadent42.session import folder as folders
from cudadent42.session import steps
from cudadent42.session.clock import Instant
from cudadent42.session.desk import at_work
from cudadent42.session.events import Settings, WorkOutcome
from cudadent42.session.folder import load, open_session, sessions_folder
from cudadent42.session.lock import LOCK, Holder, holder_of, locked
from cudadent42.session.state import AttemptOutcome

SYSTEM_WRITES = ("write", "fsync", "replace", "rename", "mkdir", "unlink", "ftruncate", "pwrite")
"""Functions of ``os`` before each call of which the process is killed in turn; writes to files and flushes likewise."""

MOST_WRITES = 600


def whole_session(project: Path) -> None:
    """Everything that a session does, going on from wherever it stands."""
    workshop = quick.QuickWorkshop()
    clock = quick.ToyClock()
    sessions = folders.all_sessions(sessions_folder(project))
    if sessions:
        session = load(sessions[0])
    else:
        session = steps.start(project, "trial", "default", Settings("unit", "race"), workshop, clock)

    def step(work: Callable[[Any], Any]) -> None:
        with at_work(load(session.path), workshop, quick.Quiet(), clock) as desk:
            work(desk)

    def state() -> Any:
        return load(session.path).state

    kernel = project / "kernel.py"
    while state().end is None:
        if state().current is None:  # killed after the last gate, before the end: taking it up is enough
            step(lambda desk: None)
            continue
        name = state().current.plan.name
        if name in ("baseline", "profile", "validate"):
            step(lambda desk: steps.work(desk, steps.Choice(), lambda question: None))
        elif name == "fix":
            passed = [item for item in state().attempts if item.outcome is AttemptOutcome.PASSED]
            settled = [item for item in state().attempts if item.outcome is AttemptOutcome.REVERTED]
            if not passed:
                kernel.write_text("REPEATS = 2\n")
                step(lambda desk: steps.work(desk, steps.Choice(), lambda question: None))
                continue
            if not settled:
                if state().pending is None:
                    kernel.write_text("REPEATS = 5\n")
                step(lambda desk: steps.work(desk, steps.Choice(revert=True), lambda question: None))
                continue
        else:
            step(lambda desk: steps.note(desk, "learnt"))
        step(lambda desk: steps.advance(desk, steps.Choice()))


class Counted:
    """A file whose writes are counted."""

    def __init__(self, file: Any, count: Callable[[], None]) -> None:
        self._file = file
        self._count = count

    def write(self, text: Any) -> Any:
        self._count()
        return self._file.write(text)

    def flush(self) -> None:
        self._count()
        self._file.flush()

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def count_writes(count: Callable[[], None]) -> None:
    """Call ``count`` before everything that this process writes from now on."""

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            count()
            return function(*arguments, **named)

        return call

    def opening(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            file = function(*arguments, **named)
            return Counted(file, count) if file.writable() else file

        return call

    for name in SYSTEM_WRITES:
        setattr(os, name, counting(getattr(os, name)))
    os.fdopen = opening(os.fdopen)
    Path.open = opening(Path.open)  # type: ignore[method-assign]


def killed_at(number: int, work: Callable[[], None]) -> int:
    """Exit code of a process that does the work and is killed before its write of that number."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        seen = 0

        def count() -> None:
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

        count_writes(count)
        try:
            work()
        except LabError as error:
            print(f"at write {number}: {error}", flush=True)
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def samples(project: Path) -> dict[str, bytes]:
    """Every whole row of every samples file."""
    whole_lines = {}
    for path in (project / "sessions").glob("*/runs/*/samples.csv"):
        data = path.read_bytes()
        whole_lines[str(path.relative_to(project))] = data[: data.rfind(b"\n") + 1]
    return whole_lines


def test_killed_again_and_again_in_one_session(project: Path) -> None:
    """At its first write, then at the second after it went on, and so on: it comes to its end all the same."""
    _with_all_that_a_session_imports(project)
    kills = 0
    while True:
        before = samples(project)
        code = killed_at(kills + 1, lambda: whole_session(project))
        after = samples(project)
        for path, rows in before.items():
            assert after[path].startswith(rows), f"rows of {path} are gone"
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
        assert kills < MOST_WRITES
    assert kills > 20
    _ended_well(project)


def _with_all_that_a_session_imports(project: Path) -> None:
    """Else each process that is killed would import it again: gates, the report and what draws its pictures."""
    whole_session(shutil.copytree(project, project.parent / "first"))


FEW = 40
"""Every so many writes in the short form of the test."""


@pytest.mark.parametrize("offset", [7, pytest.param(23, marks=pytest.mark.slow)])
def test_killed_at_some_writes(project: Path, offset: int) -> None:
    assert _killed_at_each(project, offset, FEW) > 150


PARTS = 16
"""In which every write is tried, so that processes of tests can share them."""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, PARTS + 1))
def test_killed_at_every_write(project: Path, first: int) -> None:
    assert _killed_at_each(project, first, PARTS) > 150


def _killed_at_each(project: Path, number: int, stride: int) -> int:
    """From the beginning to the kill, then to the end in one go, for one write after the other; how many there are."""
    _with_all_that_a_session_imports(project)
    finished = False
    while not finished:
        shutil.rmtree(project / "sessions", ignore_errors=True)
        quick.git(project, "checkout", "-q", "--", ".")
        finished = killed_at(number, lambda: whole_session(project)) == 0
        rows = samples(project)
        whole_session(project)
        for path, data in rows.items():
            assert samples(project)[path].startswith(data), (
                f"rows of {path} are gone after the kill at {number}"
            )
        _ended_well(project)
        number += stride
    return number


def _ended_well(project: Path) -> None:
    state = load(folders.all_sessions(project / "sessions")[0]).state
    assert state.end is not None
    assert [run.outcome for run in state.runs].count(None) == 0
    assert [item.outcome for item in state.attempts][-1] is AttemptOutcome.REVERTED
    assert (project / "kernel.py").read_text() == "REPEATS = 2\n"
    _nothing_measured_is_missing(project)


def _nothing_measured_is_missing(project: Path) -> None:
    """The log names the samples of each run as the folder has them."""
    for path in (project / "sessions").glob("2*"):
        for run in load(path).state.runs:
            if run.run and (path / run.run / run_folder.MANIFEST).exists():
                assert run.samples == len(run_folder.load_run(path / run.run).samples)


@pytest.fixture
def session(project: Path, workshop: Any, clock: Any) -> Path:
    path = steps.start(project, "trial", "default", Settings("unit", "race"), workshop, clock).path
    with at_work(load(path), workshop, quick.Quiet(), clock) as desk:
        steps.work(desk, steps.Choice(), lambda question: None)
        steps.note(desk, "ü")
    return path


def test_a_log_cut_anywhere_is_read_and_goes_on(session: Path, workshop: Any, clock: Any) -> None:
    log = session / EVENTS
    data = log.read_bytes()
    first = data.index(b"\n") + 1
    for length in range(first, len(data), 7):
        log.write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        assert len(load(session).entries) == whole
        with at_work(load(session), workshop, quick.Quiet(), clock) as desk:
            steps.note(desk, "after")
        assert load(session).state.notes[-1] == "after"
        assert log.read_bytes().startswith(data[:length].rpartition(b"\n")[0])


def test_a_session_killed_before_its_first_event_is_none(project: Path) -> None:
    folder = project / "sessions" / "20260101T000000Z-x"
    folder.mkdir(parents=True)
    with pytest.raises(UsageError, match="session start"):
        load(folder)
    (folder / EVENTS).write_bytes(b'{"number": 0')
    with pytest.raises(UsageError, match="holds no event"):
        load(folder)
    assert open_session(project / "sessions") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [lines[0], "{}", *lines[2:]], "line 2 is damaged"),
        (lambda lines: [lines[0], *lines[2:]], "line 2 is damaged: it says that it is event 2"),
        (lambda lines: lines[1:], "line 1 is damaged: it is not the start"),
        (lambda lines: [lines[0], lines[0], *lines[1:]], "line 2 is damaged"),
        (lambda lines: [lines[0], lines[1].replace("run", "ruin"), *lines[2:]], "line 2 is damaged"),
        (lambda lines: [lines[0], lines[1].replace("20", "zz", 1), *lines[2:]], "line 2 is damaged"),
        (lambda lines: [lines[0], "[" * 100_000, *lines[2:]], "line 2 is damaged"),
    ],
)
def test_damage_is_named_and_not_worked_on(
    session: Path, change: Callable[[list[str]], list[str]], words: str
) -> None:
    log = session / EVENTS
    lines = log.read_text().splitlines()
    log.write_text("\n".join(change(lines)) + "\n")
    before = log.read_bytes()
    with pytest.raises(UsageError, match=words):
        load(session)
    assert log.read_bytes() == before


def test_a_folder_of_a_newer_version(session: Path) -> None:
    log = session / EVENTS
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[0]["data"] = {"schema_version": 2, "something": "new"}
    lines[1]["event"] = "Unheard"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(NewerVersionError, match=r"newer cudadent42 \(schema 2\).*upgrade it"):
        load(session)


def _limited(limit: int, work: Callable[[], None]) -> str:
    """What a process says that may not make any file longer than ``limit`` bytes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            work()
        except LabError as error:
            os.write(write, str(error).encode())
            os._exit(3)
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    said = os.read(read, 1 << 16).decode()
    os.close(read)
    assert os.waitstatus_to_exitcode(status) in (0, 3)
    return said


def test_a_full_disk_is_said_and_loses_nothing(session: Path, workshop: Any, clock: Any) -> None:
    log = session / EVENTS
    size = log.stat().st_size

    def note() -> None:
        with at_work(load(session), workshop, quick.Quiet(), clock) as desk:
            steps.note(desk, "x" * 500)

    before = log.read_bytes()
    for room in (0, 1, 100, 400):
        said = _limited(size + room, note)
        assert said.startswith(f"cannot write to {log}: File too large; what was measured is kept"), room
        assert log.read_bytes() == before
    note()
    assert len(load(session).state.notes) == 2


def test_an_interrupt_while_an_event_is_forced_to_the_disk(
    session: Path, workshop: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the work that was interrupted is recorded next: it must not bear the number of the event that was."""
    forced = os.fsync

    def interrupted(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", forced)
        forced(descriptor)
        raise KeyboardInterrupt

    before = load(session)
    with at_work(before, workshop, quick.Quiet(), clock) as desk:
        monkeypatch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps.note(desk, "not heard")
        steps.note(desk, "heard")
    state = load(session).state
    assert state.notes == (*before.state.notes, "heard")


def test_a_disk_that_fills_up_within_a_run(session: Path, workshop: Any, clock: Any) -> None:
    def work() -> None:
        with at_work(load(session), workshop, quick.Quiet(), clock) as desk:
            steps.work(desk, steps.Choice(), lambda question: None)

    said = _limited(4000, work)
    assert "cannot write to" in said
    assert load(session).state.measured() is not None
    work()
    state = load(session).state
    assert [run.outcome for run in state.runs][-1] is WorkOutcome.FINISHED
    assert len({run.run for run in state.runs}) == len(state.runs)


def test_a_lock_that_was_left_behind_and_one_that_is_held(tmp_path: Path) -> None:
    here = Instant("2026-01-01T00:00:00+00:00", 1.0, "boot", "host")
    with locked(tmp_path, "one", here) as left:
        assert left is None
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        with pytest.raises(UsageError, match=f"process {os.getpid()} on host"), locked(tmp_path, "two", here):
            pass
    assert (tmp_path / LOCK).read_text() == ""
    child = os.fork()
    if child == 0:
        with locked(tmp_path, "three", here):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with locked(tmp_path, "four", here) as left:
        assert left is not None
        assert (left.pid, left.session) == (child, "three")
    (tmp_path / LOCK).write_text('{"pid": ')
    with locked(tmp_path, "five", here) as left:
        assert left is None


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    """A repository may hold one; what it leads to was written over."""
    here = Instant("2026-01-01T00:00:00+00:00", 1.0, "boot", "host")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / LOCK).symlink_to(precious)
    with pytest.raises(UsageError, match="is a symbolic link"), locked(tmp_path / "sessions", "one", here):
        pass
    assert holder_of(tmp_path / "sessions") is None
    assert precious.read_text() == "mine"


def test_a_pipe_in_the_place_of_the_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    assert holder_of(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["[]", '{"pid": "x", "host": 1, "boot": [], "since": null, "session": {}}', "[" * 10_000]
)
def test_a_lock_that_says_anything(tmp_path: Path, text: str) -> None:
    here = Instant("2026-01-01T00:00:00+00:00", 1.0, "boot", "host")
    (tmp_path / LOCK).write_text(text)
    with locked(tmp_path, "one", here) as left:
        assert left is None


def test_who_only_asks_does_not_stand_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Instant("2026-01-01T00:00:00+00:00", 1.0, "boot", "host")
    (tmp_path / LOCK).touch()
    asking = os.open(tmp_path / LOCK, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: os.close(asking))  # the answer, while the other waits
    with locked(tmp_path, "one", here) as left:
        assert left is None


def test_who_is_gone() -> None:
    here = Instant("2026-01-01T00:00:00+00:00", 1.0, "boot", "host")
    assert not Holder(os.getpid(), "host", "boot", "", "").gone(here)
    assert Holder(os.getpid(), "host", "an earlier boot", "", "").gone(here)
    assert not Holder(os.getpid(), "another host", "another boot", "", "").gone(here)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert Holder(child, "host", "boot", "", "").gone(here)
