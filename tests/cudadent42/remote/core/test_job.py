"""Jobs over a real sshd: sending, starting once, following, cutting, fetching, and names that would be commands."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sshd import Server, trust

from cudadent42.base.errors import LabError
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import BusyError, JobState, State, Workspace
from cudadent42.remote.core.run import workspace_of
from cudadent42.remote.core.scripts import script
from cudadent42.remote.core.ssh import (
    ConnectionLostError,
    HostKeyError,
    call,
    command_text,
    connect,
    raise_if_lost,
    start,
)
from cudadent42.remote.core.tree import archive, read_tree

FAKE_PYTHON = """#!/bin/sh
# Stands for a Python with the lab: the module's name and "run" first, as job.sh calls it.
[ "$1 $2 $3" = "-m cudadent42 run" ] || exit 99
output=$5
mkdir -p "$output"
shift 5
for argument; do printf '%s\\n' "$argument"; done >"$output/arguments"
echo "on standard output"
for line in 1 2 3 4 5 6; do
    echo "line $line" >&2
    echo "$line" >>"$output/samples.csv"
    sleep "${PAUSE:-0}"
done
pwd >"$output/where"
exit "${CODE:-0}"
"""


HOSTILE = (
    "$(touch bad)",
    "`touch bad`",
    "; touch bad",
    "' ; touch bad ; '",
    '"',
    "\\",
    "-rf",
    "--",
    "\n",
    "a\nb",
    "*",
    "~",
)


def workspace(server: Server, folder: str = "a folder", python: str | None = None) -> Workspace:
    return Workspace(
        connect(parse(server.address)), Remote("there", parse(server.address), folder, python or "")
    )


def fake(tmp_path: Path, **variables: str) -> str:
    path = tmp_path / "fake python"
    setting = "".join(f"{name}={value}\n" for name, value in variables.items())
    path.write_text(FAKE_PYTHON.replace("#!/bin/sh\n", f"#!/bin/sh\n{setting}"))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small git working tree with an uncommitted change, an untracked, an ignored, a deleted and a hostile file."""
    root = tmp_path / "project"
    root.mkdir()
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for name in ("kept.py", "changed.py", "deleted.py", ".gitignore"):
        (root / name).write_text("*.log\n" if name == ".gitignore" else name)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    (root / "changed.py").write_text("uncommitted")
    (root / "deleted.py").unlink()
    (root / "ignored.log").write_text("not sent")
    (root / "$(touch bad)\n'quoted'.py").write_text("hostile")
    (root / "tool.sh").write_text("#!/bin/sh\n")
    (root / "tool.sh").chmod(0o755)
    return root


def wait(there: Workspace, job: str, state: JobState = JobState.DONE) -> State:
    """However long that takes on a busy machine; the time limit of a test ends it."""
    while (answer := jobs.state(there, job)).state is not state:
        time.sleep(0.05)
    return answer


def test_the_working_tree_arrives_as_it_is(server: Server, project: Path) -> None:
    there = workspace(server)
    assert jobs.send(there, read_tree(project))
    tree = server.folder / "home/a folder/tree"
    names = {path.name for path in tree.iterdir()}
    assert names - {".digest", ".source.json"} == {
        "kept.py",
        "changed.py",
        ".gitignore",
        "tool.sh",
        "$(touch bad)\n'quoted'.py",
    }
    assert (tree / "changed.py").read_text() == "uncommitted"
    assert (tree / "tool.sh").stat().st_mode & stat.S_IXUSR
    assert not jobs.send(there, read_tree(project))  # nothing changed, nothing sent
    (project / "kept.py").unlink()
    (tree / ".venv").mkdir()
    assert jobs.send(there, read_tree(project))
    assert not (tree / "kept.py").exists()  # no stale file stays
    assert (tree / ".venv").is_dir()


def test_the_revision_is_sent_along(server: Server, project: Path) -> None:
    """No repository is there, and the run folder's manifest needs it."""
    there = workspace(server)
    first = read_tree(project)
    jobs.send(there, first)
    sent = json.loads((server.folder / "home/a folder/tree/.source.json").read_text())
    assert (sent["branch"] != "", sent["dirty"]) == (True, True)
    assert "uncommitted" in sent["diff"]
    git = ["git", "-C", str(project), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "commit", "-q", "-a", "-m", "second"], check=True)
    assert read_tree(project).files == first.files
    assert jobs.send(there, read_tree(project))  # the same files, of another commit


