"""Runs whose machine is taken away, or stopped under them: what is kept, what is said, and how it is had back."""

from __future__ import annotations

import pytest
from cloud_lab import Lab, interrupt
from standin import BENCH

from cudadent42.base.errors import LabError
from cudadent42.remote.core import record, run
from cudadent42.remote.core.protection import ANY_TERMS
from cudadent42.remote.core.run import RunLostError, RunRequest
from cudadent42.remote.flows import pipeline
from cudadent42.remote.providers.gce.checks import prepare
from cudadent42.remote.providers.gce.failures import CloudError
from cudadent42.remote.providers.gce.provider import Candidate
from cudadent42.runs.starts import StartOutcome


def test_a_preempted_run_keeps_what_was_copied(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "COPY_EVERY_S", 0.1)

    def taken_away(chunk: bytes) -> None:
        copy = run.copies_of(record.find(None)) / "run/samples.csv"
        if copy.exists() and copy.read_text().count("\n") >= 2 and lab.cloud.names():
            lab.cloud.takes_away(f"gce://{lab.cloud.names()[0]}", gone=True)

    with pytest.raises(RunLostError, match="it was preempted") as caught:
        lab.run(lab.fresh(spot=True, pause="0.1", lines="600"), taken_away)
    assert f"what had been copied of {record.records()[0].job} is in {lab.output}" in str(caught.value)
    assert (lab.output / "samples.csv").read_text().startswith("1\n2\n")
    assert lab.outcomes == [StartOutcome.LOST]
    assert record.records()[0].fetched
    assert record.records()[0].exit_code is None


def test_attach_says_that_the_machine_is_gone(lab: Lab) -> None:
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.fresh(pause="0.2"), interrupt)
    lab.cloud.takes_away(f"gce://{lab.cloud.names()[0]}", gone=True)
    with pytest.raises(RunLostError, match=r"is gone: it was preempted.*nothing of .* is left"):
        lab.attach()
    assert lab.outcomes == [StartOutcome.LOST]
    assert record.records()[0].fetched


def test_one_that_is_stopped_under_its_run_can_be_started_again_for_what_it_measured(lab: Lab) -> None:
    lab.cloud.add()
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.remote(PAUSE="0.1"), interrupt)
    instance = lab.cloud.state["instances"][BENCH.removeprefix("gce://")]
    lab.cloud.change(instances={BENCH.removeprefix("gce://"): {**instance, "status": "TERMINATED"}})
    with pytest.raises(RunLostError, match=r"the provider does not say why.*remote attach .* --start"):
        lab.attach()
    assert lab.outcomes == [StartOutcome.LOST]
    assert not record.records()[0].fetched
    ended = lab.attach(start=True)
    assert ended.returned.exit_code == 0
    assert (lab.output / "samples.csv").read_text() == "1\n2\n3\n"
    assert lab.outcomes == [StartOutcome.LOST, StartOutcome.STOPPED]
    assert lab.cloud.status() == "TERMINATED"


def test_a_start_for_what_was_measured_that_fails_deletes_nothing(lab: Lab) -> None:
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.fresh(pause="0.1"), interrupt)
    [name] = lab.cloud.names()
    lab.cloud.change(instances={name: {**lab.cloud.state["instances"][name], "status": "TERMINATED"}})
    lab.cloud.fails("compute instances start", "no-capacity-start")
    with pytest.raises(CloudError, match="no capacity"):
        lab.attach(start=True)
    lab.cloud.fails("compute instances start", "unknown", after=True)
    with pytest.raises(CloudError, match="4A1B2C3D"):
        lab.attach(start=True)
    assert lab.cloud.status(f"gce://{name}") == "TERMINATED"
    assert not lab.cloud.calls("compute", "instances", "delete")
    assert not lab.is_open()
    assert lab.attach(start=True).returned.exit_code == 0
    assert lab.cloud.names() == []


def test_one_that_is_taken_away_while_it_boots(lab: Lab) -> None:
    lab.cloud.add()
    lab.cloud.refuses(99)
    prepared = prepare(lab.remote(), "cpu")

    def taken_away(text: str) -> None:
        lab.said.append(text)
        if "waiting" in text:
            lab.cloud.takes_away()

    request = RunRequest(device="cpu", arguments=(), output=lab.output)
    with pytest.raises(LabError, match="it was preempted"):
        pipeline.carry_out(Candidate(prepared), request, ANY_TERMS, taken_away, lab.log.extend)
    assert lab.outcomes == [StartOutcome.LOST]
    assert lab.cloud.status() == "TERMINATED"
    assert not record.records()
