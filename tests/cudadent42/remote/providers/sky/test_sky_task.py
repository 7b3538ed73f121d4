"""The file that describes a machine, and the task that is made of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.remote.providers.sky.spec import Spec, load
from cudadent42.remote.providers.sky.task import Files, arrival, task
from flashmoe_science.jit.requirements import install_command

FULL = """
cluster = "c42-h100"
rate = "gcp-l4"
idle_minutes = 5
max_minutes = 30
keep = true

[resources]
infra = "aws/us-east-1"
accelerators = "H100:1"
cpus = "8+"
memory = 32
use_spot = true
disk_size = 100
max_hourly_cost = 3.5
"""

WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def spec_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gpu-1.toml"
    path.write_text(text)
    return path


def test_a_machine(tmp_path: Path) -> None:
    spec = load(spec_file(tmp_path, FULL))
    resources = {
        "infra": "aws/us-east-1",
        "accelerators": "H100:1",
        "cpus": "8+",
        "memory": 32,
        "use_spot": True,
        "disk_size": 100,
        "max_hourly_cost": 3.5,
    }
    assert spec == Spec("c42-h100", "gcp-l4", resources, 5, 30, True)
    assert spec.architectures == ("sm_90",)
    least = load(spec_file(tmp_path, 'rate = "local"'))
    assert (least.cluster, least.keep, least.architectures) == ("gpu-1", False, ())
    assert least.idle_minutes > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the key 'rate' is missing"),
        ('rate = "no-such"', "unknown rate 'no-such'"),
        ('rate = "local"\ncluster = "-x; touch bad"', "lower-case letters"),
        ('rate = "local"\nidle_minutes = 0', "from 1 to 1440"),
        ('rate = "local"\nidle = 1', "unknown key 'idle'"),
        ('rate = "local"\n[resources]\naccelerator = "L4"', "did you mean 'accelerators'"),
        ('rate = "local"\n[resources]\nuse_spot = "yes"', "expected bool"),
        ('rate = "local"\n[resources]\ndisk_size = true', "expected int"),
        ('rate = "local"\n[resources]\ninfra = "a\\nb"', "expected str"),
        ("rate", "expected a TOML file"),
    ],
)
def test_what_is_no_machine(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load(spec_file(tmp_path, text))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a machine for SkyPilot"):
        load(tmp_path / "none.toml")


def files(tmp_path: Path) -> Files:
    for name in ("job.sh", "tree.tar"):
        (tmp_path / name).write_text("")
    return Files(tmp_path / "job.sh", tmp_path / "tree.tar", "0" * 64)


def test_the_run_ends_by_itself(tmp_path: Path) -> None:
    """However long it would take, and whether or not anybody watches."""
    text = task(Spec("gpu", "local", {}, max_minutes=30), files(tmp_path), "job-1", "cuda", ())
    document = json.loads(text)
    _, begun, _, bootstrap, _, left, follow, stop, *_ = document["run"].splitlines()
    assert bootstrap.startswith("timeout 1800 ~/cudadent42-remote/tree/tools/bootstrap.sh ")
    assert ' || timeout "$left" sh ' in follow
    assert " stop " in stop
    # What the bootstrap took is taken off.
    clock = ["sh", "-c", f'{begun}; deadline=$((deadline - 600)); {left}; echo "$left"']
    assert 1150 < int(subprocess.run(clock, capture_output=True, check=True).stdout) <= 1200
    assert "setup" not in document  # SkyPilot sets the idle limit after it only


def test_the_arrival_is_told_by_the_machine_and_not_by_the_task(tmp_path: Path) -> None:
    """SkyPilot may show the task itself before any machine has it."""
    run = json.loads(task(Spec("gpu", "local", {}), files(tmp_path), "job-1", "cpu", ()))["run"]
    first = run.splitlines()[0]
    said = subprocess.run(["sh", "-c", first], capture_output=True, text=True, check=True).stdout
    assert said == arrival("job-1") + "\n"
    assert arrival("job-1") not in run


@given(st.lists(WORDS, max_size=5))
def test_words_reach_the_run_as_they_are(words: list[str]) -> None:
    """Through JSON, and through the shell that SkyPilot gives the text to."""
    text = task(
        Spec("gpu", "local", {}), Files(Path("job.sh"), Path("tree.tar"), "0"), "job-1", "cpu", tuple(words)
    )
    _, _, run = json.loads(text)["run"].partition(" || exit 4\n")
    start = run.rpartition(" || exit 1\n")[0]
    arguments = start.removeprefix("sh ~/cudadent42-remote-incoming/job.sh ")
    assert arguments != start
    done = subprocess.run(["sh", "-c", f'printf "%s\\0" {arguments}'], capture_output=True, check=True)
    expected = ["start", "cudadent42-remote", "job-1", "", "cpu", *words]
    assert done.stdout == b"".join(word.encode() + b"\0" for word in expected)


@pytest.mark.slow
def test_skypilot_itself_takes_the_task(tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("skypilot")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"SkyPilot is not installed: {install_command('skypilot')}")
    path = tmp_path / "task.yaml"
    path.write_text(task(load(spec_file(tmp_path, FULL)), files(tmp_path), "job-1", "cuda", ("--case=a: b",)))
    script = (
        "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); (one,) = task.resources; "
        "print(task.name, one.accelerators, one.use_spot, len(task.file_mounts), '--case=a: b' in task.run)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env=os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "c42-h100 {'H100': 1} True 2 True"
    options = subprocess.run(["sky", "launch", "--help"], capture_output=True, text=True, check=True).stdout
    assert all(
        name in options
        for name in ("--cluster", "--yes", "--idle-minutes-to-autostop", "--wait-for", "--down")
    )
