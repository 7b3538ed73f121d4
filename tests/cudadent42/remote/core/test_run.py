"""The whole way, with the real lab on the far side: ``remote add``, ``run --on``, cuts, ``attach``, ``stop``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from command_line import ROOT, finished, started
from sshd import SSHD, Server

from cudadent42.base.errors import LabError, UsageError
from cudadent42.plan import Choices, RunOptions
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import record, run
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.arguments import forwarded
from cudadent42.remote.core.hosts import Remote, get, remotes, save
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import RunRequest, bring_back, persistently, workspace_of
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.providers.ssh import AtHand

SMALL = ("--suite", "small", "--case", "tiny", "--dtype", "fp32", "--repeats", "5", "--device", "cpu")


@pytest.fixture
def there(server: Server, tmp_path: Path) -> Server:
    done = finished(
        started("remote", "add", "there", server.address, "--python", sys.executable, cwd=tmp_path)
    )
    assert done.returncode == 0, done.stderr
    return server


@pytest.mark.slow
def test_a_run_elsewhere_comes_back_through_cuts(there: Server, tmp_path: Path) -> None:
    process = started("run", "--on", "there", *SMALL, "--output-dir", "here", "--json", cwd=tmp_path)
    assert process.stderr is not None
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()))
    reader.start()
    cuts = 0
    # Between two calls nobody misses a connection: on until one was missed, which following the run does at the latest.
    while process.poll() is None and not (cuts >= 3 and any("trying again" in line for line in said)):
        time.sleep(2)  # the pace alone: cut at once, no call would ever come to its end
        cuts += there.cut() > 0
    reader.join()
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.wait() == 0, "".join(said)
    assert any("trying again" in line for line in said)
    document = json.loads(output)
    assert document["folder"] == str(tmp_path / "here")
    assert (tmp_path / "here/results.json").exists()
    assert (tmp_path / "here/remote.log").exists()
    manifest = json.loads((tmp_path / "here/manifest.json").read_text())
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert manifest["revision"]["commit"] == head.stdout.strip()  # there is no repository there
    assert not list((there.folder / "home/cudadent42-remote/jobs").iterdir())  # nothing is left there


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_is_attached_to(there: Server, tmp_path: Path) -> None:
    process = started("run", "--on", "there", *SMALL, "--output-dir", "here", cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("started "):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    job = line.split()[1]
    assert f"cudadent42 remote attach {job}\nor end it with: cudadent42 remote stop {job}\n" in errors
    assert "not brought back" in finished(started("remote", "jobs", cwd=tmp_path)).stdout
    done = finished(started("remote", "attach", cwd=tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here/results.json").exists()
    (entered,) = json.loads(finished(started("ledger", "list", "--json", cwd=tmp_path)).stdout)["runs"]
    assert entered["path"] == str(tmp_path / "here")
    assert "exit code 0" in finished(started("remote", "jobs", cwd=tmp_path)).stdout


@pytest.mark.slow
def test_a_run_elsewhere_can_be_ended_and_keeps_what_it_measured(there: Server, tmp_path: Path) -> None:
    process = started(
        "run", "--on", "there", *SMALL, "--repeats", "5000", "--output-dir", "here", cwd=tmp_path
    )
    samples = there.folder / "home/cudadent42-remote/jobs"
    while not any(path.stat().st_size > 1000 for path in samples.glob("*/run/samples.csv")):
        time.sleep(0.2)
    stopped = finished(started("remote", "stop", cwd=tmp_path))
    assert stopped.returncode == 0, stopped.stderr
    done = finished(process)
    assert done.returncode == 130, done.stderr
    assert json.loads((tmp_path / "here/manifest.json").read_text())["status"] == "interrupted"
    assert len((tmp_path / "here/samples.csv").read_text().splitlines()) > 5


@pytest.mark.slow
def test_a_machine_that_is_restarted_in_the_middle(there: Server, tmp_path: Path) -> None:
    """Its processes and its sshd end at once, and only sshd comes back: the run is lost, what it measured is not."""
    process = started(
        "run", "--on", "there", *SMALL, "--repeats", "5000", "--output-dir", "here", cwd=tmp_path
    )
    folder = there.folder / "home/cudadent42-remote/jobs"
    while not any(path.stat().st_size > 1000 for path in folder.glob("*/run/samples.csv")):
        time.sleep(0.2)
    (pid_file,) = folder.glob("*/pid")
    there.process.kill()
    os.killpg(int(pid_file.read_text().split()[0]), signal.SIGKILL)
    there.cut()
    there.process.wait()
    again = subprocess.Popen([SSHD, "-D", "-f", str(there.folder / "sshd_config")])
    try:
        done = finished(process)
        assert done.returncode == 2, done.stderr
        assert "was lost on there" in done.stderr
        assert str(tmp_path / "here") in done.stderr
        assert len((tmp_path / "here/samples.csv").read_text().splitlines()) > 5
        assert not list(folder.iterdir())
        assert "lost" in finished(started("remote", "jobs", cwd=tmp_path)).stdout
        # Nothing of it is in the way of the next one.
        next_run = finished(started("run", "--on", "there", *SMALL, "--output-dir", "next", cwd=tmp_path))
        assert next_run.returncode == 0, next_run.stderr
    finally:
        again.terminate()
        again.wait()


def test_what_cannot_run_is_found_before_anything_is_sent(there: Server, tmp_path: Path) -> None:
    for arguments, words in (
        (("--on", "nowhere"), "no remote 'nowhere'; expected one of there"),
        (("--on", "there", "--suite", "no-such"), "no-such"),
        (("--on", "there", "--case", "no-such"), "unknown case"),
    ):
        done = finished(started("run", *arguments, cwd=tmp_path))
        assert done.returncode == 2
        assert words in done.stderr
    assert not (there.folder / "home/cudadent42-remote").exists()


def test_remotes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cudadent42.remote.core.address import parse

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    kept = Remote("gpu", parse("ssh://me@host:2222"), 'a "folder"', "/opt/py thon/bin/python3")
    save(kept)
    save(Remote("other", parse("ssh://other")))
    assert get("gpu") == kept
    assert list(remotes()) == ["gpu", "other"]
    (tmp_path / "cudadent42/remotes.toml").write_text("[gpu\n")
    with pytest.raises(UsageError, match="mend it, or remove it"):
        remotes()
    (tmp_path / "cudadent42/remotes.toml").write_text('[gpu]\naddress = "ssh://-oProxyCommand=x"\n')
    with pytest.raises(UsageError, match="no address"):
        remotes()


def test_arguments_are_passed_on_as_one_word_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my suite.toml").write_text("")
    (tmp_path / "mine.py").write_text("")
    choices = Choices(
        "my suite.toml", cases=("a", "$(touch b)"), implementations=("cudadent42", "mine.py:f"), repeats=3
    )
    run = RunOptions(choices=choices, device="cpu", save_samples=False)
    assert forwarded(run, tmp_path, tmp_path, as_json=True) == (
        "--suite=my suite.toml",
        "--repeats=3",
        "--seed=0",
        "--case=a,$(touch b)",
        "--implementations=cudadent42,mine.py:f",
        "--device=cpu",
        "--no-save-csv",
        "--json",
    )
    with pytest.raises(UsageError, match="only the working tree is sent"):
        forwarded(RunOptions(choices=Choices("my suite.toml")), tmp_path / "elsewhere", tmp_path)


def test_records_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="no run elsewhere waits"):
        record.find(None)
    kept = record.JobRecord(
        record.new_job(), "there", "/somewhere", ("--suite=small",), "2026-01-01T00:00:00+00:00"
    )
    record.save(kept)
    assert record.find(None) == record.find(kept.job) == kept
    (tmp_path / "cudadent42/remote" / f"{kept.job}.json").write_text('{"schema_version": 99}')
    with pytest.raises(UsageError, match="newer version"):
        record.records()
    (tmp_path / "cudadent42/remote" / f"{kept.job}.json").write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        record.records()


def test_a_run_that_was_put_in_its_place_before_is_taken_for_back(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the last move of files and the record of it: attaching again finds the folder full."""
    remote = Remote("mine", parse(server.address))
    job = server.folder / "home/cudadent42-remote/jobs/job-1"
    (job / "run").mkdir(parents=True)
    for name, text in {
        "run/samples.csv": "1\n",
        "log": "a line\n",
        "out": "printed\n",
        "exit": "0\n",
    }.items():
        (job / name).write_text(text)
    begun = JobRecord("job-1", "mine", str(tmp_path / "out"), (), "2026-11-01T12:00:00+00:00")
    workspace = workspace_of(remote)
    monkeypatch.setattr(jobs, "forget", lambda *_: None)
    for _ in range(2):
        returned = bring_back(workspace, begun, print, lambda chunk: None)
        assert (returned.exit_code, returned.output) == (0, "printed\n")
        assert (tmp_path / "out/samples.csv").read_text() == "1\n"
    (tmp_path / "out/remote.log").write_text("of another run\n")
    with pytest.raises(LabError, match=r"cannot be kept in .*not empty"):
        bring_back(workspace, begun, print, lambda chunk: None)


