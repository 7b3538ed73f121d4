"""Runs on cloud machines, from the first check to the machine's end, with everything that can go wrong in between."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from cloud_lab import ARGUMENTS, Lab, interrupt
from standin import BENCH, message

from cudadent42.base.errors import LabError, UsageError
from cudadent42.cost import rates
from cudadent42.remote.core import hosts, record, run
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.job import BusyError
from cudadent42.remote.core.protection import ANY_TERMS
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.flows.stopping import stop_all, stop_run
from cudadent42.remote.flows.survey import survey
from cudadent42.remote.providers.gce import creation, gcloud, lease, reach, starting
from cudadent42.remote.providers.gce.checks import prepare
from cudadent42.remote.providers.gce.failures import CloudError, Failure
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

# ---- policies


def test_a_stopped_instance_is_started_used_and_stopped(lab: Lab) -> None:
    lab.cloud.add()
    ended = lab.run(lab.remote(results="gs://my-results/lab"))
    assert ended.trouble is None
    assert ended.returned.exit_code == 0
    assert (lab.output / "arguments").read_text() == "\n".join(ARGUMENTS) + "\n"
    assert lab.log.decode() == "line 1\nline 2\nline 3\n"
    assert lab.cloud.status() == "TERMINATED"
    assert lab.outcomes == [StartOutcome.STOPPED]
    assert lab.cloud.on_record("compute", "instances", "start") == [1]  # on record before it was asked for
    [start] = starts.load()
    assert (start.machine, start.rate) == (BENCH, "gcp-l4")
    assert start.ready is not None
    job = ended.returned.record.job
    assert (lab.cloud.folder / "buckets/my-results/lab" / job / "samples.csv").read_text() == "1\n2\n3\n"
    assert not [*lab.folder.rglob("bad")]
    assert [path.name for path in lab.output.parent.iterdir()] == ["out"]


def test_a_run_that_fails_stops_its_machine_too(lab: Lab) -> None:
    lab.cloud.add()
    assert lab.run(lab.remote(CODE="3")).returned.exit_code == 3
    assert lab.cloud.status() == "TERMINATED"
    assert lab.outcomes == [StartOutcome.STOPPED]


def test_one_that_is_kept_is_used_again_and_stopped_by_the_next(lab: Lab) -> None:
    lab.cloud.add()
    lab.run(lab.remote("keep"))
    assert lab.cloud.status() == "RUNNING"
    assert lab.is_open()
    assert (
        f"{BENCH} goes on running at $0.71 an hour; end it with: gcloud compute instances stop bench"
        in lab.text
    )
    lab.output.rename(lab.output.parent / "first")
    lab.run(lab.remote("stop"))
    assert len(lab.cloud.calls("compute", "instances", "start")) == 1
    assert lab.outcomes == [StartOutcome.STOPPED]


def test_one_that_is_kept_for_a_time_shuts_itself_down(lab: Lab) -> None:
    lab.cloud.add()
    lab.run(lab.remote("keep:30"))
    assert lab.cloud.sudo == ["-n shutdown -h +30"]
    assert "shuts itself down in 30 min" in lab.text
    assert lab.cloud.status() == "RUNNING"
    lab.output.rename(lab.output.parent / "first")
    lab.run(lab.remote("keep:5"))
    assert lab.cloud.sudo == ["-n shutdown -h +30", "-n shutdown -c", "-n shutdown -h +5"]
    assert lab.is_open()


def test_one_that_cannot_shut_itself_down_is_stopped_at_once(lab: Lab) -> None:
    lab.cloud.add()
    (lab.cloud.folder / "sudo.refuses").touch()
    assert lab.run(lab.remote("keep:30")).trouble is None
    assert "cannot be told to shut itself down" in lab.text
    assert lab.cloud.status() == "TERMINATED"
    assert lab.outcomes == [StartOutcome.STOPPED]


def test_one_that_ran_before_is_left_running(lab: Lab) -> None:
    lab.cloud.add(status="RUNNING")
    lab.run(lab.remote("stop"))
    assert lab.cloud.status() == "RUNNING"
    assert (
        "was running before this run, so it is left running; end it with: gcloud compute instances stop bench"
    ) in lab.text
    assert lab.outcomes == []


def test_one_that_somebody_started_meanwhile_is_left_running(lab: Lab) -> None:
    """Between the look at it and its start are the compiler and a question."""
    lab.cloud.add()
    prepared = prepare(lab.remote(), "cpu")
    lab.cloud.add(status="RUNNING")
    lab.run_on(prepared, terms=ANY_TERMS)
    assert lab.cloud.status() == "RUNNING"
    assert "was running before this run, so it is left running" in lab.text
    assert lab.outcomes == []


def test_a_second_run_that_is_refused_cancels_no_shutdown(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.cloud.add()
    lab.run(lab.remote("keep:30"))
    prepared = prepare(lab.remote("keep:30"), "cpu")

    def refuse(kept: lease.Lease) -> None:
        raise LabError("no limit holds there")

    with pytest.raises(LabError, match="no limit"):
        starting.begin(prepared, lab.said.append, refuse)
    assert lab.cloud.sudo == ["-n shutdown -h +30"]


def test_a_journal_that_cannot_be_written_any_more_loses_no_machine(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk here is full as soon as the machine was asked for."""
    lab.cloud.add()
    mark = starts.mark

    def refuse(identity: str, outcome: StartOutcome, *rest: Any, **more: Any) -> None:
        if outcome is StartOutcome.READY:
            raise UsageError("cannot put it on record")
        mark(identity, outcome, *rest, **more)

    monkeypatch.setattr(starts, "mark", refuse)
    assert lab.run(lab.remote()).returned.exit_code == 0
    assert "cannot put it on record" in lab.text
    assert lab.cloud.status() == "TERMINATED"