def test_a_tree_that_arrives_cut_short_is_not_taken(server: Server, project: Path) -> None:
    """tar takes an archive that ends between two files for a whole one."""
    there = workspace(server)
    tree = read_tree(project)
    jobs.send(there, tree)
    (project / "kept.py").write_text("another")
    changed = read_tree(project)
    with archive(changed) as file:
        whole = file.read()
    for blocks in range(len(whole) // tarfile.BLOCKSIZE):
        cut = whole[: blocks * tarfile.BLOCKSIZE]
        if f"\0{changed.digest}".encode() in cut:
            break
        assert there.call("receive", changed.digest, data=io.BytesIO(cut)).exit_code == 74
    else:
        raise AssertionError("the archive does not say that it is whole")
    assert (server.folder / "home/a folder/tree/kept.py").read_text() == "kept.py"
    assert jobs.send(there, changed)
    assert sorted(path.name for path in (server.folder / "home/a folder").iterdir()) == [
        ".lock",
        "jobs",
        "tree",
    ]


def test_a_tree_that_still_arrives_is_left_alone(server: Server, project: Path) -> None:
    """Of two that are sent at once the first belongs to a connection that was lost, or the second does."""
    there = workspace(server)
    tree = read_tree(project)
    with archive(tree) as file:
        whole = file.read()
    slow = start(there.connection, script("job.sh"), ("receive", there.remote.folder, tree.digest))
    assert slow.stdin is not None
    slow.stdin.write(whole[: tarfile.BLOCKSIZE])
    slow.stdin.flush()
    folder = server.folder / "home/a folder"
    while not any(folder.glob("tree.new.*")):
        time.sleep(0.02)
    assert jobs.send(there, tree)
    _, errors = slow.communicate(whole[tarfile.BLOCKSIZE :])
    assert slow.returncode == 0, errors
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "jobs", "tree"]
    assert not jobs.send(there, tree)


def test_two_starts_at_once_start_once(server: Server, project: Path, tmp_path: Path) -> None:
    """The answer of the first may have been lost while it was at work."""
    there = workspace(server, python=fake(tmp_path, PAUSE="0.1"))
    jobs.send(there, read_tree(project))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: jobs.start(there, "job-1", "cpu", ()), range(4)))
    assert wait(there, "job-1").exit_code == 0
    run = server.folder / "home/a folder/jobs/job-1/run"
    assert (run / "samples.csv").read_text().split() == list("123456")


def test_a_job_from_start_to_fetch(server: Server, project: Path, tmp_path: Path) -> None:
    there = workspace(server, python=fake(tmp_path, CODE="3"))
    jobs.send(there, read_tree(project))
    arguments = (
        "--case=a b",
        "--case=$(touch bad)",
        "--case=';touch bad'",
        "--case=-x\n--case=y",
        "--suite=*",
    )
    jobs.start(there, "job-1", "cpu", arguments)
    seen: list[bytes] = []
    jobs.follow(there, "job-1", 0, seen.append)
    assert b"".join(seen).decode() == "".join(f"line {line}\n" for line in range(1, 7))
    assert wait(there, "job-1") == State(JobState.DONE, 3)
    assert jobs.jobs(there) == {"job-1": State(JobState.DONE, 3)}
    jobs.fetch(there, "job-1", tmp_path / "back/job")
    back = tmp_path / "back/job"
    assert (back / "run/arguments").read_text() == "\n".join(arguments) + "\n"
    assert (back / "out").read_text() == "on standard output\n"
    assert (back / "run/where").read_text().strip().endswith("a folder/tree")
    assert os.listdir(tmp_path / "back") == ["job"]
    assert (server.folder / "home/a folder/fetching").read_text().split()[0].isdigit()  # for the watchdog
    jobs.forget(there, "job-1")
    assert jobs.state(there, "job-1") == State(JobState.NONE)
    assert not [*server.folder.rglob("bad"), *project.rglob("bad")]


def test_links_of_the_far_side_do_not_come_back(server: Server, tmp_path: Path) -> None:
    """This one stays within what is unpacked, and would lead to a file beside the folders of runs once it is moved."""
    there = workspace(server)
    job = server.folder / "home/a folder/jobs/job-1"
    (job / "run").mkdir(parents=True)
    (job / "run/results.json").symlink_to("../../x")
    (job / "run/etc").symlink_to("/etc")
    (job / "log").write_text("a line\n")
    os.link(job / "log", job / "out")
    jobs.fetch(there, "job-1", tmp_path / "back/job")
    assert [path for path in (tmp_path / "back").rglob("*") if path.is_symlink()] == []
    assert (tmp_path / "back/job/run").is_dir()


