"""Which provider has what: named machines, runs on record, starts on record."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.remote.core.address import SpecificationFile, parse
from cudadent42.remote.core.hosts import Remote, save
from cudadent42.remote.core.record import CloudRecord, JobRecord
from cudadent42.remote.providers import machine_of, provider_for, provider_of, provider_of_run
from cudadent42.remote.providers.gce.provider import Gce
from cudadent42.remote.providers.sky.provider import Sky
from cudadent42.remote.providers.ssh import Ssh
from cudadent42.runs.starts import MachineStart

START = "0" * 32
OWN = Remote("own", parse("ssh://host"))
BENCH = Remote("bench", parse("gce://my-project/us-central1-a/bench"), rate="gcp-l4")
FRESH = Remote("fresh", SpecificationFile(Path("l4.toml")))
CLUSTER = Remote("c42-l4", parse("ssh://c42-l4"), start=START)


@pytest.fixture(autouse=True)
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for remote in (OWN, BENCH, FRESH, CLUSTER):
        save(remote)


@pytest.mark.parametrize(
    ("remote", "provider"),
    [(OWN, Ssh), (BENCH, Gce), (FRESH, Gce), (CLUSTER, Sky)],
    ids=lambda each: str(each),
)
def test_a_named_machine_has_one_provider(remote: Remote, provider: type) -> None:
    assert isinstance(provider_of(remote), provider)
    assert isinstance(provider_for(remote.name), provider)


def test_a_file_of_machines_is_told_by_its_scheme() -> None:
    assert isinstance(provider_for("sky://nowhere.toml"), Sky)
    with pytest.raises(UsageError, match="nowhere"):
        provider_for("nowhere")


def test_a_run_is_its_machines_whatever_its_name_is_now() -> None:
    cloud = CloudRecord("gce://p/us-central1-a/i", "gcp-l4", None, "", "stop", "auto", False, "")
    begun = JobRecord(
        "job", "own", "/nowhere", (), "2026-01-01T00:00:00+00:00", folder="f", address="ssh://host"
    )
    assert isinstance(provider_of_run(begun), Ssh)
    assert isinstance(provider_of_run(JobRecord(**{**vars(begun), "cloud": cloud})), Gce)
    assert isinstance(provider_of_run(JobRecord(**{**vars(begun), "start": START})), Sky)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gce://my-project/us-central1-a/bench", "gcloud compute instances stop bench"),
        ("sky://c42-l4", "sky down c42-l4"),
        ("ssh://host", None),
        ("moon://1", None),
    ],
)
def test_the_machine_of_a_start(name: str, end: str | None) -> None:
    machine = machine_of(MachineStart("id", name, "gcp-l4", None, "2026-01-01T00:00:00+00:00"))
    assert (machine is None) is (end is None)
    assert machine is None or machine.end_command.startswith(end or "")