def test_what_is_lost_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    tries = threading.Semaphore(100)

    def lost() -> None:
        tries.acquire()
        raise ConnectionLostError("gone")

    with pytest.raises(ConnectionLostError):
        persistently(lost, said.append, patience_s=2)
    assert said == ["gone; trying again for up to 2 s"]


@pytest.mark.parametrize("begun", [True, False])
def test_of_a_run_that_is_left_only_what_was_started_is_said(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another run waits too, which neither hint may mean."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    record.save(JobRecord("other", "there", str(tmp_path / "other"), (), "2026-09-26T10:00:00+00:00"))

    monkeypatch.setattr(record, "new_job", lambda: "mine")

    def lost(*_: object) -> NoReturn:
        raise ConnectionLostError("it is gone")

    monkeypatch.setattr(run, "RETRY_S", 0.0)
    monkeypatch.setattr(jobs, "send", (lambda workspace, tree: False) if begun else lost)
    monkeypatch.setattr(jobs, "start", lost)
    said: list[str] = []
    lease = AtHand(workspace_of(Remote("there", parse("ssh://there"))), said.append)
    with pytest.raises(ConnectionLostError) as error:
        lease.begin(RunRequest(device="cpu", arguments=(), output=tmp_path / "mine"), lost)
    lease.failed(error.value)
    assert any(line.endswith("cudadent42 remote attach mine") for line in said) is begun
    assert "other" not in "".join(said)