def test_a_start_whose_machine_is_found_stopped_is_closed(lab: Lab) -> None:
    lab.cloud.add()
    starts.request(BENCH, "gcp-l4")  # of yesterday; somebody stopped it by hand
    lab.run(lab.remote())
    assert lab.outcomes == [StartOutcome.STOPPED, StartOutcome.STOPPED]
    assert starts.load()[0].reason == "found stopped"


# ---- fresh instances


def test_a_fresh_one_is_made_used_and_deleted(lab: Lab) -> None:
    ended = lab.run(lab.fresh(results="gs://my-results"))
    assert ended.returned.exit_code == 0
    assert lab.cloud.names() == []
    [words] = lab.cloud.calls("compute", "instances", "create")
    assert "--max-run-duration=60m" in words
    assert "--instance-termination-action=DELETE" in words
    assert lab.cloud.on_record("compute", "instances", "create") == [1]
    assert lab.outcomes == [StartOutcome.STOPPED]
    assert (lab.cloud.folder / "buckets/my-results" / ended.returned.record.job / "arguments").exists()


def test_the_next_zone_is_tried_where_one_has_no_capacity(lab: Lab) -> None:
    lab.cloud.fails("compute instances create", "no-capacity-create", zone="us-central1-a")
    lab.run(lab.fresh())
    zones = [words[5] for words in lab.cloud.calls("compute", "instances", "create")]
    assert zones == ["--zone=us-central1-a", "--zone=us-west1-b"]
    assert lab.outcomes == [StartOutcome.FAILED, StartOutcome.STOPPED]
    assert "the zone has no capacity: gce://my-project/us-central1-a/" in lab.text
    assert (
        "ZONE_RESOURCE_POOL_EXHAUSTED" in starts.load()[0].reason or "no capacity" in starts.load()[0].reason
    )


def test_a_quota_of_a_region_rules_out_its_other_zones(lab: Lab) -> None:
    lab.cloud.fails("compute instances create", "quota-region", times=9)
    with pytest.raises(CloudError) as caught:
        lab.run(lab.fresh(zones=["us-central1-a", "us-central1-b", "us-west1-b"]))
    assert caught.value.failure is Failure.QUOTA_REGION
    zones = [words[5] for words in lab.cloud.calls("compute", "instances", "create")]
    assert zones == ["--zone=us-central1-a", "--zone=us-west1-b"]


