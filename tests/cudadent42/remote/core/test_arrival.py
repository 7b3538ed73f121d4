"""What comes back: on the disk before anything is removed there, and never more than is taken."""

from __future__ import annotations

import errno
import gzip
import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sshd import Server

from cudadent42.base import archives
from cudadent42.base.errors import LabError
from cudadent42.remote.core import arrival, record
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import bring_back, copies_of, give_up, workspace_of

JOB = "job-1"


def put_there(server: Server) -> Path:
    """A run that has ended."""
    job = server.folder / "home/cudadent42-remote/jobs" / JOB
    (job / "run/profile/deep").mkdir(parents=True)
    for name in ("run/samples.csv", "run/profile/deep/report.json", "log", "out", "exit"):
        (job / name).write_text("0\n")
    return job


def begun(folder: Path) -> JobRecord:
    started = JobRecord(JOB, "there", str(folder / "runs/mine"), (), "2026-11-01T12:00:00+00:00")
    record.save(started)
    return started


def back(server: Server, started: JobRecord) -> Path:
    workspace = workspace_of(Remote("there", parse(server.address)))
    return bring_back(workspace, started, lambda line: None, lambda chunk: None).folder


def test_all_of_it_is_on_the_disk_before_it_is_removed_there(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_there(server)
    target = tmp_path / "runs/mine"
    flushed: list[tuple[int, bool]] = []
    forget, fsync = jobs.forget, os.fsync

    def noted(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_ino, target.exists()))
        fsync(descriptor)

    def forget_last(workspace: jobs.Workspace, job: str) -> None:
        contents = {path.stat().st_ino: path for path in [target, *target.rglob("*")]}
        assert [path.name for number, path in contents.items() if number not in dict(flushed)] == []
        assert (target.parent.stat().st_ino, True) in flushed  # its name, once it had it
        assert (target.stat().st_ino, True) in flushed  # the log came into it by another move
        forget(workspace, job)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(jobs, "forget", forget_last)
    assert back(server, begun(tmp_path)) == target
    assert {path.name for path in target.iterdir()} == {"samples.csv", "profile", "remote.log"}
    assert not list((server.folder / "home/cudadent42-remote/jobs").iterdir())


def test_a_copy_whose_place_is_taken_is_kept_and_can_be_given_up_again(tmp_path: Path) -> None:
    """It is all that is left of a run whose machine is gone."""
    started = begun(tmp_path)
    copied, target = copies_of(started), Path(started.output)
    (copied / "run").mkdir(parents=True)
    (copied / "run/samples.csv").write_text("1\n")
    (copied / "log").write_text("measuring\n")
    (copied / "out").write_text("")
    target.mkdir()
    (target / "somebody's").write_text("")
    for _ in range(2):
        with pytest.raises(LabError, match="cannot be kept"):
            give_up(started)
    (target / "somebody's").unlink()
    assert give_up(started) == target
    assert (target / "samples.csv").read_text() == "1\n"
    assert (target / "remote.log").read_text() == "measuring\n"
    assert record.find(started.job).fetched
    assert not copied.exists()


@pytest.mark.parametrize("moved", ["log", "all but what it printed"])
def test_a_copy_that_was_being_moved_when_this_process_was_killed(tmp_path: Path, moved: str) -> None:
    started = begun(tmp_path)
    copied, target = copies_of(started), Path(started.output)
    run = copied / "run" if moved == "log" else target
    copied.mkdir(parents=True)
    run.mkdir(parents=True)
    (run / "samples.csv").write_text("1\n")
    (run / "remote.log").write_text("measuring\n")
    (copied / "out").write_text("")
    assert give_up(started) == target
    assert (target / "samples.csv").read_text() == "1\n"
    assert record.find(started.job).fetched
    assert not copied.exists()