def test_what_cannot_be_kept_here_is_an_error_in_words(server: Server, tmp_path: Path) -> None:
    (server.folder / "home/a folder/jobs/job-1").mkdir(parents=True)
    (tmp_path / "in the way").write_text("")
    with pytest.raises(LabError, match=r"cannot be kept in .*in the way"):
        jobs.fetch(workspace(server), "job-1", tmp_path / "in the way/job")


def test_starting_again_starts_nothing(server: Server, project: Path, tmp_path: Path) -> None:
    there = workspace(server, python=fake(tmp_path))
    jobs.send(there, read_tree(project))
    jobs.start(there, "job-1", "cpu", ())
    jobs.start(there, "job-1", "cpu", ())
    wait(there, "job-1")
    jobs.start(there, "job-1", "cpu", ())
    run = server.folder / "home/a folder/jobs/job-1/run"
    assert (run / "samples.csv").read_text().split() == list("123456")


def test_one_run_at_a_time(server: Server, project: Path, tmp_path: Path) -> None:
    there = workspace(server, python=fake(tmp_path, PAUSE="20"))
    tree = read_tree(project)
    jobs.send(there, tree)
    jobs.start(there, "job-1", "cpu", ())
    with pytest.raises(BusyError, match="busy with job-1"):
        jobs.start(there, "job-2", "cpu", ())
    (project / "new.py").write_text("new")
    with pytest.raises(BusyError, match="remote stop job-1"):
        jobs.send(there, read_tree(project))
    jobs.stop(there, "job-1")
    assert jobs.state(there, "job-1") == State(JobState.DONE, 128 + signal.SIGTERM)
    jobs.fetch(there, "job-1", tmp_path / "back")
    assert (tmp_path / "back/run/samples.csv").read_text().startswith("1\n")


def test_a_cut_connection_is_followed_from_where_it_was(
    server: Server, project: Path, tmp_path: Path
) -> None:
    there = workspace(server, python=fake(tmp_path, PAUSE="0.3"))
    jobs.send(there, read_tree(project))
    jobs.start(there, "job-1", "cpu", ())
    seen = bytearray()

    def cut_after_two(chunk: bytes) -> None:
        seen.extend(chunk)
        if seen.count(b"\n") == 2:
            assert server.cut() > 0

    with pytest.raises(ConnectionLostError):
        jobs.follow(there, "job-1", 0, cut_after_two)
    jobs.follow(there, "job-1", len(seen), seen.extend)
    assert seen.decode() == "".join(f"line {line}\n" for line in range(1, 7))
    assert wait(there, "job-1").exit_code == 0


def test_a_job_whose_process_is_gone_is_lost(server: Server, project: Path, tmp_path: Path) -> None:
    there = workspace(server, python=fake(tmp_path, PAUSE="20"))
    jobs.send(there, read_tree(project))
    jobs.start(there, "job-1", "cpu", ())
    pid = int((server.folder / "home/a folder/jobs/job-1/pid").read_text().split()[0])
    os.killpg(pid, 9)
    assert wait(there, "job-1", JobState.LOST) == State(JobState.LOST)


def test_a_process_number_that_is_used_again_is_another_process(
    server: Server, project: Path, tmp_path: Path
) -> None:
    """After a restart the number may belong to anybody, whom nothing may take for the job, or end."""
    there = workspace(server, python=fake(tmp_path, PAUSE="20"))
    jobs.send(there, read_tree(project))
    jobs.start(there, "job-1", "cpu", ())
    pid_file = server.folder / "home/a folder/jobs/job-1/pid"
    os.killpg(int(pid_file.read_text().split()[0]), 9)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        pid_file.write_text(f"{stranger.pid} 1\n")
        assert jobs.state(there, "job-1") == State(JobState.LOST)
        jobs.stop(there, "job-1")
        assert stranger.poll() is None
        stranger.kill()


