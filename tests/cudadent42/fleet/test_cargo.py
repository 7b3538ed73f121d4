"""Which files of this machine travel with a task."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.base import parcels, trees
from cudadent42.base.errors import UsageError
from cudadent42.base.parcels import Parcel
from cudadent42.fleet import cargo
from cudadent42.fleet.cargo import Cargo, digests_of
from cudadent42.model.implementations import file_path
from cudadent42.model.records import Plan
from cudadent42.native import specification
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.versions.sources import check_folder, export, folder_of

KERNEL = (
    'schema_version = 1\nabi = 1\nname = "k"\nsource = "{source}"\nentry = "k"\noperation = "attention"\n'
    'dtypes = ["fp32"]\ncausal = true\ngrouped_heads = true\n'
)


def plan_of(*names: str) -> Plan:
    case = AttentionCase("c", "fp32", 1, 1, 1, 8, 8, 8)
    return Plan("unit", "cpu", (case,), names[0], names, repeats=4, warmup=0, seed=1)


def sent(*names: str) -> dict[str, dict[str, bytes]]:
    """The files of each path."""
    one = Cargo()
    return {each.name: unpacked(one.packed(each)) for each in one.of(plan_of("pytorch", *names))}


def unpacked(packed: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in files.items() if file is not None}


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    folder = tmp_path / "k"
    (folder / "sub").mkdir(parents=True)
    path = folder / "k.toml"
    path.write_text(KERNEL.format(source="k.cpp"))
    (folder / "k.cpp").write_text('#include "sub/a.h"\n#include <vector>\n#include "absent.h"\n')
    (folder / "sub/a.h").write_text('#include "b.h"\n')
    (folder / "sub/b.h").write_text("")
    (folder / "beside.h").write_text("")
    (folder / "notes.txt").write_text("private")
    (folder / "other.cpp").write_text("")
    return path


def test_names_of_no_files_need_none() -> None:
    assert Cargo().of(plan_of("pytorch", "cudadent42", "cudadent42[portable]")) == ()


def test_a_kernel_takes_along_what_it_is_compiled_from_and_no_more(kernel: Path) -> None:
    (files,) = sent(str(kernel)).values()
    assert files.keys() == {"k.toml", "k.cpp", "beside.h", "sub/a.h", "sub/b.h"}
    assert files["k.toml"] == kernel.read_bytes()


def test_a_source_that_includes_what_lies_above_keeps_its_place(kernel: Path) -> None:
    (kernel.parent / "k.cpp").write_text('#include "../common/c.h"\n')
    common = kernel.parent.parent / "common"
    common.mkdir()
    (common / "c.h").write_text("")
    one = Cargo()
    (parcel,) = one.of(plan_of(str(kernel)))
    assert parcel.entry == "k/k.toml"
    assert unpacked(one.packed(parcel)).keys() == {"k/k.toml", "k/k.cpp", "k/beside.h", "common/c.h"}


def test_a_configuration_of_a_tuning_finds_its_source_there(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file names the source by a path of this machine, and lies elsewhere."""
    arm = tmp_path / "tuning/arms/arm-1.toml"
    arm.parent.mkdir(parents=True)
    arm.write_text(
        KERNEL.format(source=kernel.parent / "k.cpp") + "\n[[configuration]]\nmacros = { BLOCK_M = 64 }\n"
    )
    one = Cargo()
    (parcel,) = one.of(plan_of(str(arm)))
    root = parcels.make(tmp_path / "parcels")
    monkeypatch.setenv(parcels.FOLDER_VARIABLE, str(root))
    parcels.place(parcel, one.packed(parcel), root)
    placed = specification.load(file_path(str(arm)))
    assert root in placed.source.parents
    assert placed.configurations[0].macros == {"BLOCK_M": 64}
    assert placed.source.read_bytes() == (kernel.parent / "k.cpp").read_bytes()
    assert str(tmp_path).encode() not in b"".join(unpacked(one.packed(parcel)).values())


