"""Runs on machines that SkyPilot finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from sky_lab import BOOTSTRAP, PYTHON, SPEC, Sky, only_start, says

from cudadent42.base.errors import LabError, MachineNotReadyError, UsageError
from cudadent42.remote.core import hosts, record, run
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import State, Workspace
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Returned, RunLostError
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.flows import pipeline
from cudadent42.remote.providers.sky import provider as sky
from cudadent42.remote.providers.sky.cluster import Cluster, ClusterError
from cudadent42.remote.providers.sky.reach import workspace_of
from cudadent42.remote.providers.sky.spec import Spec
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome


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

    def at_the_second_time(workspace: Workspace, job: str) -> State:
        asked.append(job)
        if len(asked) == 1:
            raise ConnectionLostError("the network is away")
        return state(workspace, job)

    monkeypatch.setattr(jobs, "state", at_the_second_time)
    assert cloud.run().exit_code == 0
    assert (cloud.output / "remote.log").read_text() == "measuring\n"


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine answers, and nobody waits for that."""

    def lost(workspace: Workspace, job: str) -> State:
        raise ConnectionLostError("the network is away")

    monkeypatch.setattr(jobs, "state", lost)
    monkeypatch.setattr(run, "RETRY_S", 0.0)


@pytest.mark.parametrize(
    "happens",
    [
        ("log-lost",),
        ("log-lost", "status-fails"),
        ("log-lost", "silent"),
        ("killed-after", "silent", "status-fails"),
    ],
)
@pytest.mark.usefixtures("unreachable")
def test_what_may_have_run_is_left_to_the_idle_limit(cloud: Sky, happens: tuple[str, ...]) -> None:
    """It said so; or SkyPilot had set its limit; or nobody can tell."""
    starts_at = sky.kept_start(SPEC)
    cloud.will(*happens)
    with pytest.raises(ConnectionLostError, match="the network is away"):
        cloud.launched(starts_at)
    assert [call[0] for call in cloud.calls()] == ["launch"]
    assert only_start().ended is None
    assert (only_start().outcome is StartOutcome.READY) is ("silent" not in happens)
    assert not record.find(None).fetched
    assert "takes itself down, with that, when it was idle for 7 minutes" in cloud.said[-1]
    assert f"cudadent42 remote attach {record.find(None).job}" in cloud.said[-1]


@pytest.mark.parametrize("happens", [("files-fail",), ("files-fail", "status-fails")])
@pytest.mark.usefixtures("unreachable")
def test_what_was_given_no_task_is_taken_down(cloud: Sky, happens: tuple[str, ...]) -> None:
    """SkyPilot has not set its limit, so that nothing else would end it."""
    (cloud.folder / "clusters").write_text("{}")
    assert sky.kept_start(SPEC) is None
    cloud.will(*happens)
    with pytest.raises(MachineNotReadyError, match="Failed to sync files"):
        cloud.launched(None, arguments=())
    assert [call[0] for call in cloud.calls()] == ["launch", "down"]
    seen = "status-fails" not in happens  # an end that nobody saw is none
    assert only_start().outcome is (StartOutcome.FAILED if seen else StartOutcome.REQUESTED)


@pytest.mark.parametrize("arrived", [True, False])
def test_a_machine_that_was_taken_away_is_told_of(cloud: Sky, arrived: bool) -> None:
    cloud.will("gone-after", "log-lost", *([] if arrived else ["silent"]))
    kind, words = (
        (RunLostError, "nothing of .* is left") if arrived else (MachineNotReadyError, "did not run")
    )
    with pytest.raises(kind, match=words):
        cloud.run()
    assert only_start().ended is not None
    assert (only_start().outcome is StartOutcome.DELETED) is arrived
    with pytest.raises(UsageError, match="no run elsewhere waits"):
        record.find(None)


def test_it_is_ready_when_it_begins_and_not_when_it_is_over(cloud: Sky, project: Path) -> None:
    """What a start takes is estimated from that."""
    wait = f"""tries=0
until grep -q '"ready"' '{starts.journal()}'; do
    tries=$((tries + 1)); [ $tries -lt 300 ] || exit 9
    sleep 0.1
done
"""
    (project / "python").write_text(PYTHON.replace('echo "measuring"', wait + 'echo "measuring"'))
    assert cloud.run().exit_code == 0


def test_a_run_that_cannot_be_kept_here_keeps_its_machine(cloud: Sky) -> None:
    cloud.output.mkdir(parents=True)
    (cloud.output / "somebody's").write_text("")
    with pytest.raises(LabError, match="cannot be kept"):
        cloud.run()
    assert [call[0] for call in cloud.calls()] == ["launch"]
    assert "is not taken down" in cloud.said[-1]
    (cloud.output / "somebody's").unlink()
    assert cloud.attach().returned.exit_code == 0
    assert "is taken down when it was idle" in cloud.said[-1]


