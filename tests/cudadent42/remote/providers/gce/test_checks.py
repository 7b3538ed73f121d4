"""What is found out about a machine before anything is paid for."""

from __future__ import annotations

from pathlib import Path

import pytest
from journal_lab import FRESH, LABELS
from standin import BENCH, Cloud
from standin import read_specification as read

from cudadent42.base.errors import LabError
from cudadent42.remote.core.address import SpecificationFile, parse
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.policy import parse_after
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.providers.gce.checks import Prepared, prepare
from cudadent42.runs import starts

L4 = [
    {
        "acceleratorType": "https://compute/v1/projects/p/zones/z/acceleratorTypes/nvidia-l4",
        "acceleratorCount": 1,
    }
]
UNPUBLISHED: dict[str, object] = {"items": [{"key": "enable-guest-attributes", "value": "FALSE"}]}


def remote(after: str = "stop", results: str = "") -> Remote:
    return Remote("there", parse(BENCH), after=parse_after(after), rate="gcp-l4", results=results)


def fresh(folder: Path, **changes: object) -> Remote:
    read(folder, **changes)
    return Remote("there", SpecificationFile(folder / "machine.toml"))


def started(cloud: Cloud) -> bool:
    return bool(cloud.calls("compute", "instances", "start") + cloud.calls("compute", "instances", "create"))


def test_an_instance(cloud: Cloud) -> None:
    cloud.add(guestAccelerators=L4, scheduling={"provisioningModel": "SPOT"})
    prepared = prepare(remote(results="gs://my-results/lab"), "auto")
    assert [(item.machine.name, item.machine.rate, item.state) for item in prepared.candidates] == [
        (BENCH, "gcp-l4", MachineState.STOPPED)
    ]
    assert prepared.architectures == ("sm_89",)
    assert prepared.spot
    assert cloud.calls("storage", "buckets", "describe")[0][3] == "gs://my-results"
    assert not started(cloud)


def test_a_machine_type_that_brings_its_gpu(cloud: Cloud) -> None:
    cloud.add(machineType="https://compute/zones/z/machineTypes/a3-highgpu-8g")
    assert prepare(remote("keep"), "cuda").architectures == ("sm_90",)


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu(cloud: Cloud) -> None:
    """It waits for no driver, and no kernel is compiled for it."""
    cloud.add(guestAccelerators=L4)
    prepared = prepare(remote(), "cpu")
    assert (prepared.accelerator, prepared.architectures, prepared.notes) == ("", (), ())


def test_a_gpu_that_is_not_known_here(cloud: Cloud) -> None:
    cloud.add(
        guestAccelerators=[{"acceleratorType": "https://compute/v1/zones/z/nvidia-x1", "acceleratorCount": 1}]
    )
    prepared = prepare(remote(), "cuda")
    assert (prepared.accelerator, prepared.architectures) == ("nvidia-x1", ())
    assert "nvidia-x1 is not known here" in prepared.notes[0]


def test_a_specification(cloud: Cloud, tmp_path: Path) -> None:
    prepared = prepare(fresh(tmp_path), "cuda")
    assert [item.machine.address.zone for item in prepared.candidates] == ["us-central1-a", "us-west1-b"]
    assert all(item.machine.fresh and item.state is MachineState.GONE for item in prepared.candidates)
    assert prepared.architectures == ("sm_89",)
    assert not started(cloud)


def refusal(cloud: Cloud, wanted: Remote, device: str = "auto") -> str:
    with pytest.raises(LabError) as caught:
        prepare(wanted, device)
    assert not started(cloud)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("not-logged-in", "gcloud auth login"),
        ("login-expired", "gcloud auth login"),
        ("api-disabled", "gcloud services enable compute.googleapis.com"),
        ("no-project", "gcloud projects list"),
        ("permission", "roles/compute.instanceAdmin.v1"),
        ("unknown", "Code: '4A1B2C3D'"),
    ],
)
def test_what_the_tool_refuses(cloud: Cloud, name: str, words: str) -> None:
    cloud.add()
    cloud.fails("compute instances describe", name)
    assert words in refusal(cloud, remote())


def test_no_such_instance(cloud: Cloud) -> None:
    assert "no such instance; list them with" in refusal(cloud, remote())


def test_one_that_was_made_for_a_run_is_used_by_who_made_it_alone(cloud: Cloud) -> None:
    cloud.add(FRESH, labels=LABELS)
    wanted = Remote("there", parse(FRESH), rate="gcp-l4")
    assert "made for a run from another place" in refusal(cloud, wanted)
    starts.request(FRESH, "gcp-l4")
    assert prepare(wanted, "cpu").candidates


def test_no_such_image(cloud: Cloud, tmp_path: Path) -> None:
    cloud.fails("compute images describe-from-family", "no-image")
    assert "no such image; list them with" in refusal(cloud, fresh(tmp_path))


def test_no_such_bucket(cloud: Cloud) -> None:
    cloud.add()
    cloud.fails("storage buckets describe", "ERROR: (gcloud.storage.buckets.describe) gs://b not found: 404.")
    assert "gs://b not found: 404." in refusal(cloud, remote(results="gs://bucket"))


def test_a_bucket_that_may_only_be_written(cloud: Cloud) -> None:
    cloud.add()
    cloud.fails("storage buckets describe", "permission-storage")
    assert prepare(remote(results="gs://bucket"), "cpu").results == "gs://bucket"


def test_no_gpu(cloud: Cloud) -> None:
    cloud.add()
    assert "has no GPU" in refusal(cloud, remote(), "cuda")
    assert prepare(remote(), "cpu").architectures == ()


@pytest.mark.parametrize("after", ["stop", "keep:5"])
def test_disks_that_a_stop_would_lose(cloud: Cloud, after: str) -> None:
    cloud.add(disks=[{"type": "PERSISTENT"}, {"type": "SCRATCH"}, {"type": "SCRATCH"}])
    assert "has 2 local SSDs" in refusal(cloud, remote(after))
    assert prepare(remote("keep"), "cpu").candidates


def test_one_that_is_being_stopped(cloud: Cloud) -> None:
    cloud.add(status="STOPPING")
    assert "is being stopped" in refusal(cloud, remote())


def test_host_keys_that_cannot_be_known(cloud: Cloud, tmp_path: Path) -> None:
    cloud.add(metadata={})
    assert "--metadata=enable-guest-attributes=TRUE" in refusal(cloud, remote())
    cloud.change(project_metadata=[{"key": "enable-guest-attributes", "value": "true"}])
    assert prepare(remote(), "cpu").candidates
    cloud.add(metadata=UNPUBLISHED)  # what the instance says counts more than what the project says
    assert "does not publish its host keys" in refusal(cloud, remote())
    known_hosts = tmp_path / "home-here/.ssh/google_compute_known_hosts"
    known_hosts.write_text("compute.47 ssh-ed25519 AAAA\ncompute.47110 ssh-ed25519 AAAA\n")
    assert "does not publish its host keys" in refusal(cloud, remote())
    known_hosts.write_text("compute.4711 ssh-ed25519 AAAA\n")
    assert isinstance(prepare(remote(), "cpu"), Prepared)