def test_a_python_file_takes_along_what_it_imports_and_names(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'import math\nimport helper\nfrom package import x\nS = "k.cu"\nNOT = "../k.cu", "/etc/k.cu", "no.cu"\n'
    )
    (tmp_path / "helper.py").write_text('TEXT = "notes.txt"\nfrom . import further\n')
    (tmp_path / "further.py").write_text("")
    (tmp_path / "k.cu").write_text('#include "k.cuh"\n')
    (tmp_path / "package").mkdir()
    for name in ("k.cuh", "unused.py", "notes.txt", "package/__init__.py", "package/inner.py"):
        (tmp_path / name).write_text("")
    files = sent(f"{tmp_path}/mine.py:attention", f"{tmp_path}/mine.py:other")
    assert files.keys() == {f"{tmp_path}/mine.py"}
    (own,) = files.values()
    expected = {
        "mine.py",
        "helper.py",
        "further.py",
        "k.cu",
        "k.cuh",
        "package/__init__.py",
        "package/inner.py",
    }
    assert own.keys() == expected


def test_a_file_that_is_no_python_travels_alone_and_is_refused_where_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def (\n")
    (own,) = sent(f"{tmp_path}/mine.py:attention").values()
    assert own.keys() == {"mine.py"}


def test_what_is_edited_meanwhile_is_not_sent(kernel: Path) -> None:
    one = Cargo()
    (before,) = one.of(plan_of(str(kernel)))
    (kernel.parent / "sub/b.h").write_text("// edited\n")
    assert one.of(plan_of(str(kernel))) == (before,)
    assert unpacked(one.packed(before))["sub/b.h"] == b""
    (after,) = Cargo().of(plan_of(str(kernel)))
    assert after.digest != before.digest


def test_a_digest_is_of_contents_wherever_they_lie(kernel: Path, tmp_path: Path) -> None:
    (first,) = Cargo().of(plan_of(str(kernel)))
    kernel.parent.rename(tmp_path / "moved")
    (second,) = Cargo().of(plan_of(str(tmp_path / "moved/k.toml")))
    assert first.digest == second.digest
    assert digests_of([first, Parcel("0" * 64)]) == {str(kernel): first.digest}


def test_a_version_is_found_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "mine.py").write_text("def attention(): ...\n")
    version = export(str(tree), entry="mine.py:attention")
    one = Cargo()
    parcels_of_both = one.of(replace(plan_of("a", "b"), versions={"a": version, "b": version}))
    assert parcels_of_both == (Parcel(version.digest),)
    here = folder_of(version)
    root = parcels.make(tmp_path / "parcels")
    monkeypatch.setenv(parcels.FOLDER_VARIABLE, str(root))
    assert folder_of(version) == here
    parcels.place(parcels_of_both[0], one.packed(parcels_of_both[0]), root)
    there = folder_of(version)
    assert root in there.parents
    assert check_folder(there, version) == there
    assert trees.holds(there, version.digest)


def test_a_folder_of_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cargo, "MOST_BYTES", 100)
    (tmp_path / "mine.py").write_text('A, B = "a.h", "b.h"\n')
    for name in ("a.h", "b.h"):
        (tmp_path / name).write_text("x" * 60)
    with pytest.raises(UsageError, match="a kernel's sources are expected"):
        Cargo().of(plan_of(f"{tmp_path}/mine.py:attention"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file"):
        Cargo().of(plan_of(f"{tmp_path}/absent.py:attention"))


def test_modules_of_one_name_that_differ_are_refused(tmp_path: Path) -> None:
    """A worker would import the first for both, and race one file with the other's code."""
    for folder, text in (("a", "FACTOR = 1\n"), ("b", "FACTOR = 2\n"), ("c", "FACTOR = 1\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"import math, helper  # {folder}\n")
        (tmp_path / folder / "helper.py").write_text(text)
    names = {folder: f"{tmp_path / folder}/mine.py:attention" for folder in "abc"}
    assert sent(names["a"], names["c"]).keys() == {f"{tmp_path}/a/mine.py", f"{tmp_path}/c/mine.py"}
    one = Cargo()
    one.of(plan_of("pytorch", names["b"]))
    with pytest.raises(
        UsageError, match=r"a/mine\.py and \S+b/mine\.py import different modules named 'helper'"
    ):
        one.of(plan_of("pytorch", names["a"], names["b"]))
