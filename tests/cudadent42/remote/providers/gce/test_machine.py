"""One machine: its state, its start and end, and the way back to it from the journal."""

from __future__ import annotations

import pytest
from standin import BENCH, Cloud, message

from cudadent42.base.errors import UsageError
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.providers.gce.failures import CloudError, Failure
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.remote.providers.gce.status import of_start
from cudadent42.runs import starts

FRESH = "gce://my-project/us-central1-a/cudadent42-run-20261101-120000-abcdef"
LABELS = {"cudadent42": "fresh"}


def of(name: str = BENCH) -> Machine:
    return Machine(name, "gcp-l4")


@pytest.mark.parametrize(
    ("status", "state", "costs"),
    [
        ("PROVISIONING", MachineState.STARTING, True),
        ("STAGING", MachineState.STARTING, True),
        ("RUNNING", MachineState.RUNNING, True),
        ("STOPPING", MachineState.STOPPING, True),
        ("TERMINATED", MachineState.STOPPED, False),
        ("SUSPENDED", MachineState.STOPPED, False),
    ],
)
def test_states(cloud: Cloud, status: str, state: MachineState, costs: bool) -> None:
    cloud.add(status=status)
    assert of().state() is state
    assert state.costs is costs


def test_a_status_that_is_not_known_is_not_taken_for_stopped(cloud: Cloud) -> None:
    cloud.add(status="HIBERNATING")
    with pytest.raises(CloudError, match="HIBERNATING"):
        of().state()


def test_from_stopped_to_running_and_back(cloud: Cloud) -> None:
    cloud.add()
    of().start()
    assert of().state() is MachineState.RUNNING
    of().end()
    assert of().state() is MachineState.STOPPED
    assert cloud.calls("compute", "instances", "stop")


def test_a_fresh_one_ends_by_being_deleted(cloud: Cloud) -> None:
    cloud.add(FRESH, status="RUNNING", labels=LABELS)
    starts.request(FRESH, "gcp-l4")
    of(FRESH).end()
    assert of(FRESH).state() is MachineState.GONE
    of(FRESH).end()  # gone already


def test_what_was_made_for_a_run_from_another_laptop_is_not_deleted(cloud: Cloud) -> None:
    """It has such a name and our label; what it measured is only there."""
    cloud.add(FRESH, status="RUNNING", labels=LABELS)
    starts.request(BENCH, "gcp-l4")
    with pytest.raises(UsageError, match="made for a run from another place"):
        of(FRESH).end()
    assert cloud.status(FRESH) == "RUNNING"


@pytest.mark.parametrize(("name", "labels"), [(BENCH, LABELS), (FRESH, {}), (BENCH, {})])
def test_what_was_not_made_here_is_not_deleted(cloud: Cloud, name: str, labels: dict[str, str]) -> None:
    cloud.add(name, status="RUNNING", labels=labels)
    with pytest.raises(UsageError, match="not made for a run here"):
        of(name).delete()
    assert cloud.status(name) == "RUNNING"
    assert not cloud.calls("compute", "instances", "delete")


def test_the_end_of_one_that_is_gone(cloud: Cloud) -> None:
    of().stop()
    of(FRESH).delete()


def test_failures_are_told_apart(cloud: Cloud) -> None:
    cloud.add()
    cloud.fails("compute instances start", "permission")
    with pytest.raises(CloudError) as caught:
        of().start()
    assert caught.value.failure is Failure.PERMISSION
    assert message("permission") in str(caught.value)


def test_without_the_tool(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))
    with pytest.raises(CloudError, match=r"gcloud is not installed; install the Google Cloud CLI"):
        of().state()


def test_what_is_said_cannot_move_the_cursor(cloud: Cloud) -> None:
    cloud.fails("compute instances describe", "ERROR: \x1b]0;title\x07\x1b[2J odd\nnext")
    with pytest.raises(CloudError) as caught:
        of().state()
    assert "\x1b" not in str(caught.value)
    assert "odd\nnext" in str(caught.value)


def test_the_way_back_from_the_journal(cloud: Cloud) -> None:
    for name in (BENCH, FRESH, "ssh://host", "some other machine"):
        starts.request(name, "gcp-l4")
    machines = [of_start(start) for start in starts.load()]
    assert [machine and (machine.name, machine.rate) for machine in machines] == [
        (BENCH, "gcp-l4"),
        (FRESH, "gcp-l4"),
        None,
        None,
    ]
    assert machines[0] is not None
    assert machines[0].address == parse(BENCH)
    assert not machines[0].fresh
    assert (
        machines[0].end_command
        == "gcloud compute instances stop bench --zone=us-central1-a --project=my-project"
    )
