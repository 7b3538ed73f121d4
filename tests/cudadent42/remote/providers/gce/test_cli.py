"""``remote add`` and ``run --on`` for cloud machines, as processes: words, exit codes, interrupts."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from command_line import cudadent42, started
from standin import BENCH, Cloud, read_specification

from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

SMALL = ("--suite", "small", "--case", "tiny", "--device", "cpu", "--output-dir", "here")


def test_remotes(cloud: Cloud, tmp_path: Path) -> None:
    read_specification(tmp_path)
    good = (
        (
            "bench",
            BENCH,
            "--rate",
            "gcp-l4",
            "--after",
            "keep:45",
            "--reach",
            "iap",
            "--results",
            "gs://my-results/lab",
        ),
        ("l4", "--spec", "machine.toml", "--after", "keep"),
        ("plain", "ssh://host"),
    )
    for words in good:
        done = cudadent42("remote", "add", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    listed = json.loads(cudadent42("remote", "list", "--json", cwd=tmp_path).stdout)["remotes"]
    assert [(item["name"], item["address"], item["after"]) for item in listed] == [
        ("bench", BENCH, "keep:45"),
        ("l4", str(tmp_path / "machine.toml"), "keep"),
        ("plain", "ssh://host", "stop"),
    ]
    assert (listed[0]["rate"], listed[0]["reach"], listed[0]["results"]) == (
        "gcp-l4",
        "iap",
        "gs://my-results/lab",
    )
    assert cloud.calls() == []  # naming a machine asks nobody


def test_remotes_that_are_refused(cloud: Cloud, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("zone = 1\n")
    read_specification(tmp_path)
    (tmp_path / "machine.toml").rename(tmp_path / "good.toml")
    for words, expected in (
        (("x", BENCH), "--rate NAME"),
        (("x", BENCH, "--rate", "gcp-l5"), "did you mean 'gcp-l4'"),
        (("x", BENCH, "--rate", "gcp-l4", "--after", "later"), "expected stop, keep or keep:MINUTES"),
        (("x", BENCH, "--rate", "gcp-l4", "--reach", "--iap"), "expected auto, iap, internal"),
        (("x", BENCH, "--rate", "gcp-l4", "--results", "gs://a*b"), "expected gs://BUCKET"),
        (("x", "ssh://host", "--after", "stop"), "only for a machine of a cloud"),
        (("x", "ssh://host", "--unguarded-start"), "only for a gce:// machine"),
        (("x", "--spec", "good.toml", "--unguarded-start"), "only for a gce:// machine"),
        (("x", "--spec", "bad.toml"), "unknown key 'zone'"),
        (("x", "--spec", "none.toml"), "cannot read the specification"),
        (("x", BENCH, "--spec", "bad.toml"), "expected an address, or a specification"),
        (("x",), "expected an address, or a specification"),
    ):
        done = cudadent42("remote", "add", *words, cwd=tmp_path)
        assert done.returncode == 2, words
        assert expected in done.stderr
    assert not (tmp_path / "config/cudadent42/remotes.toml").exists()


@pytest.fixture
def bench(cloud: Cloud, tmp_path: Path) -> Cloud:
    cloud.add()
    words = ("remote", "add", "bench", BENCH, "--rate", "gcp-l4", "--unguarded-start")
    words = (*words, "--python", cloud.python())
    assert cudadent42(*words, cwd=tmp_path).returncode == 0
    return cloud


def test_nothing_is_started_before_all_that_is_free_is_checked(bench: Cloud, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for words, code in (
        (("--suite", "no-such"), 2),
        (("--case", "no-such"), 2),
        (("--gate", "no-such.toml"), 2),
        (("--output-dir", "full"), 2),
        (("--device", "gpu"), 2),
        (("--device", "cuda"), 4),
    ):
        done = cudadent42("run", "--on", "bench", *words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
    assert not bench.calls("compute", "instances", "start")
    assert starts.load() == ()


@pytest.mark.slow
def test_a_run_and_what_is_known_of_it(bench: Cloud, tmp_path: Path) -> None:
    done = cudadent42("run", "--on", "bench", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "on standard output\n"
    for line in (f"starting {BENCH}", f"{BENCH} answers", f"stopping {BENCH}", f"{BENCH} is stopped"):
        assert line in done.stderr.splitlines()
    assert (tmp_path / "here/arguments").exists()
    status = cudadent42("remote", "status", "bench", cwd=tmp_path)
    assert status.returncode == 4
    assert f"{BENCH} is stopped" in status.stderr


@pytest.mark.slow
def test_a_machine_that_is_not_stopped_is_an_error_of_a_run_that_passed(bench: Cloud, tmp_path: Path) -> None:
    bench.fails("compute instances stop", "permission")
    done = cudadent42("run", "--on", "bench", *SMALL, cwd=tmp_path)
    assert done.returncode == 4
    assert done.stdout == "on standard output\n"
    assert "gcloud compute instances stop bench" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_while_it_is_being_made_leaves_nothing(
    cloud: Cloud, tmp_path: Path, number: signal.Signals
) -> None:
    """The call of gcloud is waited for: an instance that was asked for halfway would be nobody's."""
    read_specification(tmp_path, machine_type="n2-standard-8")
    words = ("remote", "add", "n2", "--spec", "machine.toml", "--python", cloud.python())
    assert cudadent42(*words, cwd=tmp_path).returncode == 0
    cloud.fails("compute instances create", "", after=True, until="interrupted", exit=0)
    process = started("run", "--on", "n2", *SMALL, cwd=tmp_path)
    assert process.stderr is not None
    while not cloud.calls("compute", "instances", "create"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(number)
    assert any("waiting for gcloud, so that its outcome is known" in line for line in process.stderr)
    cloud.goes_on("interrupted")
    process.communicate()
    assert process.returncode == 130
    assert cloud.names() == []
    assert len(cloud.calls("compute", "instances", "delete")) == 1
    assert [start.outcome for start in starts.load()] == [StartOutcome.FAILED]


@pytest.mark.slow
def test_a_second_interrupt_leaves_what_may_come_to_be_on_record(cloud: Cloud, tmp_path: Path) -> None:
    read_specification(tmp_path, machine_type="n2-standard-8")
    words = ("remote", "add", "n2", "--spec", "machine.toml", "--python", cloud.python())
    assert cudadent42(*words, cwd=tmp_path).returncode == 0
    cloud.fails("compute instances create", "", until="never")
    process = started("run", "--on", "n2", *SMALL, cwd=tmp_path)
    assert process.stderr is not None
    while not cloud.calls("compute", "instances", "create"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert any("waiting for gcloud" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "it may still come to be; look with: cudadent42 remote status" in errors
    assert [start.outcome for start in starts.load()] == [StartOutcome.REQUESTED]