def test_what_the_disk_does_not_take_stays_there(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may say only at the flush that it is full or broken."""
    job = put_there(server)
    started = begun(tmp_path)
    fsync = os.fsync

    def broken(descriptor: int) -> None:
        if "samples.csv" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(LabError, match=r"cannot be kept in .*Input/output error; mend that, then attach"):
            back(server, started)
    assert (job / "run/samples.csv").exists()
    assert not record.find(JOB).fetched
    assert (back(server, started) / "samples.csv").read_text() == "0\n"


def many_files(job: Path) -> None:
    for number in range(20):
        (job / f"run/{number}").write_text("")


def a_large_file(job: Path) -> None:
    (job / "run/large").write_bytes(b"x" * 100_000)


@pytest.mark.parametrize(
    ("limit", "most", "fill", "words"),
    [
        ("MOST_FILES", 20, many_files, "more than 20 files"),
        ("MOST_BYTES", 50_000, a_large_file, "more than .* GiB"),
    ],
)
def test_more_than_is_taken_is_left_there(
    limit: str,
    most: int,
    fill: Callable[[Path], None],
    words: str,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = put_there(server)
    fill(job)
    started = begun(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(arrival, limit, most)
        with pytest.raises(LabError, match=rf"holds {words} on there.*/jobs/{JOB} there.* attach {JOB}$"):
            back(server, started)
    assert list((tmp_path / "runs").iterdir()) == []  # nor is half of it kept here
    assert (job / "run/samples.csv").exists()
    assert not record.find(JOB).fetched
    assert (back(server, started) / "samples.csv").exists()


def test_pythons_without_extraction_filters_bring_a_run_back_too(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.10.0 to 3.10.11 and 3.11.0 to 3.11.3, Debian 12's among them."""
    put_there(server)
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    assert (back(server, begun(tmp_path)) / "samples.csv").read_text() == "0\n"


def test_a_sparse_file_counts_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is small in the archive, and would not be here for a program that copies it."""
    (tmp_path / JOB).mkdir()
    with (tmp_path / JOB / "log").open("wb") as file:
        file.truncate(1 << 30)
    packed = tmp_path / "packed.tar"
    subprocess.run(["tar", "-C", str(tmp_path), "--sparse", "-cf", str(packed), JOB], check=True)
    assert packed.stat().st_size < 1 << 20
    monkeypatch.setattr(arrival, "MOST_BYTES", 1 << 20)
    with pytest.raises(archives.TooMuchError):
        arrival.unpack(packed, JOB, tmp_path / "unpacked")


def test_a_compressed_archive_is_none(tmp_path: Path) -> None:
    """A few kilobytes of one are gigabytes."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        tar.addfile(directory(JOB))
    packed = tmp_path / "packed.tar"
    packed.write_bytes(gzip.compress(plain.getvalue()))
    with pytest.raises(archives.DamagedError):
        arrival.unpack(packed, JOB, tmp_path / "unpacked")


def directory(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = tarfile.DIRTYPE
    member.mode = 0o755
    return member


@pytest.fixture(scope="module")
def archive_of_a_job() -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(directory(JOB))
        for name in ("log", "a name of ümlauts", "n" * 120):
            member = tarfile.TarInfo(f"{JOB}/{name}")
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    return plain.getvalue()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=12)), max_size=4))
def test_a_damaged_archive_is_an_error_in_words(
    changes: list[tuple[int, bytes]], archive_of_a_job: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever bytes come, they are unpacked below the folder or refused."""
    folder = tmp_path_factory.mktemp("arrival")
    content = bytearray(archive_of_a_job)
    for index, other in changes:
        start = index % len(content)
        content[start : start + len(other)] = other
    packed = folder / "packed.tar"
    packed.write_bytes(content)
    with suppress(LabError, OSError):  # what the caller has words for
        arrival.unpack(packed, JOB, folder / "unpacked")
    assert {path.name for path in folder.iterdir()} <= {"packed.tar", "unpacked"}
