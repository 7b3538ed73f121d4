"""What a candidate is shown of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudadent42.flows import sandboxing
from cudadent42.flows.sandboxing import limits_for


def shown(*files: Path) -> set[str]:
    return set(sandboxing._shown(files))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "home" / "kernels").mkdir(parents=True)
    return tmp_path / "home"


def test_what_lies_beside_a_candidate_is_shown_but_for_what_is_hidden_or_leads_away(home: Path) -> None:
    folder = home / "kernels"
    for name in ("mine.py", "helper.py", ".env"):
        (folder / name).touch()
    (home / "secret").touch()
    (folder / "link").symlink_to(home / "secret")
    (folder / "near").symlink_to(folder / "helper.py")
    assert shown(folder / "mine.py") == {str(folder / name) for name in ("mine.py", "helper.py", "near")}


def test_nothing_hidden_is_shown_of_folders_below_a_candidate_s(home: Path) -> None:
    folder = home / "kernels"
    for name in ("plain/deep/a.py", "other/.git/config", "other/b.py", "other/deep/.env", "other/deep/c.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "mine.py").touch()
    expected = {str(folder / name) for name in ("mine.py", "plain", "other/b.py", "other/deep/c.py")}
    assert shown(folder / "mine.py") == expected


def test_of_a_candidate_in_a_home_that_file_alone_is_shown(home: Path) -> None:
    for folder in (home, home.parent, home.parent / "elsewhere"):
        (folder / "mine.py").touch()
        (folder / "other.py").touch()
        assert shown(folder / "mine.py") == {str(folder / "mine.py")}


def test_neither_home_nor_the_current_folder_is_among_what_python_needs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home / "kernels")
    monkeypatch.syspath_prepend(str(home / "kernels"))
    monkeypatch.syspath_prepend(str(home))
    paths = set(sandboxing._python())
    assert str(home) not in paths
    assert str(home / "kernels") not in paths
    assert any(os.path.isfile(Path(path, "cudadent42", "__init__.py")) for path in paths)


def test_the_folder_of_the_compiler_that_is_named_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "toolchain" / "bin" / "c++-of-mine"
    compiler.parent.mkdir(parents=True)
    compiler.touch(mode=0o755)
    assert str(tmp_path / "toolchain") not in set(sandboxing._system())
    monkeypatch.setenv("CXX", f"{compiler} -pipe")
    assert str(tmp_path / "toolchain") in set(sandboxing._system())
    monkeypatch.setenv("CXX", "'not closed")
    assert str(tmp_path / "toolchain") not in set(sandboxing._system())


def test_addresses_are_bounded_on_the_cpu_alone() -> None:
    cpu, gpu = limits_for("cpu"), limits_for("cuda:0")
    assert cpu.address_bytes is not None
    assert cpu.address_bytes > cpu.memory_bytes
    assert gpu.address_bytes is None
    assert cpu.scratch_bytes <= cpu.memory_bytes


def test_a_run_on_the_cpu_has_no_device_files() -> None:
    assert sandboxing._devices("cpu") == ()
