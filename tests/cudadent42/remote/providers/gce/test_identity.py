"""Machines that were started from here, and by somebody else since: the name is the same, the machine is theirs."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from cloud_lab import Lab, interrupt
from journal_lab import FRESH, LABELS, a_job, a_start, look, of
from standin import BENCH, Cloud, there

from cudadent42.remote.core import record, watchdog
from cudadent42.remote.flows.stopping import stop_all
from cudadent42.remote.providers.gce import starting
from cudadent42.remote.providers.gce.identity import provider_start
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

KEY = BENCH.removeprefix("gce://")
LATER = timedelta(hours=2)
RESTART = "compute.instances.automaticRestart"


def known_by_name(cloud: Cloud) -> str:
    """A start that is on record as the provider calls it."""
    begun = a_start(ready=False)
    starts.mark(begun, StartOutcome.READY, provider_start=provider_start(cloud.state["instances"][KEY]))
    return begun


def test_the_provider_s_words_are_put_on_record(lab: Lab) -> None:
    lab.cloud.add()
    lab.run(lab.remote("keep"))
    (begun,) = starts.load()
    instance = lab.cloud.state["instances"][KEY]
    assert begun.provider_start == f"4711 {instance['lastStartTimestamp']}"
    assert instance["lastStartTimestamp"].endswith("-08:00")


def test_one_that_was_started_again_by_a_colleague_is_theirs(cloud: Cloud) -> None:
    """A second after ours: no clock matters where the provider's words are on record."""
    cloud.add(status="RUNNING")
    begun = known_by_name(cloud)
    a_job(cloud, begun)
    assert [each.start.id for each in look().started] == [begun]
    cloud.starts_again(after=timedelta(seconds=1))
    seen = look()
    assert seen.started == ()
    (line,) = seen.corrected
    assert line.outcome is StartOutcome.STOPPED
    assert "started again by colleague@example.org" in line.reason
    ended = of(begun).ended
    assert ended is not None
    stopped = datetime.fromisoformat(cloud.state["instances"][KEY]["lastStopTimestamp"])
    assert datetime.fromisoformat(ended) == stopped
    assert look().started == look().corrected == ()
    assert stop_all(look().started, print) == ()
    assert cloud.status() == "RUNNING"


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(("after", "ours"), [(timedelta(minutes=14), True), (LATER, False)])
def test_where_only_our_clock_is_on_record_it_may_be_wrong_by_minutes(
    cloud: Cloud, after: timedelta, ours: bool, ready: bool
) -> None:
    """And a request may take a quarter of an hour."""
    cloud.add(status="RUNNING")
    a_start(ready=ready)
    cloud.starts_again(after=after)
    assert bool(look(LATER + LATER).started) is ours


def test_a_clock_that_is_ahead_makes_no_machine_somebody_else_s(cloud: Cloud) -> None:
    cloud.add(status="RUNNING", lastStartTimestamp=there(-LATER))
    begun = a_start(ready=False)
    assert [each.start.id for each in look().started] == [begun]


@pytest.mark.parametrize("kind", [RESTART, "compute.instances.hostError"])
def test_what_the_provider_restarts_itself_goes_on_being_ours(cloud: Cloud, kind: str) -> None:
    cloud.add(status="RUNNING")
    begun = known_by_name(cloud)
    cloud.starts_again(after=LATER, kind=kind)
    assert [each.start.id for each in look().started] == [begun]
    cloud.change(operations=[])  # it lists them for two weeks
    assert [each.start.id for each in look().started] == [begun]
    cloud.starts_again(after=LATER + LATER)
    assert look().started == ()