@pytest.mark.parametrize(
    "name", ["quota-global", "no-network", "external-ip", "permission-account", "billing-disabled", "unknown"]
)
def test_what_no_other_zone_would_help(lab: Lab, name: str) -> None:
    lab.cloud.fails("compute instances create", name)
    with pytest.raises(CloudError) as caught:
        lab.run(lab.fresh())
    assert message(name) in str(caught.value)
    assert len(lab.cloud.calls("compute", "instances", "create")) == 1
    assert lab.outcomes == [StartOutcome.FAILED]
    assert lab.cloud.names() == []


def test_one_that_came_to_be_although_the_call_failed_is_deleted(lab: Lab) -> None:
    lab.cloud.fails("compute instances create", "unknown", after=True)
    with pytest.raises(CloudError, match="4A1B2C3D"):
        lab.run(lab.fresh())
    assert lab.cloud.names() == []
    assert lab.outcomes == [StartOutcome.FAILED]


def test_a_kept_one_is_used_again_while_its_specification_is_the_same(lab: Lab) -> None:
    lab.run(lab.fresh("keep"))
    [kept] = lab.cloud.names()
    assert "gcloud compute instances delete" in lab.text
    lab.output.rename(lab.output.parent / "first")
    lab.run(lab.fresh("keep"))
    assert lab.cloud.names() == [kept]
    lab.output.rename(lab.output.parent / "second")
    lab.run(lab.fresh("stop", disk_gb=200))
    assert lab.cloud.names() == [kept]  # the new one is deleted, the kept one named
    assert f"gce://{kept} was made from another specification and is running" in lab.text


def test_a_kept_one_that_was_made_from_another_laptop_is_not_used(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records of runs were copied here; who made it may need it."""
    lab.run(lab.fresh("keep"))
    [kept] = lab.cloud.names()
    lab.output.rename(lab.output.parent / "first")
    elsewhere = lab.folder / "another laptop"
    shutil.copytree(record.jobs_folder(), elsewhere / "cudadent42/remote")
    monkeypatch.setenv("XDG_STATE_HOME", str(elsewhere))
    lab.run(lab.fresh("stop"))
    assert f"gce://{kept} is on no record of starts here, so it is not used again" in lab.said
    assert lab.cloud.names() == [kept]  # the new one is deleted


def test_one_with_a_run_that_was_not_brought_back_is_left_alone(lab: Lab) -> None:
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.fresh(pause="0.5"), interrupt)
    [first] = lab.cloud.names()
    waiting = record.records()[0]
    assert waiting.cloud is not None
    # Here, all instances are the same machine, which runs one at a time.
    jobs.stop(starting.workspace_of(waiting.cloud, hosts.get(waiting.remote)), waiting.job)
    lab.run(lab.fresh())
    assert lab.cloud.names() == [first]
    assert f"gce://{first} is kept for {waiting.job}, which is not brought back yet" in lab.said


@pytest.mark.parametrize("error", [gcloud.CutOffError(), CloudError(Failure.TIMED_OUT, "")])
def test_what_may_still_come_to_be_stays_on_record(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Not there at the look after a call that was cut off; the provider goes on with it."""

    def cut_off(*_: object) -> None:
        raise error

    monkeypatch.setattr(creation, "create", cut_off)
    with pytest.raises(type(error)):
        lab.run(lab.fresh())
    assert lab.outcomes == [StartOutcome.REQUESTED]
    [start] = starts.load()
    assert f"{start.machine} is gone, but the request for it was cut off" in lab.text
    lab.cloud.add(start.machine, status="RUNNING", labels={"cudadent42": "fresh"})
    [started] = survey(rates.load(), datetime.now(timezone.utc)).started
    assert started.word == "running"


def test_a_driver_is_waited_for_and_missed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "DRIVER_S", 0.0)
    monkeypatch.setattr(jobs, "architectures", lambda workspace: ())
    with pytest.raises(LabError, match="no NVIDIA driver answers"):
        lab.run(lab.fresh(machine_type="g2-standard-8"), device="cuda")
    assert lab.cloud.names() == []
    assert lab.outcomes == [StartOutcome.FAILED]


