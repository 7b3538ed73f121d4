"""Far sides as they are found: other login shells, greetings, missing programs, full disks. Runs that never began."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import cudadent42
from sshd import SYSTEM_PATH, Server, serve

from cudadent42.base.errors import LabError, MachineNotReadyError
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import record, run
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote, save
from cudadent42.remote.core.job import BusyError, JobState, State, Workspace
from cudadent42.remote.core.record import CloudRecord, JobRecord
from cudadent42.remote.core.run import Returned, RunRequest, begin, bring_back, workspace_of
from cudadent42.remote.core.ssh import call, stream
from cudadent42.remote.core.tree import Tree, read_tree

GREETING = """#!/bin/sh
printf 'Welcome%s' "$END"
echo "and to its standard error" >&2
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""
SHELL = """#!/bin/sh
exec {shell} -c "$SSH_ORIGINAL_COMMAND"
"""
PYTHON = """#!/bin/sh
mkdir -p "$5"
echo measured >"$5/samples.csv"
echo printed
sleep "${PAUSE:-0}"
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """What is sent: a small one in place of this project."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "file.py").write_text("")
    os.system(f"git -C '{project}' init -q")
    monkeypatch.setattr(run, "project_root", lambda: project)
    return read_tree(project)


def test_a_run_that_cannot_be_put_on_record_there_does_not_begin(
    server: Server, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a full disk: neither its end nor its limit could be told, and it would be waited for."""
    python = script(tmp_path / "far python", f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
    monkeypatch.setattr(record, "new_job", lambda: "job-1")
    workspace = at(server, str(python))
    (server.folder / "home" / workspace.remote.folder / "jobs/job-1/pid.new").mkdir(parents=True)
    with pytest.raises(LabError, match="its process did not start there"):
        run_on(workspace, "cpu", (), tmp_path / "out", lambda line: None, lambda chunk: None)
    assert not (tmp_path / "ran").exists()
    assert jobs.state(workspace, "job-1").state is JobState.NONE
    assert record.records() == ()


def run_on(
    workspace: Workspace,
    device: str,
    arguments: tuple[str, ...],
    output: Path,
    say: Callable[[str], None],
    on_log: Callable[[bytes], None],
    cloud: CloudRecord | None = None,
) -> Returned:
    begun = begin(workspace, RunRequest(device=device, arguments=arguments, output=output), say, cloud)
    return bring_back(workspace, begun, say, on_log)


def at(server: Server, python: str = "") -> Workspace:
    return workspace_of(Remote("there", parse(server.address), python=python))


LOGINS = {
    "a greeting": GREETING.replace("$END", r"\n"),
    "a greeting without an end of line": GREETING.replace("$END", ""),
    "fish": SHELL.format(shell="fish"),
    "csh": SHELL.format(shell="tcsh"),
    "zsh": SHELL.format(shell="zsh"),
    "dash": SHELL.format(shell="dash"),
}


@pytest.mark.parametrize("login", LOGINS)
def test_any_login_shell_will_do(
    login: str, tree: Tree, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = {"csh": "tcsh"}.get(login, login)
    if "greeting" not in login and shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    python = script(tmp_path / "tools there/python", PYTHON)
    with serve(keys, tmp_path, monkeypatch, login=script(tmp_path / "login", LOGINS[login])) as server:
        there = at(server, str(python))
        assert jobs.send(there, tree)
        assert not jobs.send(there, tree)  # its digest is understood
        seen: list[bytes] = []
        returned = run_on(there, "cpu", (), tmp_path / "back", lambda line: None, seen.append)
    assert (returned.exit_code, returned.output) == (0, "printed\n")
    assert (returned.folder / "samples.csv").read_text() == "measured\n"
    assert b"".join(seen) == (returned.folder / "remote.log").read_bytes() == b""


@pytest.mark.parametrize("end", ["exit 0", "echo 'This account is not available.'; exit 1"])
def test_a_login_that_does_nothing_is_no_success(
    end: str, tree: Tree, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start-up file may end the shell, with any exit code."""
    login = script(tmp_path / "login", f"#!/bin/sh\n{end}\n")
    with (
        serve(keys, tmp_path, monkeypatch, login=login) as server,
        pytest.raises(
            LabError, match=r"login shell there does not do what .*(said nothing|not available\.)$"
        ),
    ):
        jobs.send(at(server), tree)


@pytest.mark.parametrize("name", ["tar", "flock", "setsid"])
def test_a_program_that_is_missing_there_is_named_before_anything_is_sent(
    name: str, tree: Tree, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools-there"
    tools.mkdir()
    for each in ("sh", "bash", "head", "tar", "flock", "setsid", "tail", "sed", "cut", "mkdir", "cat", "rm"):
        if each != name:
            (tools / each).symlink_to(shutil.which(each, path=SYSTEM_PATH) or "missing")
    with (
        serve(keys, tmp_path, monkeypatch, tools_there=tools, only=True) as server,
        pytest.raises(LabError, match=rf"program .* is missing there; install it .*: {name}$"),
    ):
        jobs.send(at(server), tree)
    assert not (tmp_path / "there/home/cudadent42-remote").exists()


def test_a_full_disk_there(tree: Tree, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was unpacked before it was full is not left there to fill it."""
    tools = tmp_path / "tools"
    refuse = 'echo "tar: file.py: Cannot write: No space left on device" >&2\nexit 2\n'
    script(tools / "tar", f'#!/bin/sh\ncat >"$2/half"\n{refuse}')
    with serve(keys, tmp_path, monkeypatch, tools_there=tools) as server:
        left = server.folder / "home/cudadent42-remote/tree.new.999999999"
        left.mkdir(parents=True)  # of a call that was cut earlier
        with pytest.raises(LabError, match=r"its disk has no room there; free some, .*--folder"):
            jobs.send(at(server), tree)
        assert [path.name for path in left.parent.iterdir()] == ["jobs"]


def test_a_run_that_could_not_be_started_is_not_waited_for(
    server: Server, tree: Tree, tmp_path: Path
) -> None:
    """Or it would be the one that `attach` and `stop` mean from then on."""
    python = script(tmp_path / "tools there/python", PYTHON.replace("${PAUSE:-0}", "60"))
    nobody = at(server, "/nowhere/python")
    with pytest.raises(LabError, match=r"no such Python there; .*--python.*: /nowhere/python"):
        run_on(nobody, "cpu", (), tmp_path / "back", lambda line: None, lambda chunk: None)
    assert [each for each in record.records() if not each.fetched] == []
    there = at(server, str(python))
    jobs.start(there, "job-1", "cpu", ())
    (tmp_path / "back").mkdir()  # as the command does for a run that was not told where to go
    with pytest.raises(BusyError, match="busy with job-1"):
        run_on(there, "cpu", (), tmp_path / "back", lambda line: None, lambda chunk: None)
    assert not (tmp_path / "back").exists()
    assert [each for each in record.records() if not each.fetched] == []
    jobs.stop(there, "job-1")


def begun(folder: Path, job: str = "job-1") -> JobRecord:
    started = JobRecord(job, "there", str(folder / "back"), (), "2026-11-01T12:00:00+00:00")
    record.save(started)
    return started


def test_a_run_that_the_machine_does_not_know(server: Server, tmp_path: Path) -> None:
    """The name may be another machine's by now: that is for the user to say."""
    begun(tmp_path)
    save(Remote("there", parse(server.address)))
    attached = cudadent42("remote", "attach", cwd=tmp_path)
    assert attached.returncode == 2
    assert "there knows no run job-1" in attached.stderr
    assert "no longer: cudadent42 remote stop job-1" in attached.stderr
    stopped = cudadent42("remote", "stop", "job-1", cwd=tmp_path)
    assert (stopped.returncode, stopped.stdout) == (
        0,
        "there knows no run job-1; it is not waited for any more\n",
    )
    assert "no run elsewhere waits" in cudadent42("remote", "attach", cwd=tmp_path).stderr


def test_the_log_names_the_folder_here(server: Server, tree: Tree, tmp_path: Path) -> None:
    """There it is another one, by a name that leads nowhere here."""
    python = script(tmp_path / "tools there/python", PYTHON.replace("echo printed", 'echo "kept in $5" >&2'))
    seen: list[bytes] = []
    run_on(at(server, str(python)), "cpu", (), tmp_path / "back", lambda line: None, seen.append)
    assert b"".join(seen).decode() == f"kept in {tmp_path}/back\n"


def test_a_run_knows_the_rate_of_its_machine(server: Server, tree: Tree, tmp_path: Path) -> None:
    """The bill finds by it that the run's minutes are paid for with the machine's start."""
    python = script(tmp_path / "python", PYTHON.replace("echo printed", 'echo "$CUDADENT42_RATE"'))
    rate = "it's $(id) \" one"
    rented = CloudRecord("gce://p/z/i", rate, None, "2026-09-26T10:00:00+00:00", "stop", "auto", False, "")
    back = run_on(
        at(server, str(python)),
        "cpu",
        (),
        tmp_path / "back",
        lambda line: None,
        lambda chunk: None,
        rented,
    )
    assert back.output == f"{rate}\n"


def test_runs_on_machines_of_ones_own_are_shown(tmp_path: Path) -> None:
    begun(tmp_path)
    shown = cudadent42("remote", "status", cwd=tmp_path).stdout
    assert "not brought back: job-1 on there; bring it back with: cudadent42 remote attach job-1\n" in shown
    document = json.loads(cudadent42("remote", "status", "--json", cwd=tmp_path).stdout)
    assert document["machines"] == []
    assert document["other_jobs"] == [{"job": "job-1", "remote": "there"}]


@pytest.mark.parametrize("folder", ["/nowhere", "long/" + "x" * 60, ""])
def test_a_folder_for_sockets_that_will_not_do(
    folder: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `su` the variable is another user's, and a session without a login has none."""
    runtime = tmp_path / folder
    if "long" in folder:
        runtime.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime) if folder else "")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    there = at(server)
    assert jobs.jobs(there) == {}
    assert there.connection.control.parent == Path("/tmp")
    there.connection.close()


def test_no_ssh_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = workspace_of(Remote("there", parse("ssh://nowhere")))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineNotReadyError, match="no ssh on PATH here; install"):
        jobs.jobs(there)


def test_starting_a_machine_that_cannot_be_started(tmp_path: Path) -> None:
    begun(tmp_path)
    attached = cudadent42("remote", "attach", "--start", cwd=tmp_path)
    assert attached.returncode == 2
    assert "there is no machine that --start could start" in attached.stderr


def test_stopping_what_is_back_is_said_to_be_that(server: Server, tmp_path: Path) -> None:
    job = server.folder / "home/cudadent42-remote/jobs/job-1"
    (job / "run").mkdir(parents=True)
    for name in ("log", "out"):
        (job / name).write_text("")
    (job / "exit").write_text("0\n")
    begun(tmp_path)
    save(Remote("there", parse(server.address)))
    assert cudadent42("remote", "attach", cwd=tmp_path).returncode == 0
    stopped = cudadent42("remote", "stop", "job-1", cwd=tmp_path)
    assert (
        stopped.stdout == f"job-1 has ended and is not waited for any more; exit code 0, in {tmp_path}/back\n"
    )
    assert json.loads(cudadent42("remote", "stop", "job-1", "--json", cwd=tmp_path).stdout)["ended"] == []


def test_a_name_that_goes_to_another_machine(server: Server, tmp_path: Path) -> None:
    assert "no machine has a name yet" in cudadent42("remote", "list", cwd=tmp_path).stdout
    assert cudadent42("remote", "jobs", cwd=tmp_path).stdout == "no run was started elsewhere from here\n"
    cudadent42("remote", "add", "there", "ssh://one", cwd=tmp_path)
    begun(tmp_path)
    for address, warned in (("ssh://one", False), ("ssh://two", True)):
        added = cudadent42("remote", "add", "there", address, cwd=tmp_path)
        assert added.returncode == 0
        assert ("job-1 is not back yet; it was started when there was ssh://one" in added.stderr) is warned


def test_a_job_that_cannot_be_followed_is_waited_for(
    server: Server, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is not asked for without a pause in between."""
    python = script(tmp_path / "tools there/python", PYTHON)
    asked: list[str] = []
    states = iter([JobState.RUNNING, JobState.RUNNING])
    ask = jobs.state

    def state(workspace: Workspace, job: str) -> State:
        asked.append("asked")
        answer = next(states, None)
        return ask(workspace, job) if answer is None else State(answer)

    monkeypatch.setattr(jobs, "follow", lambda *_: asked.append("not followed"))
    monkeypatch.setattr(jobs, "state", state)
    # Only there: other threads of this process may sleep too.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: asked.append("waited"))
    monkeypatch.setattr(run, "time", clock)
    jobs.send(at(server), tree)
    returned = run_on(at(server, str(python)), "cpu", (), tmp_path / "back", lambda line: None, asked.append)
    assert returned.exit_code == 0
    assert asked[:6] == ["not followed", "asked", "waited", "not followed", "asked", "waited"]


def test_a_machine_that_prints_without_an_end_takes_no_memory(server: Server) -> None:
    connection = at(server).connection
    with pytest.raises(LabError, match="said more than 16 MiB where a few words were expected"):
        call(connection, "yes")
    assert call(connection, "echo still there").output == b"still there\n"


def test_what_it_complains_of_is_read_as_it_comes_and_its_end_is_kept(server: Server) -> None:
    """More than a pipe holds, before anything is printed: who does not read it waits for ever."""
    connection = at(server).connection
    flood = "yes complaint | head -c 3000000 >&2; echo the last >&2; echo done"
    done = call(connection, flood)
    assert done.output == b"done\n"
    assert done.errors.endswith("complaint\nthe last\n") or done.errors.endswith("the last\n")
    assert len(done.errors) <= 1 << 16
    seen: list[bytes] = []
    assert stream(connection, flood, (), seen.append) == 0
    assert b"".join(seen) == b"done\n"