def test_what_the_provider_restarted_after_somebody_else_had_started_it_is_theirs(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    known_by_name(cloud)
    cloud.starts_again(after=LATER)
    cloud.starts_again(after=LATER + LATER, kind=RESTART)
    assert look().started == ()


def test_one_that_was_made_again_is_another(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    begun = known_by_name(cloud)
    cloud.starts_again(after=LATER, id="4712", creationTimestamp=there(LATER))
    (line,) = look().corrected
    assert (line.outcome, look().started) == (StartOutcome.DELETED, ())
    assert of(begun).ended is not None


def test_what_cannot_be_told_is_believed_to_be_ours(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    begun = known_by_name(cloud)
    cloud.starts_again(after=LATER)
    cloud.fails("compute operations list", "permission")
    (started,) = look().started
    assert (started.start.id, started.word) == (begun, "not known")
    assert of(begun).ended is None


def test_a_run_leaves_their_machine_running(lab: Lab) -> None:
    lab.cloud.add()
    lab.run(lab.remote("keep"))
    lab.cloud.starts_again(after=LATER)
    lab.output.rename(lab.output.parent / "first")
    lab.run(lab.remote("stop"))
    assert "was running before this run, so it is left running" in lab.text
    assert lab.cloud.status() == "RUNNING"
    assert lab.outcomes == [StartOutcome.STOPPED]


def test_attach_leaves_their_machine_running_and_without_our_limits(lab: Lab) -> None:
    lab.cloud.add()
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote("stop", PAUSE="0.3"), interrupt)
    lab.cloud.starts_again(after=LATER)
    assert lab.attach().returned.exit_code == 0
    assert "is left running: it was stopped, and started again by colleague@example.org" in lab.text
    assert lab.cloud.status() == "RUNNING"
    assert lab.outcomes == [StartOutcome.STOPPED]
    [begun_job] = record.records()
    assert begun_job.cloud is not None
    watch = watchdog.report(starting.workspace_of(begun_job.cloud, lab.remote()))
    assert watch is not None
    assert (watch.idle_s, watch.budget_s) == (0, 0)


def test_an_end_for_which_nobody_can_be_asked_is_carried_out(lab: Lab) -> None:
    """As with an expired login: what was started here is ended, as far as is known."""
    lab.cloud.add()
    lab.cloud.fails("compute operations list", "permission")
    lab.run(lab.remote("stop"))
    assert lab.cloud.status() == "TERMINATED"


def test_a_start_that_is_found_stopped_ended_when_the_provider_says(lab: Lab) -> None:
    lab.cloud.add()
    lab.run(lab.remote("keep"))
    Machine(BENCH, "gcp-l4").stop()
    stopped = lab.cloud.state["instances"][KEY]["lastStopTimestamp"]
    lab.output.rename(lab.output.parent / "first")
    lab.run(lab.remote("stop"))
    first = starts.load()[0]
    assert first.ended is not None
    assert datetime.fromisoformat(first.ended) == datetime.fromisoformat(stopped)


# ---- machines that were taken for lost


def lost(cloud: Cloud) -> str:
    begun = known_by_name(cloud)
    starts.mark(begun, StartOutcome.LOST, "the host that it ran on failed")
    return begun


def test_one_that_was_taken_for_lost_and_runs_is_shown(cloud: Cloud) -> None:
    """The provider's answer was wrong."""
    cloud.add(status="RUNNING")
    begun = lost(cloud)
    seen = look()
    assert [each.start.id for each in seen.started] == [begun]
    assert [(line.outcome, line.reason) for line in seen.corrected] == [
        (StartOutcome.READY, "it runs, although it had ended")
    ]
    assert of(begun).ended is None
    assert look().corrected == ()
    (done,) = stop_all(look().started, print)
    assert done.ended
    assert cloud.status() == "TERMINATED"


def test_one_that_came_back_by_itself_is_shown(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    begun = lost(cloud)
    cloud.starts_again(after=LATER, kind=RESTART)
    assert [each.start.id for each in look().started] == [begun]


def test_one_that_somebody_else_started_after_it_was_lost_is_theirs(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    begun = lost(cloud)
    cloud.starts_again(after=LATER)
    assert look().started == look().corrected == ()
    assert of(begun).outcome is StartOutcome.LOST


def test_one_that_is_lost_and_off_is_over(cloud: Cloud) -> None:
    cloud.add()
    begun = lost(cloud)
    assert look().started == look().corrected == ()
    assert of(begun).outcome is StartOutcome.LOST


def test_what_was_lost_is_not_asked_about_for_ever(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    lost(cloud)
    asked = len(cloud.calls("compute"))
    assert look(timedelta(days=8)).started == ()
    assert len(cloud.calls("compute")) == asked
    assert len(look(timedelta(days=6)).started) == 1


def test_what_was_lost_and_started_from_here_again_is_the_later_one(cloud: Cloud) -> None:
    cloud.add(status="RUNNING")
    lost(cloud)
    again = known_by_name(cloud)
    assert [each.start.id for each in look().started] == [again]
    starts.mark(again, StartOutcome.STOPPED)
    asked = len(cloud.calls("compute"))
    assert look().started == ()
    assert len(cloud.calls("compute")) == asked


def test_a_fresh_one_that_runs_again_is_open_again(cloud: Cloud) -> None:
    cloud.add(FRESH, status="RUNNING", labels=LABELS)
    begun = a_start(FRESH)
    starts.mark(begun, StartOutcome.STOPPED, "it was shut down from inside", datetime.now(timezone.utc))
    assert [each.start.id for each in look().started] == [begun]
    assert of(begun).ended is None
