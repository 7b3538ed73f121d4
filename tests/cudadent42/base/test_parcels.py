"""Files that were sent to this machine: what is placed, what is refused, and what is found again."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path

import pytest

from cudadent42.base import parcels, trees
from cudadent42.base.archives import DamagedError
from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.parcels import Parcel

FILES = {"k.cpp": b"int k;\n", "sub/k.h": b"#pragma once\n"}
PARCEL = Parcel(trees.digest_of(FILES), "/elsewhere/k.toml", "k.cpp")


def packed(files: dict[str, bytes], **kinds: bytes) -> bytes:
    """An archive; ``kinds`` are types of members by name, such as links, which lead to /etc/passwd."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, kind in kinds.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    return out.getvalue()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = parcels.make(tmp_path / "parcels")
    monkeypatch.setenv(parcels.FOLDER_VARIABLE, str(made))
    return made


def left_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_was_sent_stands_for_the_path_that_it_was_sent_for(root: Path) -> None:
    parcels.place(PARCEL, packed(FILES), root)
    parcels.check(PARCEL)
    path = parcels.path_of("/elsewhere/k.toml")
    assert path is not None
    assert path.read_bytes() == FILES["k.cpp"]
    assert (path.parent / "sub/k.h").read_bytes() == FILES["sub/k.h"]
    assert parcels.path_of("/elsewhere/other.toml") is None
    tree = parcels.tree_of(PARCEL.digest)
    assert tree is not None
    assert trees.holds(tree, PARCEL.digest)


def test_the_folder_is_this_users_alone(tmp_path: Path) -> None:
    (tmp_path / "parcels").mkdir(mode=0o777)
    root = parcels.make(tmp_path / "parcels")
    for folder in (root, *(each for each in root.iterdir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_is_looked_for_where_nobody_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(parcels.FOLDER_VARIABLE, raising=False)
    assert parcels.path_of("/elsewhere/k.toml") is None
    assert parcels.tree_of(PARCEL.digest) is None
    with pytest.raises(UsageError, match="was not sent here"):
        parcels.check(PARCEL)
    monkeypatch.setenv(parcels.FOLDER_VARIABLE, "relative")  # of whatever folder a process is in
    assert parcels.folder() is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        packed({"k.cpp": b"int other;\n", "sub/k.h": FILES["sub/k.h"]}),
        packed({"k.cpp": FILES["k.cpp"]}),
        packed({**FILES, "more.h": b""}),
        packed({**FILES, "../outside": b"x"}),
        packed({**FILES, "/tmp/outside": b"x"}),
        packed({"k.cpp": FILES["k.cpp"]}, **{"sub/k.h": tarfile.SYMTYPE}),
        packed({"k.cpp": FILES["k.cpp"]}, **{"sub/k.h": tarfile.LNKTYPE}),
        packed({"sub/k.h": FILES["sub/k.h"]}, **{"k.cpp": tarfile.FIFOTYPE}),
        packed(FILES)[:700],
    ],
)
def test_what_is_not_what_its_digest_is_of_is_refused_and_leaves_nothing(
    root: Path, tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(LabError):
        parcels.place(PARCEL, content, root)
    assert left_in(tmp_path) == set()
    assert parcels.path_of(PARCEL.name) is None


@pytest.mark.parametrize("digest", ["", "../../outside", "/tmp/outside", "x" * 64, "A" * 64, "a" * 63])
def test_a_digest_is_no_path(root: Path, tmp_path: Path, digest: str) -> None:
    with pytest.raises(DamagedError, match="expected a SHA-256"):
        parcels.place(Parcel(digest, "k", "k.cpp"), packed(FILES), root)
    assert left_in(tmp_path) == set()
    assert parcels.tree_of(digest) is None


@pytest.mark.parametrize("entry", ["", "absent", "sub", "../names", "/etc/passwd", "sub/../k.cpp"])
def test_an_entry_is_a_file_of_the_parcel(root: Path, entry: str) -> None:
    with pytest.raises(DamagedError, match="is no file of it"):
        parcels.place(Parcel(PARCEL.digest, "k", entry), packed(FILES), root)
    assert parcels.path_of("k") is None


@pytest.mark.parametrize("name", ["../../outside.toml", "/etc/passwd", "a\nb.toml", "ü" * 300, "~/k.toml"])
def test_a_name_is_any_text_and_leads_nowhere_else(root: Path, tmp_path: Path, name: str) -> None:
    parcels.place(Parcel(PARCEL.digest, name, "k.cpp"), packed(FILES), root)
    path = parcels.path_of(name)
    assert path is not None
    assert root in path.parents
    assert all(each.startswith("parcels/") for each in left_in(tmp_path))


def test_files_that_changed_since_are_not_raced(root: Path) -> None:
    parcels.place(PARCEL, packed(FILES), root)
    parcels.check(PARCEL)  # of an earlier task of the same worker
    assert parcels.path_of(PARCEL.name) is not None
    (root / "trees" / PARCEL.digest / "sub/k.h").write_text("#pragma twice\n")
    with pytest.raises(UsageError, match="something has changed them since; start the same command again"):
        parcels.path_of(PARCEL.name)
    with pytest.raises(UsageError, match="something has changed them since"):
        parcels.check(PARCEL)


def test_another_parcel_for_the_same_path_is_not_the_one_that_a_task_names(root: Path) -> None:
    parcels.place(PARCEL, packed(FILES), root)
    other = {"k.cpp": b"int other;\n"}
    newer = Parcel(trees.digest_of(other), PARCEL.name, "k.cpp")
    parcels.place(newer, packed(other), root)
    parcels.check(newer)
    with pytest.raises(UsageError, match="was not sent here"):
        parcels.check(PARCEL)


def test_what_is_there_already_is_not_unpacked_again(root: Path) -> None:
    parcels.place(PARCEL, packed(FILES), root)
    again = Parcel(PARCEL.digest, "/elsewhere/again.toml", "sub/k.h")
    parcels.place(again, b"", root)  # its files came with the first
    parcels.check(again)