# ---- what goes wrong on the way


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("no-capacity-start", Failure.NO_CAPACITY),
        ("permission", Failure.PERMISSION),
        ("unknown", Failure.UNKNOWN),
    ],
)
def test_an_instance_that_does_not_start(lab: Lab, name: str, failure: Failure) -> None:
    lab.cloud.add()
    lab.cloud.fails("compute instances start", name)
    with pytest.raises(CloudError) as caught:
        lab.run(lab.remote())
    assert caught.value.failure is failure
    assert lab.outcomes == [StartOutcome.FAILED]
    assert not record.records()


def test_an_instance_that_never_answers_is_stopped(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.cloud.add()
    lab.cloud.refuses(99)
    monkeypatch.setattr(reach.wait, "__defaults__", (0.0,))
    with pytest.raises(CloudError, match="Connection refused"):
        lab.run(lab.remote("keep"))
    assert lab.cloud.status() == "TERMINATED"
    assert lab.outcomes == [StartOutcome.FAILED]


def test_one_that_is_found_off_while_it_boots_is_over(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not answer was its sshd: the request for it has been carried out."""
    lab.cloud.add()

    def timed_out(*_: object) -> None:
        Machine(BENCH, "gcp-l4").stop()
        raise CloudError(Failure.TIMED_OUT, "")

    monkeypatch.setattr(reach, "wait", timed_out)
    with pytest.raises(CloudError):
        lab.run(lab.remote())
    assert lab.outcomes == [StartOutcome.FAILED]


def test_an_interrupt_while_it_boots_stops_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.cloud.add()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reach, "_try", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote())
    assert lab.cloud.status() == "TERMINATED"
    assert lab.outcomes == [StartOutcome.FAILED]
    assert f"{BENCH} is stopped" in lab.said


def test_an_interrupt_while_it_is_put_on_record_stops_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.cloud.add()

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(starting, "provider_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote())
    assert lab.cloud.status() == "TERMINATED"
    assert lab.outcomes == [StartOutcome.FAILED]


def test_what_the_provider_does_not_say_keeps_no_run_from_beginning(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.cloud.add()

    def refuse(*_: object) -> str:
        raise CloudError(Failure.PERMISSION, "")

    monkeypatch.setattr(starting, "provider_start", refuse)
    assert lab.run(lab.remote()).returned.exit_code == 0
    assert lab.outcomes == [StartOutcome.STOPPED]


def test_an_interrupted_run_goes_on_and_attach_brings_it_back_and_stops_the_machine(lab: Lab) -> None:
    lab.cloud.add()
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote(PAUSE="0.3"), interrupt)
    [job] = record.records()
    assert lab.cloud.status() == "RUNNING"
    assert lab.is_open()
    assert f"cudadent42 remote attach {job.job}" in lab.text
    assert (
        f"{BENCH} goes on running at $0.71 an hour; end it with: gcloud compute instances stop bench"
        in lab.text
    )
    ended = lab.attach()
    assert ended.returned.exit_code == 0
    assert (lab.output / "samples.csv").read_text() == "1\n2\n3\n"
    assert lab.cloud.status() == "TERMINATED"
    assert lab.outcomes == [StartOutcome.STOPPED]


@pytest.mark.parametrize("all_at_once", [False, True])
def test_a_run_is_found_where_it_was_started_after_its_remote_was_given_another_folder(
    lab: Lab, all_at_once: bool
) -> None:
    """Looked for in the other one it would be missed, and its machine deleted with what it measured."""
    remote = lab.fresh(pause="0.3")
    with pytest.raises(KeyboardInterrupt):
        lab.run(remote, interrupt)
    hosts.save(replace(remote, folder="another folder"))
    if all_at_once:
        stop_all(survey(rates.load(), datetime.now(timezone.utc)).started, lab.said.append)
    else:
        lab.attach()
    assert (lab.output / "samples.csv").read_text().startswith("1\n")
    assert lab.cloud.names() == []


def test_a_lost_connection_leaves_the_run_its_machine(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.cloud.add()
    monkeypatch.setattr(run, "RETRY_S", 0.0)
    monkeypatch.setattr(run, "_LONGEST_PAUSE_S", 60.0)

    def cut(chunk: bytes) -> None:
        lab.cloud.server.cut()

    with pytest.raises(ConnectionLostError):
        lab.run(lab.remote(PAUSE="0.5"), cut)
    assert lab.cloud.status() == "RUNNING"
    assert "cudadent42 remote attach" in lab.text
    assert lab.attach().returned.exit_code == 0
    assert lab.cloud.status() == "TERMINATED"


def test_a_second_run_does_not_stop_the_machine_under_the_first(lab: Lab) -> None:
    lab.cloud.add()
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote("stop", PAUSE="1000"), interrupt)
    [first] = record.records()
    # Its limits are the first one's, so it is refused before anything is sent.
    with pytest.raises(BusyError, match=first.job):
        lab.run(lab.remote("stop"))
    assert lab.cloud.status() == "RUNNING"
    assert f"{BENCH} goes on running" in lab.text
    stop_run(first)
    assert lab.attach().returned.exit_code != 0
    assert lab.cloud.status() == "TERMINATED"


@pytest.mark.parametrize("after", ["stop", "keep:30"])
def test_a_stop_that_fails_is_said_loudly_and_stays_open(lab: Lab, after: str) -> None:
    lab.cloud.add()
    lab.cloud.fails("compute instances stop", "permission")
    (lab.cloud.folder / "sudo.refuses").touch()
    ended = lab.run(lab.remote(after))
    assert ended.returned.exit_code == 0
    assert (lab.output / "samples.csv").exists()
    assert ended.trouble is not None
    assert f"NOT STOPPED: {BENCH} goes on running at $0.71 an hour" in str(ended.trouble)
    assert str(ended.trouble) in lab.said
    assert lab.cloud.status() == "RUNNING"
    assert lab.outcomes == [StartOutcome.READY]
    assert lab.is_open()


def test_a_stop_that_happened_although_the_call_for_it_failed(lab: Lab) -> None:
    lab.cloud.add()
    lab.cloud.fails("compute instances stop", "unknown", after=True)
    assert lab.run(lab.remote()).trouble is None
    assert lab.outcomes == [StartOutcome.STOPPED]


def test_an_interrupt_of_the_stop_waits_for_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.cloud.add()
    stop = Machine.stop

    def interrupted(instance: Machine) -> None:
        stop(instance)
        raise KeyboardInterrupt

    monkeypatch.setattr(Machine, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote())
    assert f"{BENCH} is stopped" in lab.said
    assert lab.outcomes == [StartOutcome.STOPPED]


def test_a_deletion_that_fails_is_said_loudly(lab: Lab) -> None:
    lab.cloud.fails("compute instances delete", "unknown")
    ended = lab.run(lab.fresh())
    assert "NOT DELETED" in str(ended.trouble)
    assert lab.is_open()


def test_a_start_that_fails_and_cannot_be_taken_back(lab: Lab) -> None:
    lab.cloud.add()
    lab.cloud.fails("compute instances start", "unknown", after=True)
    lab.cloud.fails("compute instances stop", "permission")
    with pytest.raises(CloudError, match="4A1B2C3D"):
        lab.run(lab.remote())
    assert "NOT STOPPED" in lab.text
    assert lab.is_open()


def test_a_failing_copy_to_the_bucket_fails_nothing_else(lab: Lab) -> None:
    lab.cloud.add()
    lab.cloud.fails(
        "storage rsync", "ERROR: (gcloud.storage.rsync) HTTPError 403: no storage.objects.create access."
    )
    ended = lab.run(lab.remote(results="gs://my-results"))
    assert ended.returned.exit_code == 0
    assert "HTTPError 403" in lab.text
    assert "it is not in gs://my-results" in lab.text
    assert lab.cloud.status() == "TERMINATED"
