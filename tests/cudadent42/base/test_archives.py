"""Archives from a stranger: files and folders below one folder, or an error in words."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cudadent42.base import archives
from cudadent42.base.archives import DamagedError, Limits, TooMuchError

LIMITS = Limits(most_bytes=1 << 20, most_files=100)


def entry(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, len(content)
    return member, content


def pack(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for member, content in entries:
            tar.addfile(member, io.BytesIO(content))
    return path


def test_files_folders_and_who_may_execute_them(tmp_path: Path) -> None:
    script, content = entry("job/run/script", b"#!/bin/sh\n")
    script.mode = 0o4777
    packed = pack(
        tmp_path / "a.tar",
        entry("job/", kind=tarfile.DIRTYPE),
        (script, content),
        entry("job/" + "n" * 200, b"x" * 70_000),
    )
    archives.unpack(packed, tmp_path / "new", LIMITS)
    assert (tmp_path / "new/job" / ("n" * 200)).read_bytes() == b"x" * 70_000
    assert (tmp_path / "new/job/run/script").stat().st_mode & 0o7133 == 0o0111
    assert os.access(tmp_path / "new/job/run/script", os.X_OK)


def test_a_python_whose_tarfile_knows_no_filter_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.10.0 to 3.10.11 and 3.11.0 to 3.11.3, as Debian 12 has: a run that was paid for stayed elsewhere."""
    for name in ("data_filter", "tar_filter", "fully_trusted_filter"):
        monkeypatch.delattr(tarfile, name, raising=False)
    for name in ("extractall", "extract", "extraction_filter"):
        monkeypatch.delattr(tarfile.TarFile, name, raising=False)
    packed = pack(tmp_path / "a.tar", entry("job/", kind=tarfile.DIRTYPE), entry("job/file", b"x"))
    archives.unpack(packed, tmp_path / "new", LIMITS)
    assert (tmp_path / "new/job/file").read_bytes() == b"x"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "job/../../x", "job/" + "n" * 256])
def test_nothing_lies_outside(tmp_path: Path, name: str) -> None:
    packed = pack(tmp_path / "a.tar", entry(name, b"x"))
    with pytest.raises(DamagedError):
        archives.unpack(packed, tmp_path / "new", LIMITS)
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar", "new"}


def test_links_and_devices_are_left_out_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    packed = pack(
        tmp_path / "a.tar",
        entry("job", kind=tarfile.SYMTYPE, link=str(tmp_path / "target")),
        entry("job/file", b"x"),
        entry("hard", kind=tarfile.LNKTYPE, link="/etc/passwd"),
        entry("pipe", kind=tarfile.FIFOTYPE),
        entry("device", kind=tarfile.CHRTYPE),
    )
    archives.unpack(packed, tmp_path / "new", LIMITS)
    assert [path.name for path in (tmp_path / "new").rglob("*")] == ["job", "file"]
    assert not list((tmp_path / "target").iterdir())


def test_no_more_than_the_limits(tmp_path: Path) -> None:
    too_many = pack(tmp_path / "many.tar", *(entry(f"{n}") for n in range(101)))
    too_large = pack(tmp_path / "large.tar", *(entry(f"{n}", b"x" * 600_000) for n in range(2)))
    deep, _ = entry("/".join(["d"] * 1500) + "/file")
    too_deep = pack(tmp_path / "deep.tar", (deep, b""))
    for number, packed in enumerate((too_many, too_large, too_deep)):
        with pytest.raises(TooMuchError, match="more than"):
            archives.unpack(packed, tmp_path / f"new{number}", LIMITS)


def test_a_sparse_file_of_200_gigabytes(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(200 << 30)
    packed = tmp_path / "a.tar"
    subprocess.run(["tar", "-C", str(tmp_path), "--sparse", "-cf", str(packed), "sparse"], check=True)
    with pytest.raises(TooMuchError):
        archives.unpack(packed, tmp_path / "new", Limits(8 << 30, 100))


def test_a_sparse_file_is_left_out(tmp_path: Path) -> None:
    """Also within the limits: a file with holes is nothing that a run leaves."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    (tmp_path / "plain").write_text("x")
    packed = tmp_path / "a.tar"
    command = ["tar", "-C", str(tmp_path), "--sparse", "-cf", str(packed), "sparse", "plain"]
    subprocess.run(command, check=True)
    archives.unpack(packed, tmp_path / "new", Limits(8 << 30, 100))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plain"]


def header(kind: bytes, size: int) -> bytes:
    member = tarfile.TarInfo("name")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_takes_no_memory_to_speak_of(tmp_path: Path, kind: bytes) -> None:
    """In a process of its own, which may have 300 MB more than it begins with."""
    packed = tmp_path / "a.tar"
    with packed.open("wb") as file:
        file.write(header(kind, 4 << 30))
        file.truncate((4 << 30) + 2048)
    script = (
        "import resource, sys; from pathlib import Path; from cudadent42.base import archives\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000,) * 2)\n"
        "try: archives.unpack(Path(sys.argv[1]), Path(sys.argv[2]), archives.Limits(8 << 30, 100))\n"
        "except archives.DamagedError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(packed), str(tmp_path / "new")], capture_output=True, text=True
    )
    assert "a header of" in done.stdout, done.stderr


def test_headers_of_headers_without_end(tmp_path: Path) -> None:
    packed = tmp_path / "a.tar"
    packed.write_bytes(header(tarfile.XHDTYPE, 0) * 5000)
    with pytest.raises(DamagedError):
        archives.unpack(packed, tmp_path / "new", LIMITS)


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    packed = pack(tmp_path / "a.tar", entry("file", b"x" * 50_000))
    os.truncate(packed, 20_000)
    with pytest.raises(DamagedError):
        archives.unpack(packed, tmp_path / "new", LIMITS)
