"""What a user, another terminal, a colleague or a full disk does at the worst moments of a run on a cloud machine."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from cloud_lab import Lab, interrupt
from command_line import cudadent42
from journal_lab import a_job, a_start
from standin import BENCH, Cloud

from cudadent42.base.errors import LabError, UsageError
from cudadent42.remote.core import hosts, record
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.hosts import Remote, make
from cudadent42.remote.core.protection import ANY_TERMS, Terms
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.providers.gce import starting
from cudadent42.remote.providers.gce.checks import prepare
from cudadent42.remote.providers.gce.lease import Lease
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

MACHINE = Machine(BENCH, "gcp-l4")


class Killed(BaseException):
    """This process is gone, as far as can be told from within one."""


def left_stopped(lab: Lab, after: str = "stop") -> JobRecord:
    """A run that was interrupted here, and whose machine was stopped under it."""
    lab.cloud.add()
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote(after, PAUSE="0.3"), interrupt)
    begun = record.find(None)
    assert begun.cloud is not None
    jobs.stop(starting.workspace_of(begun.cloud, record.remote_of(begun)), begun.job)
    MACHINE.stop()
    return begun


# ---- attach --start


def test_killed_once_it_was_started_again_attach_ends_it_all_the_same(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's record names the start before; the machine runs from another one of ours."""
    begun = left_stopped(lab)

    def killed(job: JobRecord) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(record, "save", killed)
        with pytest.raises(Killed):
            lab.attach(start=True)
    assert lab.cloud.status() == "RUNNING"
    lab.attach()
    assert record.find(begun.job).fetched
    assert "not ours any more" not in lab.text
    assert lab.cloud.status() == "TERMINATED"
    assert lab.outcomes == [StartOutcome.STOPPED, StartOutcome.STOPPED]


