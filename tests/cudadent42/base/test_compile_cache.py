"""The compile cache is emptied, and closed first where other users could write to it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cudadent42.base.compile_cache import empty_cache, entries
from flashmoe_science.errors import DeviceError
from flashmoe_science.jit.cache import Compilation, default_cache
from flashmoe_science.jit.private_directory import OpenToOthersError
from flashmoe_science.jit.records import Recipe


def compile_to(path: Path) -> Compilation:
    path.write_bytes(b"artifact")
    return Compilation()


def test_an_open_cache_is_closed_and_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(folder))
    recipe = Recipe("probe", "host", "x86-64", {}, "g++", "12", (), {})
    default_cache().get_or_build(recipe, ".so", compile_to)
    default_cache().tool_directory("zig")
    folder.chmod(0o777)
    planted = folder / ("ab" * 32 + ".so")
    planted.symlink_to("/etc/passwd")
    with pytest.raises(OpenToOthersError, match="cudadent42 cache clear"):
        default_cache()
    directory, cleared = empty_cache()
    assert directory == folder
    assert cleared.entries == 1
    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Path("/etc/passwd").exists()
    assert entries(default_cache()) == []


def test_an_open_folder_with_other_files_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLASHMOE_CACHE_DIR=/tmp, as root: nothing is closed or removed."""
    tmp_path.chmod(0o1777)
    (tmp_path / "thesis.tex").write_text("")
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path))
    with pytest.raises(DeviceError, match=r"holds what is not the compile cache's \('thesis.tex'\)"):
        empty_cache()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
