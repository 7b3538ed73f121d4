"""A start that nothing but this machine ends until it answers: it is agreed on, and every way out of it ends it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cloud_lab import Lab, interrupt
from command_line import ROOT, cudadent42, started, with_usual_signals
from standin import BENCH, Cloud

from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.commands import machines
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.hosts import Remote, config_file, get, make, save
from cudadent42.remote.core.protection import ANY_TERMS
from cudadent42.remote.providers.gce.checks import prepare
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.remote.providers.gce.provider import Candidate
from cudadent42.remote.providers.gce.unguarded import agree_to_start
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

SMALL = ("--suite", "small", "--case", "tiny", "--dtype", "fp32", "--device", "cpu", "--output-dir", "here")
LIMIT = {"maxRunDuration": {"seconds": "28800"}, "instanceTerminationAction": "STOP"}


def bench(cloud: Cloud, agreed: bool = False) -> Remote:
    made = make("bench", parse(BENCH), python=cloud.python(), rate="gcp-l4", unguarded_start=agreed)
    save(made)
    return made


def in_hours(hours: float) -> dict[str, str]:
    """As the provider writes it."""
    there = timezone(timedelta(hours=-8))
    return {
        "terminationTime": (datetime.now(there) + timedelta(hours=hours)).isoformat(timespec="milliseconds")
    }


def answering(answer: bool, heard: list[str]) -> Consent:
    def ask(question: str, within_s: float | None) -> bool:
        heard.append(question)
        return answer

    return Consent(ask=ask)


def test_it_is_refused_where_nobody_can_be_asked(cloud: Cloud, tmp_path: Path) -> None:
    cloud.add()
    bench(cloud)
    done = cudadent42("run", "--on", "bench", *SMALL, cwd=tmp_path)
    assert done.returncode == 2
    assert "up to 7 min, only this machine can end it; nothing was started" in done.stderr
    assert "remote add --spec" in done.stderr
    assert (
        "gcloud compute instances set-scheduling bench --zone=us-central1-a --project=my-project "
        "--max-run-duration=8h --instance-termination-action=STOP" in done.stderr
    )
    assert starts.load() == ()
    assert not cloud.calls("compute", "instances", "start")


@pytest.mark.slow
def test_yes_holds_for_one_run(cloud: Cloud, tmp_path: Path) -> None:
    cloud.add()
    bench(cloud)
    done = cudadent42("run", "--on", "bench", *SMALL, "--yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert cloud.status() == "TERMINATED"
    assert not get("bench").unguarded_start


@pytest.mark.parametrize("scheduling", [LIMIT, in_hours(3)])
def test_a_limit_with_the_provider_needs_no_agreement(cloud: Cloud, scheduling: dict[str, object]) -> None:
    cloud.add(scheduling=scheduling)
    remote = bench(cloud)
    assert prepare(remote, "cpu").guarded
    Candidate(prepare(remote, "cpu")).agree(ANY_TERMS, print)


@pytest.mark.parametrize(
    "scheduling", [{}, in_hours(-3), {"terminationTime": "soon"}, {"preemptible": False}]
)
def test_without_one_somebody_has_to_agree(cloud: Cloud, scheduling: dict[str, object]) -> None:
    cloud.add(scheduling=scheduling)
    remote = bench(cloud)
    with pytest.raises(UsageError, match="no limit of its own with the provider"):
        Candidate(prepare(remote, "cpu")).agree(ANY_TERMS, print)


def test_one_that_runs_is_not_started(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    remote = bench(cloud)
    Candidate(prepare(remote, "cpu")).agree(ANY_TERMS, print)


def test_one_that_ran_and_was_stopped_meanwhile_is_not_started_unasked(lab: Lab) -> None:
    lab.cloud.add(status="RUNNING")
    prepared = prepare(lab.remote(), "cpu")
    lab.cloud.add()
    with pytest.raises(MachineNotReadyError, match="is stopped by now; try again"):
        lab.run_on(prepared, terms=ANY_TERMS)
    assert starts.load() == ()


def test_it_is_asked_once(cloud: Cloud) -> None:
    instance = Machine(BENCH, "gcp-l4")
    heard: list[str] = []
    with pytest.raises(UsageError):
        agree_to_start(bench(cloud), instance, answering(False, heard))
    assert not get("bench").unguarded_start
    agree_to_start(get("bench"), instance, answering(True, heard))
    assert get("bench").unguarded_start
    agree_to_start(get("bench"), instance, answering(False, heard))
    assert len(heard) == 2
    assert "Start it, now and in future?" in heard[0]


def test_it_is_kept_in_the_file_of_remotes(cloud: Cloud, tmp_path: Path) -> None:
    words = ("remote", "add", "bench", BENCH, "--rate", "gcp-l4", "--unguarded-start")
    assert cudadent42(*words, cwd=tmp_path).returncode == 0
    assert "unguarded_start = true\n" in config_file().read_text()
    assert get("bench").unguarded_start
    for wrong in ('"yes"', "1", "[]"):
        config_file().write_text(
            f'[bench]\naddress = "{BENCH}"\nrate = "gcp-l4"\nunguarded_start = {wrong}\n'
        )
        with pytest.raises(UsageError, match="true or false for unguarded_start"):
            get("bench")
    config_file().write_text('[gpu]\naddress = "ssh://host"\nunguarded_start = true\n')
    with pytest.raises(UsageError, match="only for a gce:// machine"):
        get("gpu")


def test_an_answer_is_not_kept_for_another_machine_of_that_name(cloud: Cloud) -> None:
    before = bench(cloud)
    save(make("bench", parse("gce://my-project/us-central1-a/another"), rate="gcp-l4"))
    agree_to_start(before, Machine(BENCH, "gcp-l4"), answering(True, []))
    assert not get("bench").unguarded_start


@pytest.mark.parametrize(("typed", "agreed"), [("", False), ("y\n", True), ("Yes\n", True), ("no\n", False)])
def test_who_does_not_answer_in_time_has_not_agreed(
    monkeypatch: pytest.MonkeyPatch, typed: str, agreed: bool
) -> None:
    ours, theirs = os.pipe()
    with open(ours) as stdin, open(theirs, "w") as keyboard:
        keyboard.write(typed)
        keyboard.flush()
        monkeypatch.setattr(sys, "stdin", stdin)
        assert machines._answered("Run there?", 0.0) is agreed


def test_the_start_of_attach_is_agreed_on_too(lab: Lab) -> None:
    lab.cloud.add()
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote(PAUSE="0.1"), interrupt)
    key = BENCH.removeprefix("gce://")
    lab.cloud.change(instances={key: {**lab.cloud.state["instances"][key], "status": "TERMINATED"}})
    with pytest.raises(UsageError, match="no limit of its own with the provider"):
        lab.attach(start=True, terms=ANY_TERMS)
    assert lab.cloud.status() == "TERMINATED"
    assert lab.attach(start=True).returned.exit_code == 0


# ---- between the start and the first answer


def until_it_waits(cloud: Cloud, process: subprocess.Popen[str]) -> None:
    while not cloud.calls("compute", "ssh"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.fixture
def booting(cloud: Cloud) -> Cloud:
    """A machine that starts and does not answer."""
    cloud.add()
    cloud.refuses(10**6)
    bench(cloud, agreed=True)
    return cloud


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_machine(booting: Cloud, tmp_path: Path, number: signal.Signals) -> None:
    process = started("run", "--on", "bench", *SMALL, cwd=tmp_path)
    until_it_waits(booting, process)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert f"{BENCH} is stopped" in errors.splitlines()
    assert booting.status() == "TERMINATED"
    assert [start.outcome for start in starts.load()] == [StartOutcome.FAILED]


def on_a_terminal_of_its_own(terminal: int) -> Callable[[], None]:
    def begin() -> None:
        with_usual_signals()
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    return begin


def test_a_terminal_that_is_closed_ends_the_machine(booting: Cloud, tmp_path: Path) -> None:
    """It takes the place to print with it, and its shell sends the signal a second time."""
    # The stop takes its time, as a real one does; the second signal comes within it.
    booting.fails("compute instances stop", "", after=True, until="signalled again", exit=0)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cudadent42", "run", "--on", "bench", *SMALL],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDADENT42_LEDGER": "none"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        text=True,
        preexec_fn=on_a_terminal_of_its_own(theirs),
    )
    os.close(theirs)
    until_it_waits(booting, process)
    os.close(ours)
    while not booting.calls("compute", "instances", "stop"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    booting.goes_on("signalled again")
    assert process.wait() == 130
    assert booting.status() == "TERMINATED"
    assert [start.outcome for start in starts.load()] == [StartOutcome.FAILED]


def test_one_that_is_killed_leaves_it_on_record(booting: Cloud, tmp_path: Path) -> None:
    process = started("run", "--on", "bench", *SMALL, cwd=tmp_path)
    until_it_waits(booting, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert booting.status() == "RUNNING"
    shown = json.loads(cudadent42("remote", "status", "--json", cwd=tmp_path).stdout)["machines"]
    assert [(each["machine"], each["state"]) for each in shown] == [(BENCH, "running")]
    done = cudadent42("remote", "stop", "--all", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{BENCH}: stopped\n"), done.stderr
    assert booting.status() == "TERMINATED"
    assert [start.outcome for start in starts.load()] == [StartOutcome.STOPPED]