def test_a_full_disk_once_it_was_started_again_is_said_with_what_runs(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_stopped(lab, "keep")
    lab.said.clear()

    def full(job: JobRecord) -> None:
        raise UsageError("no room here")

    monkeypatch.setattr(record, "save", full)
    with pytest.raises(UsageError, match="no room"):
        lab.attach(start=True)
    assert f"{BENCH} goes on running at $0.71 an hour" in lab.text


def test_one_that_somebody_started_while_it_was_asked_about_is_theirs(lab: Lab) -> None:
    begun = left_stopped(lab)

    def somebody_is_faster(question: str, within_s: float | None) -> bool:
        lab.cloud.starts_again()
        return True

    terms = Terms(consent=Consent(ask=somebody_is_faster))
    lab.attach(start=True, terms=terms)
    assert record.find(begun.job).fetched
    assert "was running before this run, so it is left running" in lab.text
    assert lab.cloud.status() == "RUNNING"
    assert len(lab.cloud.calls("compute", "instances", "start")) == 1  # the run's own
    assert lab.outcomes == [StartOutcome.STOPPED]


# ---- the end


def test_an_interrupt_before_the_stop_says_what_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.cloud.add()

    def interrupted(workspace: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Lease, "_running", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote())
    assert f"{BENCH} goes on running at $0.71 an hour" in lab.text
    assert lab.is_open()


def test_a_journal_that_cannot_take_the_end_loses_neither_the_run_nor_its_output(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.cloud.add()
    mark = starts.mark

    def full(identity: str, outcome: StartOutcome, *rest: Any, **more: Any) -> None:
        if outcome is StartOutcome.STOPPED:
            raise UsageError("cannot put it on record")
        mark(identity, outcome, *rest, **more)

    monkeypatch.setattr(starts, "mark", full)
    ended = lab.run(lab.remote())
    assert (ended.returned.exit_code, ended.trouble) == (0, None)
    assert "cannot put it on record" in lab.text
    assert f"{BENCH} is stopped" in lab.said


def test_what_went_wrong_is_not_hidden_by_a_journal_that_cannot_be_written(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next zone is tried as without a full disk."""
    lab.cloud.fails("compute instances create", "no-capacity-create", zone="us-central1-a")
    mark = starts.mark

    def full(identity: str, outcome: StartOutcome, *rest: Any, **more: Any) -> None:
        if outcome is StartOutcome.FAILED:
            raise UsageError("cannot put it on record")
        mark(identity, outcome, *rest, **more)

    monkeypatch.setattr(starts, "mark", full)
    assert lab.run(lab.fresh()).returned.exit_code == 0
    assert "cannot put it on record" in lab.text


def test_a_run_that_its_machine_does_not_know_is_waited_for_no_longer(lab: Lab) -> None:
    """It was interrupted before it had begun, or removed there; the next attach would start the machine for nothing."""
    lab.cloud.add()
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote(), interrupt)
    begun = record.find(None)
    assert begun.cloud is not None
    workspace = starting.workspace_of(begun.cloud, record.remote_of(begun))
    jobs.stop(workspace, begun.job)
    jobs.forget(workspace, begun.job)
    with pytest.raises(LabError, match="knows no run"):
        lab.attach()
    assert lab.cloud.status() == "TERMINATED"
    assert record.find(begun.job).fetched


@pytest.mark.parametrize("again", [False, True])
def test_limits_of_a_start_that_is_taken_back_do_not_hold_for_the_next_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Which may be a colleague's, whose machine would be powered off under them."""
    lab.cloud.add()
    guard = lab.cloud.server.folder / "home/.local/state/cudadent42/watchdog"
    if again:
        left_stopped(lab)

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(starting, "provider_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = lab.attach(start=True) if again else lab.run(lab.remote())
    assert lab.cloud.status() == "TERMINATED"
    armed = (guard / "limits").read_text().split()[4]
    assert (guard / "left").read_text().split()[1] == armed


def test_a_second_interrupt_while_limits_are_taken_back_ends_the_machine_all_the_same(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.cloud.add()

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(starting, "provider_start", interrupted)
    monkeypatch.setattr(starting, "release_when_off", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote())
    assert lab.cloud.status() == "TERMINATED"
    assert lab.outcomes == [StartOutcome.FAILED]


# ---- two runs on a machine that was made for one


def of_another_terminal(begun: JobRecord) -> JobRecord:
    """A run on the same machine that was not brought back yet."""
    assert begun.cloud is not None
    now = datetime.now(timezone.utc).isoformat()
    other = replace(
        begun, job=record.new_job(), fetched=False, started=now, cloud=replace(begun.cloud, since=now)
    )
    record.save(other)
    return other


def test_a_fresh_machine_with_another_run_that_is_not_back_is_stopped_and_not_deleted(lab: Lab) -> None:
    others: list[JobRecord] = []

    def meanwhile(chunk: bytes) -> None:
        if not others:
            others.append(of_another_terminal(record.find(None)))

    assert lab.run(lab.fresh(), meanwhile).returned.exit_code == 0
    [name] = lab.cloud.names()
    assert lab.cloud.status(name) == "TERMINATED"
    assert f"gce://{name} is stopped" in lab.said
    assert f"what {others[0].job} measured" in lab.text
    assert lab.outcomes == [StartOutcome.STOPPED]


def test_a_fresh_machine_that_is_named_by_its_address_is_not_used_before_its_runs_are_back(lab: Lab) -> None:
    """A start of it that fails, and the end of another run there, would delete it."""
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.fresh("keep"), interrupt)
    [name] = lab.cloud.names()
    waiting = record.find(None)
    with pytest.raises(UsageError, match=f"{waiting.job} measured.*remote attach {waiting.job}"):
        prepare(Remote("again", parse(f"gce://{name}"), rate="gcp-l4"), "cpu")


# ---- names that come again


OTHER = "gce://my-project/us-central1-a/another"


def test_what_was_agreed_on_for_another_machine_of_that_name_starts_none(lab: Lab) -> None:
    left_stopped(lab)
    hosts.save(make("there", parse(OTHER), rate="gcp-l4", unguarded_start=True))
    with pytest.raises(UsageError, match=f"{BENCH} has no limit of its own"):
        lab.attach(start=True, terms=ANY_TERMS)
    assert lab.cloud.status() == "TERMINATED"


@pytest.mark.parametrize("verb", ["unwatch", "status"])
def test_a_name_that_was_given_to_another_machine_is_not_the_one_before(
    cloud: Cloud, tmp_path: Path, verb: str
) -> None:
    """To take the limits from the wrong one would leave it running."""
    cloud.add(status="RUNNING")
    a_job(cloud, a_start())
    hosts.save(make("bench", parse(OTHER), rate="gcp-l4"))
    done = cudadent42("remote", verb, "bench", cwd=tmp_path)
    assert done.returncode == 2
    assert "no run was started on bench yet" in done.stderr
