"""What is on of all that was started: the journal against the provider, and the end of everything."""

from __future__ import annotations

import json
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from command_line import cudadent42, started
from journal_lab import FRESH, LABELS, a_job, a_start, look, of
from standin import BENCH, Cloud

from cudadent42.base.errors import UsageError
from cudadent42.commands.machines import show_machines
from cudadent42.cost import rates
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import record
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import make, save
from cudadent42.remote.core.job import JobState
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.flows.stopping import Stopped, stop_all
from cudadent42.remote.flows.survey import Survey
from cudadent42.remote.providers.gce import starting
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

OTHER = "gce://my-project/us-central1-b/other"


def test_what_is_on_and_what_it_has_cost(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    made = a_job(cloud, a_start())
    (started,) = look(timedelta(minutes=30)).started
    assert (started.state, started.word, started.problem) == (MachineState.RUNNING, "running", "")
    assert started.minutes == pytest.approx(30, abs=1)
    assert started.usd == pytest.approx(0.71 * started.minutes / 60)
    assert (started.after, started.jobs) == ("keep:30", (made,))


def test_nothing_is_asked_about_what_has_ended(cloud: Cloud) -> None:
    begun = a_start()
    starts.mark(begun, StartOutcome.STOPPED)
    assert look() == Survey((), ())
    assert cloud.calls("compute") == []


def test_one_that_was_shut_down_from_inside_ended_when_the_provider_says(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    begun = a_start()
    cloud.takes_away(kind="guestTerminate")
    seen = look(timedelta(days=2))
    assert seen.started == ()
    assert [(line.outcome, "shut down from inside" in line.reason) for line in seen.corrected] == [
        (StartOutcome.STOPPED, True)
    ]
    ended = of(begun)
    assert ended.outcome is StartOutcome.STOPPED
    assert ended.ended is not None
    told = datetime.fromisoformat(cloud.state["operations"][0]["insertTime"])
    assert abs(datetime.fromisoformat(ended.ended) - told) < timedelta(seconds=1)
    assert look() == Survey((), ())


def test_one_that_was_taken_away_is_lost(cloud: Cloud) -> None:
    cloud.add(FRESH, status="RUNNING", labels=LABELS)
    begun = a_start(FRESH)
    cloud.takes_away(FRESH, gone=True)
    assert look().started == ()
    assert of(begun).outcome is StartOutcome.LOST
    assert "preempted" in of(begun).reason


def test_the_disk_of_a_fresh_one_is_not_forgotten(cloud: Cloud) -> None:
    """Powered off by its watchdog, it is stopped, and nobody but us would delete it."""
    cloud.add(FRESH, status="TERMINATED", labels=LABELS)
    begun = a_start(FRESH)
    for _ in range(2):
        (started,) = look(timedelta(days=2)).started
        assert started.state is MachineState.STOPPED
        assert of(begun).outcome is StartOutcome.STOPPED
    assert "its disk costs until it is deleted" in started.problem
    assert stop_all((started,), print) == (Stopped(FRESH, True, "deleted"),)
    assert cloud.names() == []
    assert of(begun).outcome is StartOutcome.DELETED
    assert look() == Survey((), ())


def test_what_is_on_a_disk_is_had_back_by_starting_its_machine(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.add(FRESH, status="RUNNING", labels=LABELS)
    made = a_job(cloud, a_start(FRESH), FRESH)
    show_machines(as_json=False)
    assert capsys.readouterr().out.count(f"remote attach {made.job}\n") == 1
    cloud.takes_away(FRESH, kind="guestTerminate")
    show_machines(as_json=False)
    assert f"remote attach {made.job} --start\n" in capsys.readouterr().out


def test_one_that_was_lost_may_have_left_its_disk(cloud: Cloud) -> None:
    """As who attaches to a run finds it, whose machine was powered off by its watchdog."""
    cloud.add(FRESH, status="TERMINATED", labels=LABELS)
    begun = a_start(FRESH)
    starts.mark(begun, StartOutcome.LOST, "it was shut down from inside")
    (started,) = look().started
    assert started.state is MachineState.STOPPED
    cloud.change(instances={})
    assert look().started == ()
    gone = of(begun)
    assert (gone.outcome, gone.reason) == (StartOutcome.DELETED, "it was shut down from inside")


def test_one_that_was_started_again_after_it_was_stopped_is_one(cloud: Cloud) -> None:
    cloud.add(FRESH, status="RUNNING", labels=LABELS)
    first = a_start(FRESH)
    starts.mark(first, StartOutcome.STOPPED, "found stopped")
    second = a_start(FRESH)
    for _ in range(2):
        seen = look()
        assert [each.start.id for each in seen.started] == [second]
        assert seen.corrected == ()


def test_a_start_that_is_not_answered_yet_is_waited_for(cloud: Cloud) -> None:
    begun = a_start(FRESH, ready=False)
    (started,) = look().started
    assert started.word == "asked for"
    assert of(begun).outcome is StartOutcome.REQUESTED
    (left,) = stop_all((started,), print)
    assert not left.ended
    assert look(timedelta(hours=1)).started == ()
    assert of(begun).outcome is StartOutcome.FAILED


def test_what_cannot_be_asked_is_believed(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    begun = a_start()
    cloud.fails("compute instances describe", "not-logged-in")
    (started,) = look(timedelta(hours=1)).started
    assert (started.state, started.word) == (None, "not known")
    assert "gcloud auth login" in started.problem
    assert started.minutes > 59
    assert of(begun).outcome is StartOutcome.READY


def test_a_machine_of_no_known_provider_is_shown_and_not_taken_for_ended(cloud: Cloud) -> None:
    a_start("somebody-elses-cloud/machine")
    (started,) = look().started
    assert "no provider that is known here" in started.problem
    (left,) = stop_all((started,), print)
    assert not left.ended


def test_of_two_starts_of_one_machine_the_latter_counts(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    first, second = a_start(), a_start()
    (started,) = look().started
    assert started.start.id == second
    assert of(first).outcome is StartOutcome.STOPPED
    assert of(first).ended == of(second).requested


def test_a_line_that_was_taken_for_over_is_open_again_when_it_is_ready(cloud: Cloud) -> None:
    begun = a_start(ready=False)
    starts.mark(begun, StartOutcome.FAILED)
    starts.mark(begun, StartOutcome.READY)
    assert of(begun).ended is None


def test_one_that_refuses_keeps_no_other_from_being_ended(cloud: Cloud) -> None:
    for name, more in ((BENCH, {}), (OTHER, {}), (FRESH, {"labels": LABELS})):
        cloud.add(name, status="RUNNING", **more)
    begun = {name: a_start(name) for name in (BENCH, OTHER, FRESH)}
    cloud.fails("compute instances stop", "permission", zone="us-central1-b")
    said: list[str] = []
    done = {each.name: each for each in stop_all(look().started, said.append)}
    assert {name: each.ended for name, each in done.items()} == {BENCH: True, OTHER: False, FRESH: True}
    assert "it goes on costing money: gcloud compute instances stop other" in done[OTHER].what
    assert cloud.status() == "TERMINATED"
    assert cloud.status(OTHER) == "RUNNING"
    assert cloud.status(FRESH) is None
    outcomes = {name: of(identity).outcome for name, identity in begun.items()}
    assert outcomes == {
        BENCH: StartOutcome.STOPPED,
        OTHER: StartOutcome.READY,
        FRESH: StartOutcome.DELETED,
    }


def test_what_is_on_is_ended_where_nothing_can_be_put_on_record(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk here is full, and another machine was found to have ended."""
    cloud.add(status="RUNNING")
    cloud.add(OTHER)
    a_start(OTHER)
    a_start()

    def refuse(*_: object) -> None:
        raise UsageError("the disk is full")

    monkeypatch.setattr(starts, "mark", refuse)
    seen = look()
    assert [(line.start.machine, "the disk is full" in line.reason) for line in seen.corrected] == [
        (OTHER, True)
    ]
    assert [each.start.machine for each in seen.started] == [BENCH]
    (done,) = stop_all(seen.started, print)
    assert done.ended
    assert cloud.status() == "TERMINATED"


def test_what_is_on_is_ended_where_a_record_cannot_be_read(cloud: Cloud) -> None:
    """The run that it was of may have been on the machine that was made for one, so its disk is kept."""
    cloud.add(status="RUNNING")
    cloud.add(FRESH, status="RUNNING", labels=LABELS)
    a_start()
    a_start(FRESH)
    record.jobs_folder().mkdir(parents=True)
    (record.jobs_folder() / "some-job.json").write_text('{"schema_version": 99}')
    own, fresh = stop_all(look().started, print)
    assert (own.ended, own.what) == (True, "stopped")
    assert fresh.ended
    assert "not deleted" in fresh.what
    assert "newer version" in fresh.what
    assert [cloud.status(), cloud.status(FRESH)] == ["TERMINATED", "TERMINATED"]


def test_what_is_on_is_ended_where_prices_cannot_be_read(cloud: Cloud, tmp_path: Path) -> None:
    cloud.add(status="RUNNING")
    a_start()
    rates.user_file().parent.mkdir(parents=True, exist_ok=True)
    rates.user_file().write_text("no table")
    done = cudadent42("remote", "stop", "--all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "your own prices are not counted" in done.stderr
    assert cloud.status() == "TERMINATED"


def test_a_run_is_ended_before_its_machine(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    begun = a_job(cloud, a_start(), PAUSE="1000")
    assert begun.cloud is not None
    from cudadent42.remote.core.hosts import get

    workspace = starting.workspace_of(begun.cloud, get(begun.remote))
    (cloud.server.folder / "home/cudadent42-remote/tree").mkdir(parents=True)
    jobs.start(workspace, begun.job, "cpu", ())
    (done,) = stop_all(look().started, print)
    assert (done.ended, done.what) == (True, "stopped")
    assert jobs.state(workspace, begun.job).state is JobState.DONE


def test_what_a_fresh_one_measured_is_brought_back_before_it_is_deleted(cloud: Cloud, tmp_path: Path) -> None:
    cloud.add(FRESH, status="RUNNING", labels=LABELS)
    begun = a_job(cloud, a_start(FRESH), FRESH, str(tmp_path / "here/out"), PAUSE="1000")
    assert begun.cloud is not None
    from cudadent42.remote.core.hosts import get

    workspace = starting.workspace_of(begun.cloud, get(begun.remote))
    (cloud.server.folder / "home/cudadent42-remote/tree").mkdir(parents=True)
    jobs.start(workspace, begun.job, "cpu", ())
    samples = cloud.server.folder / "home/cudadent42-remote/jobs" / begun.job / "run/samples.csv"
    while not samples.exists():
        time.sleep(0.05)
    (done,) = stop_all(look().started, print)
    assert (done.ended, done.what) == (True, "deleted")
    assert (tmp_path / "here/out/samples.csv").read_text() == "1\n"
    assert record.find(begun.job).fetched


def test_what_cannot_be_brought_back_keeps_its_disk(cloud: Cloud) -> None:
    cloud.add(FRESH, status="RUNNING", labels=LABELS)
    begun = a_job(cloud, a_start(FRESH), FRESH)
    cloud.server.process.terminate()
    cloud.server.process.wait()
    (done,) = stop_all(look().started, print)
    assert done.ended
    assert f"stopped, and not deleted: its disk has what {begun.job} measured" in done.what
    assert "gcloud compute instances delete" in done.what
    assert cloud.status(FRESH) == "TERMINATED"


def test_killed_between_the_request_and_the_answer(cloud: Cloud, tmp_path: Path) -> None:
    """The start is on record, the provider carries it out with nobody waiting, and status finds it."""
    cloud.add()
    save(make("bench", parse(BENCH), rate="gcp-l4", python=cloud.python(), unguarded_start=True))
    cloud.fails("compute instances start", "unknown", until="nobody waits", after=True)
    process = started("run", "--on", "bench", "--suite", "small", "--device", "cpu", cwd=tmp_path)
    while not cloud.calls("compute", "instances", "start"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (begun,) = starts.load()
    assert begun.outcome is StartOutcome.REQUESTED
    cloud.goes_on("nobody waits")
    while cloud.status() != "RUNNING":
        time.sleep(0.05)
    done = cudadent42("remote", "status", "--json", cwd=tmp_path)
    (shown,) = json.loads(done.stdout)["machines"]
    assert (shown["machine"], shown["state"], shown["on_record"]) == (BENCH, "running", "requested")
    ended = cudadent42("remote", "stop", "--all", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, f"{BENCH}: stopped\n"), ended.stderr
    assert cloud.status() == "TERMINATED"
    after = cudadent42("remote", "status", cwd=tmp_path)
    assert after.stdout == "no machine that was started from here is on\n"


def test_killed_before_the_provider_heard_of_it(cloud: Cloud, tmp_path: Path) -> None:
    """A line without a machine is resolved as well."""
    cloud.add()
    begun = starts.request(BENCH, "gcp-l4")
    (started,) = json.loads(cudadent42("remote", "status", "--json", cwd=tmp_path).stdout)["machines"]
    assert started["state"] == "asked for"
    assert look(timedelta(hours=1)).started == ()
    assert of(begun).outcome is StartOutcome.STOPPED


def test_the_commands(cloud: Cloud, tmp_path: Path) -> None:
    cloud.add(status="RUNNING")
    a_job(cloud, a_start())
    shown = cudadent42("remote", "status", cwd=tmp_path)
    assert shown.returncode == 0
    assert BENCH in shown.stdout
    assert "keep:30" in shown.stdout
    assert "remote stop --all" in shown.stdout
    cloud.fails("compute instances stop", "permission")
    refused = cudadent42("remote", "stop", "--all", "--json", cwd=tmp_path)
    assert refused.returncode == 4
    document = json.loads(refused.stdout)
    assert [each["name"] for each in document["not_ended"]] == [BENCH]
    assert "1 of 1 could not be ended" in refused.stderr
    assert cudadent42("remote", "stop", "--all", cwd=tmp_path).returncode == 0
    nothing = cudadent42("remote", "stop", "--all", cwd=tmp_path)
    assert (nothing.returncode, nothing.stdout) == (0, "nothing that was started from here is on\n")
    assert cudadent42("remote", "stop", "a-job", "--all", cwd=tmp_path).returncode == 2