def test_a_zombie_is_no_running_job(server: Server) -> None:
    """The first process of a container may never take its children's exit codes."""
    there = workspace(server)
    assert jobs.jobs(there) == {}
    folder = server.folder / "home/a folder/jobs/job-1"
    folder.mkdir()
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        since = Path(f"/proc/{ended.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        (folder / "pid").write_text(f"{ended.pid} {since}\n")
        assert jobs.state(there, "job-1") == State(JobState.LOST)


def test_an_unknown_host_key_is_refused(
    server: Server, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust(keys, tmp_path, server.port, "host", monkeypatch)
    (tmp_path / "known_hosts").write_text("")
    with pytest.raises(HostKeyError, match="not known; look at it once with: ssh -p"):
        jobs.jobs(workspace(server))
    trust(keys, tmp_path, server.port, "stranger", monkeypatch)
    with pytest.raises(HostKeyError, match=rf"another than before.* -R '\[127\.0\.0\.1\]:{server.port}'"):
        jobs.jobs(workspace(server))


@pytest.mark.parametrize("file", ["", "UserKnownHostsFile /dev/null"])
def test_a_configuration_that_switches_the_check_off(
    server: Server, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The machine's key is checked all the same, where the configuration keeps keys or in the usual place."""

    def configured(key: str) -> Workspace:
        trust(keys, tmp_path, server.port, key, monkeypatch)
        config = tmp_path / "ssh_config"
        config.write_text(f"StrictHostKeyChecking no\n{file}\n{config.read_text()}")
        return workspace_of(Remote("there", parse(server.address), folder="a folder"))

    if file:  # the usual place is the one of whoever runs this, who has never met this machine
        usual = r"StrictHostKeyChecking=ask -o 'UserKnownHostsFile=~/\.ssh/known_hosts' 127\.0\.0\.1"
        with pytest.raises(HostKeyError, match=usual):
            jobs.jobs(configured("host"))
        return
    assert jobs.jobs(configured("host")) == {}
    configured("host").connection.close()
    with pytest.raises(HostKeyError, match="another than before"):
        jobs.jobs(configured("stranger"))


def test_the_agent_is_not_lent_to_the_far_side(server: Server, tmp_path: Path) -> None:
    """Whatever the configuration says."""
    with (tmp_path / "ssh_config").open("a") as file:
        file.write("ForwardAgent yes\nForwardX11 yes\nRemoteForward 127.0.0.1:1 127.0.0.1:2\n")
    argv = connect(parse(server.address)).argv()
    told = subprocess.run([*argv[:-2], "-G", *argv[-2:]], capture_output=True, text=True, check=True).stdout
    assert {"forwardagent no", "forwardx11 no", "clearallforwardings yes"} <= set(told.splitlines())
    assert "remoteforward" not in told


def test_a_client_that_is_killed_is_a_lost_connection(server: Server) -> None:
    """Killed here by a signal, ssh itself has no exit code of its own."""
    connection = connect(parse(server.address))
    with pytest.raises(ConnectionLostError):
        raise_if_lost(connection, -signal.SIGKILL, "")
    raise_if_lost(connection, 74, "")  # the script's own


def test_of_a_command_that_is_cut_short_nothing_is_done(tmp_path: Path) -> None:
    whole = command_text('echo "$*" >done', ("start", "job-1", "--repeats", "5000"))

    def given(text: bytes) -> str | None:
        far = ["sh", "-c", f'eval "$(head -c {len(whole)})"']
        subprocess.run(far, input=text, cwd=tmp_path, capture_output=True, check=False)
        return (tmp_path / "done").read_text() if (tmp_path / "done").exists() else None

    last_word = len(whole.rstrip(b"}\n"))
    assert [given(whole[:length]) for length in range(last_word + 1)] == [None] * (last_word + 1)
    assert given(whole) == "start job-1 --repeats 5000\n"


def test_a_machine_that_does_not_answer(server: Server) -> None:
    server.process.terminate()
    server.process.wait()
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        jobs.jobs(workspace(server))


def test_a_damaged_answer(server: Server) -> None:
    for text in ("", "running away", "finished 0", "done x"):
        with pytest.raises(LabError, match="expected none, running, lost or done"):
            jobs.parse_state(text)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [
                    "$(touch bad)",
                    "`touch bad`",
                    "; touch bad",
                    "' ; touch bad ; '",
                    '"',
                    "\\",
                    "-rf",
                    "--",
                    "\n",
                    "a\nb",
                    "*",
                    "~",
                ]
            ),
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30),
        ),
        max_size=6,
    )
)
def test_nothing_in_an_argument_is_executed(server: Server, words: list[str]) -> None:
    """200 lists of hostile words arrive byte for byte, through the login shell and sh."""
    connection = connect(parse(server.address))
    done = call(connection, 'for word; do printf "%s\\0" "$word"; done', *words)
    assert done.exit_code == 0
    assert done.output == b"".join(word.encode() + b"\0" for word in words)
    assert not (server.folder / "home/bad").exists()