def test_a_run_whose_machine_is_gone_or_stopped_is_attached_to(cloud: Sky) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "bring_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cloud.run()
    begun = record.find(None)
    Cluster(SPEC.cluster).stop()
    with pytest.raises(
        RunLostError, match=f"sky start c42-l4 .*, which brings back what {begun.job} measured"
    ):
        cloud.attach()
    assert only_start().outcome is StartOutcome.STOPPED
    with pytest.raises(UsageError, match=f"has what {begun.job} measured, .* sky start c42-l4"):
        sky.kept_start(SPEC)
    Cluster(SPEC.cluster).end()
    with pytest.raises(RunLostError, match="SkyPilot has no c42-l4 any more: nothing of"):
        cloud.attach()
    assert only_start().outcome is StartOutcome.DELETED
    assert record.find(begun.job).fetched


def test_a_kept_machine_outlives_a_launch_that_fails(cloud: Sky) -> None:
    kept = replace(SPEC, keep=True)
    cloud.run(kept)
    (cloud.folder / "says").write_text(
        "sky.exceptions.ResourcesMismatchError: Requested resources do not match"
    )
    with pytest.raises(MachineNotReadyError, match="is left to its idle limit; sooner: sky down c42-l4"):
        cloud.run(kept)
    assert [call[0] for call in cloud.calls()] == ["launch", "launch"]
    assert only_start().outcome is StartOutcome.READY


# ---- which machine it is


def test_a_machine_that_is_somebodys_is_not_used(cloud: Sky) -> None:
    """It would be taken down after the run."""
    says(cloud, "UP")
    with pytest.raises(UsageError, match="was not started from here; give this one another `cluster`"):
        cloud.run()
    assert not (cloud.folder / "calls").exists()
    assert starts.load() == ()


@pytest.mark.parametrize(
    ("word", "outcome"),
    [("UP", StartOutcome.READY), ("STOPPED", StartOutcome.STOPPED), (None, StartOutcome.DELETED)],
)
@pytest.mark.parametrize("believed", [StartOutcome.READY, StartOutcome.STOPPED])
def test_a_kept_machine_is_looked_at_before(
    cloud: Sky, word: str | None, outcome: StartOutcome, believed: StartOutcome
) -> None:
    """Its idle limit may have ended it, or somebody started it again, which the journal does not know."""
    begun = starts.request("sky://c42-l4", "gcp-l4")
    starts.mark(begun, believed)
    says(cloud, word)
    assert sky.kept_start(SPEC) == (begun if word == "UP" else None)
    assert only_start().outcome is outcome


def test_what_is_not_back_keeps_another_run_from_ending_its_machine(cloud: Sky) -> None:
    starts.mark(starts.request("sky://c42-l4", "gcp-l4"), StartOutcome.READY)
    says(cloud, "UP")
    now = datetime.now(timezone.utc).isoformat()
    record.save(JobRecord("job-1", "c42-l4", "/nowhere", (), now))
    with pytest.raises(
        UsageError, match=r"has what job-1 measured, .* remote attach job-1; .* sky down c42-l4"
    ):
        sky.kept_start(SPEC)
    assert sky.kept_start(replace(SPEC, keep=True)) == only_start().id


def test_nothing_is_started_where_skypilot_does_not_say(cloud: Sky) -> None:
    cloud.will("status-fails")
    with pytest.raises(ClusterError, match="the API server does not answer"):
        cloud.run()
    assert starts.load() == ()


def interrupted(*arguments: object) -> Returned:
    raise KeyboardInterrupt


def test_what_is_not_brought_back_can_be_attached_to(cloud: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Returned] = pipeline.bring_back
    monkeypatch.setattr(pipeline, "bring_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cloud.run()
    assert [call[0] for call in cloud.calls()] == ["launch"]  # what was measured is still there
    workspace = workspace_of(hosts.get(SPEC.cluster))
    returned = real(workspace, record.find(None), cloud.said.append, lambda chunk: None)
    assert returned.output == "the result\n"


def test_interrupted_while_it_comes_up_it_is_said_what_may_go_on(cloud: Sky) -> None:
    def interrupted(line: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cloud.launched(None, arguments=(), show=interrupted)
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
    with pytest.raises(MachineNotReadyError, match=r"\.\[skypilot\]"):
        cloud.run()
    assert not (cloud.folder / "calls").exists()
    assert starts.load() == ()
