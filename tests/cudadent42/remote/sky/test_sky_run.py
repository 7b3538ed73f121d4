"""Runs on machines that SkyPilot finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sky_lab import BOOTSTRAP, PYTHON, SPEC, Sky, only_start

from cudadent42.errors import MachineNotReadyError, UsageError
from cudadent42.ledger import starts
from cudadent42.ledger.starts import StartOutcome
from cudadent42.remote import hosts, record
from cudadent42.remote import job as jobs
from cudadent42.remote.address import parse
from cudadent42.remote.hosts import Remote
from cudadent42.remote.job import Place, State
from cudadent42.remote.run import Returned, place_of
from cudadent42.remote.sky import run as sky
from cudadent42.remote.sky.spec import Spec
from cudadent42.remote.ssh import ConnectionLostError


def test_a_run_from_launch_to_the_end_of_the_machine(cloud: Sky) -> None:
    hostile = ("--case=$(touch bad)", "--case=a b", "--case=';touch bad'", "--case=-x\n--case=y", "--suite=*")
    returned = cloud.run(arguments=hostile)
    assert (returned.exit_code, returned.output) == (0, "the result\n")
    assert (cloud.output / "arguments").read_text() == "\n".join(hostile) + "\n"
    assert (cloud.output / "rate").read_text() == "gcp-l4\n"  # its cost is known there too
    assert (cloud.output / "remote.log").read_text() == "measuring\n"
    launch, down = cloud.calls()
    assert launch[:-1] == [
        *("launch", "--cluster=c42-l4", "--yes"),
        *("--idle-minutes-to-autostop=7", "--wait-for=jobs", "--down"),
    ]
    assert down == ["down", "--yes", "c42-l4"]
    # On record before the machine was asked for, and ended after.
    (entry,) = (
        json.loads(line) for line in (cloud.folder / "journal-at-launch").read_text().splitlines() if line
    )
    assert (entry["machine"], entry["rate"], entry["outcome"]) == ("sky://c42-l4", "gcp-l4", "requested")
    assert only_start().outcome is StartOutcome.DELETED
    assert only_start().ready is not None
    assert "(task, pid=1) measuring\n" in cloud.said
    assert not [*cloud.server.folder.rglob("bad")]


def test_a_machine_that_is_kept_is_one_start(cloud: Sky, tmp_path: Path) -> None:
    kept = Spec("c42-l4", "gcp-l4", {}, keep=True)
    cloud.run(kept)
    assert only_start().outcome is StartOutcome.READY
    assert any("kept until it was idle for 10 minutes" in line for line in cloud.said)
    (tmp_path / "here/run").rename(tmp_path / "first")
    cloud.run(kept)
    assert only_start().outcome is StartOutcome.READY
    assert [call[0] for call in cloud.calls()] == ["launch", "launch"]


@pytest.mark.parametrize(
    ("says", "means"),
    [
        (
            "sky.exceptions.ResourcesUnavailableError: Failed to provision all possible launchable resources. "
            "Relax the task's resource requirements: 1x GCP({'L4': 1})",
            "no place had one free",
        ),
        (
            "sky.exceptions.ResourcesUnavailableError: No launchable resource found for task train-1234. "
            "Region: us-west-2.\nThis means the catalog does not contain any instance types that satisfy this request.",
            "no cloud offers such a machine",
        ),
        (
            "sky.exceptions.ResourcesUnavailableError: Catalog does not contain any instances satisfying the request:",
            "sky gpus list --all",
        ),
        (
            "sky.exceptions.ResourcesUnavailableError: Task sky-cmd requires Lambda which is not enabled. "
            "To enable access, run sky check , or change the cloud requirement",
            "look with: sky check",
        ),
        (
            "botocore.exceptions.ClientError: An error occurred (VcpuLimitExceeded) when calling the "
            "StartInstances operation",
            "quota for it is used up",
        ),
        ("something new", "sky launch ended with exit code 1: something new"),
    ],
)
def test_a_machine_that_does_not_come_up(cloud: Sky, says: str, means: str) -> None:
    (cloud.folder / "says").write_text(says)
    with pytest.raises(MachineNotReadyError, match=means):
        cloud.run()
    assert [call[0] for call in cloud.calls()] == ["launch", "down"]  # whatever came up half is taken down
    assert only_start().outcome is StartOutcome.FAILED
    assert means in only_start().reason
    with pytest.raises(UsageError, match="no run elsewhere waits"):
        record.find(None)


def test_a_machine_that_fails_preflight_runs_nothing(cloud: Sky, project: Path) -> None:
    failing = BOOTSTRAP.replace("echo 'Preflight OK'", "echo 'Preflight failed: driver'\nexit 4")
    (project / "tools/bootstrap.sh").write_text(failing)
    with pytest.raises(MachineNotReadyError, match="preflight failed there"):
        cloud.run()
    assert "(task, pid=1) Preflight failed: driver\n" in cloud.said
    assert not [*cloud.server.folder.rglob("arguments")]
    assert only_start().outcome is StartOutcome.FAILED


def test_a_machine_that_cannot_be_taken_down_is_told_of(cloud: Sky) -> None:
    (cloud.folder / "down-fails").write_text("")
    ended = cloud.ended()
    assert ended.returned.exit_code == 0
    assert ended.trouble is not None
    assert ended.trouble.exit_code == 4
    assert "SkyPilot could not take it down" in str(ended.trouble)
    assert "the cloud says no" in str(ended.trouble)
    assert "it may still cost money: sky status --refresh, sky down c42-l4" in str(ended.trouble)
    assert only_start().outcome is StartOutcome.READY  # the ledger counts on


def test_a_lost_run_is_brought_back_and_its_machine_taken_down(cloud: Sky, project: Path) -> None:
    (project / "python").write_text(PYTHON + 'kill -9 "$PPID" "$(ps -o ppid= -p "$PPID" | tr -d " ")"\n')
    with pytest.raises(Exception, match="was lost on c42-l4"):
        cloud.run()
    assert (cloud.output / "remote.log").read_text() == "measuring\n"
    assert only_start().outcome is StartOutcome.DELETED


def test_a_machine_that_ran_and_does_not_answer_at_once_is_not_taken_down(
    cloud: Sky, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it measured would be gone with it."""
    state, asked = jobs.state, []

    def at_the_second_time(place: Place, job: str) -> State:
        asked.append(job)
        if len(asked) == 1:
            raise ConnectionLostError("the network is away")
        return state(place, job)

    monkeypatch.setattr(jobs, "state", at_the_second_time)
    assert cloud.run().exit_code == 0
    assert (cloud.output / "remote.log").read_text() == "measuring\n"


