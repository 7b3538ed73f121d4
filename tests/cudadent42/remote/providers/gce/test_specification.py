"""Specifications of fresh instances: what is one, and what becomes of it on gcloud's command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from standin import read_specification as read

from cudadent42.base.errors import UsageError
from cudadent42.remote.core.address import GceAddress
from cudadent42.remote.core.policy import Reach
from cudadent42.remote.providers.gce.creation import new_addresses, words
from cudadent42.remote.providers.gce.specification import Specification, load


@pytest.fixture(autouse=True)
def _no_rates_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_the_least(tmp_path: Path) -> None:
    specification = read(tmp_path)
    assert specification.zones == ("us-central1-a", "us-west1-b")
    assert specification.accelerator_type == "nvidia-l4"
    assert not specification.spot
    assert specification.disk_gb == 100
    assert specification.digest == read(tmp_path).digest != read(tmp_path, disk_gb=200).digest


def test_the_page_shows_one_that_is_read(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[5] / "docs/cloud.md"
    [shown] = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    path = tmp_path / "shown.toml"
    path.write_text(shown)
    specification = load(path)
    assert specification.spot
    # Every key is there, some in the comments.
    keys = {line.partition(" = ")[0].strip() for line in shown.splitlines()}
    assert {*Specification.__dataclass_fields__} - keys == {"accelerator_count", "scopes", "subnet"}


def test_arguments_of_gcloud(tmp_path: Path) -> None:
    specification = read(tmp_path)
    name = "cudadent42-run-1"
    assert words(GceAddress("my-project", "us-west1-b", name), specification) == (
        *("compute", "instances", "create", name),
        "--project=my-project",
        "--zone=us-west1-b",
        "--machine-type=g2-standard-8",
        "--image-family=common-cu129-ubuntu-2204-nvidia-580",
        "--image-project=deeplearning-platform-release",
        "--boot-disk-size=100GB",
        "--max-run-duration=60m",
        "--instance-termination-action=DELETE",
        "--maintenance-policy=TERMINATE",
        f"--labels=cudadent42=fresh,cudadent42-specification={specification.digest}",
        "--metadata=enable-guest-attributes=TRUE",
        *("--no-restart-on-failure", "--no-service-account", "--no-scopes", "--quiet"),
    )


def test_arguments_of_gcloud_for_all_that_can_be_said(tmp_path: Path) -> None:
    specification = read(
        tmp_path,
        machine_type="n1-standard-8",
        accelerator="nvidia-tesla-t4",
        accelerator_count=2,
        disk_type="pd-ssd",
        spot=True,
        service_account="runner@my-project.iam.gserviceaccount.com",
        scopes=["storage-ro", "https://www.googleapis.com/auth/logging.write"],
        labels={"team": "kernels"},
        metadata={"install-nvidia-driver": "True"},
        network="lab",
        subnet="lab-west",
        external_ip=False,
        reach="iap",
        results="gs://my-results/lab",
    )
    assert specification.reach is Reach.IAP
    given_words = words(GceAddress("my-project", "us-west1-b", "x"), specification)
    for wanted in (
        "--accelerator=type=nvidia-tesla-t4,count=2",
        "--boot-disk-type=pd-ssd",
        "--provisioning-model=SPOT",
        "--service-account=runner@my-project.iam.gserviceaccount.com",
        "--scopes=storage-ro,https://www.googleapis.com/auth/logging.write",
        f"--labels=cudadent42=fresh,cudadent42-specification={specification.digest},team=kernels",
        "--metadata=enable-guest-attributes=TRUE,install-nvidia-driver=True",
        "--network=lab",
        "--subnet=lab-west",
        "--no-address",
    ):
        assert wanted in given_words
    assert not {"--no-service-account", "--no-scopes"} & set(given_words)


def test_names_of_instances_are_nobody_elses(tmp_path: Path) -> None:
    specification = read(tmp_path)
    first, second = new_addresses(specification)
    assert (first.zone, second.zone) == specification.zones
    assert first.instance == second.instance != new_addresses(specification)[0].instance


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_run_minutes": None}, "'max_run_minutes' is missing"),
        ({"max_run_minutes": 0}, "from 1 to 10080"),
        ({"max_run_minutes": "60"}, "expected a whole number"),
        ({"zones": []}, "order of preference"),
        ({"zones": ["us-central1-a", "us-central1-a"]}, "each once"),
        ({"zones": ["--zone"]}, "expected a zone's name"),
        ({"project": "My Project"}, "expected the project's ID"),
        ({"machine_type": "g2 standard"}, "such as g2-standard-8"),
        ({"image_family": None}, "'image_family' is missing"),
        ({"machine-type": "g2-standard-8"}, "unknown key 'machine-type'.*did you mean 'machine_type'"),
        ({"rate": "gcp-l5"}, "unknown rate 'gcp-l5'.*did you mean 'gcp-l4'"),
        ({"accelerator": "nvidia-tesla-t4"}, "brings nvidia-l4"),
        ({"scopes": ["storage-ro"]}, "service_account and scopes together"),
        ({"service_account": "x@y"}, "service_account and scopes together"),
        ({"labels": {"cudadent42": "mine"}}, "is set by cudadent42"),
        ({"labels": {"team": "A B"}}, "labels.team"),
        ({"metadata": {"enable-guest-attributes": "FALSE"}}, "is set by cudadent42"),
        ({"metadata": {"startup-script": "a,b=c"}}, "metadata.startup-script"),
        ({"metadata": {"token": "a\nb"}}, "metadata is no place for secrets"),
        ({"results": "s3://bucket"}, "expected gs://BUCKET"),
        ({"reach": "carrier pigeon"}, "auto or iap or internal"),
        ({"disk_gb": 5}, "from 10 to"),
        ({"spot": "yes"}, "expected true or false"),
        ({"schema_version": 2}, "newer cudadent42"),
    ],
)
def test_what_is_no_specification_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, **changes)
    assert re.search(words, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("content", "words"), [(b"a = ", "not valid TOML"), (b"\xff", "not UTF-8"), (None, "cannot read")]
)
def test_what_is_no_file_of_one(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "machine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        load(path)


HOSTILE = st.one_of(
    st.sampled_from(
        [
            "-q",
            "--impersonate-service-account=x",
            "a b",
            "$(touch bad)",
            "a,b=c",
            "a\nb",
            "a=b",
            "^x^a",
            "../x",
            "a@b",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
TEXTS = [name for name, kind in Specification.__annotations__.items() if kind == "str" and name != "rate"]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from([*TEXTS, "zones", "scopes", "labels", "metadata"]), HOSTILE, min_size=1)
)
def test_no_text_becomes_an_argument_of_its_own(tmp_path: Path, hostile: dict[str, str]) -> None:
    forms = {
        "zones": lambda t: [t],
        "scopes": lambda t: [t],
        "labels": lambda t: {"k": t},
        "metadata": lambda t: {"k": t},
    }
    changes = {key: forms.get(key, lambda text: text)(text) for key, text in hostile.items()}
    try:
        specification = read(tmp_path, **changes)
    except UsageError:
        return
    plain = read(tmp_path)
    at = GceAddress(specification.project, specification.zones[0], "x")
    names = {word.partition("=")[0] for word in words(at, plain)} | {
        *("--boot-disk-type", "--accelerator", "--network", "--subnet", "--service-account", "--scopes")
    }
    for word in words(at, specification):
        assert word.partition("=")[0] in names
        assert word.isprintable()
    pairs = next(word for word in words(at, specification) if word.startswith("--metadata="))
    assert pairs.count(",") == ("metadata" in hostile)