def test_what_is_not_brought_back_can_be_attached_to(cloud: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Returned] = sky.bring_back

    def interrupted(*arguments: object) -> Returned:
        raise KeyboardInterrupt

    monkeypatch.setattr(sky, "bring_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cloud.run()
    assert [call[0] for call in cloud.calls()] == ["launch"]  # what was measured is still there
    place = place_of(hosts.get(SPEC.cluster))
    returned = real(place, record.find(None), cloud.said.append, lambda chunk: None)
    assert returned.output == "the result\n"


def test_interrupted_while_it_comes_up_it_is_said_what_may_go_on(cloud: Sky) -> None:
    def interrupted(line: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sky.run_on_sky(SPEC, "cpu", (), cloud.output, cloud.said.append, interrupted, None)
    assert "remote stop --all" in cloud.said[-1]
    assert only_start().outcome is StartOutcome.REQUESTED
    assert not record.find(None).fetched


def test_what_is_found_before_anything_is_asked_for(
    cloud: Sky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.save(Remote("c42-l4", parse("ssh://another.example.org")))
    with pytest.raises(UsageError, match="already the name of the remote"):
        cloud.run()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(MachineNotReadyError, match=r"cudadent42\[skypilot\]"):
        cloud.run()
    assert not (cloud.folder / "calls").exists()
    assert starts.load() == ()
