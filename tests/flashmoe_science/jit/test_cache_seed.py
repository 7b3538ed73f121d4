"""A second cache that is read and never written: where the compile cache is a sandbox's own and begins empty."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from flashmoe_science.jit.cache import SEED_VARIABLE, Compilation, CompileCache
from flashmoe_science.jit.records import Recipe

RECIPE = Recipe(
    kernel="a_kernel",
    backend="host",
    architecture="any",
    configuration={"TILE": 16},
    compiler="a compiler",
    compiler_version="1",
    flags=("-O2",),
    sources={"a.cpp": "0" * 64},
)


def compile_to(path: Path) -> Compilation:
    path.write_bytes(b"compiled")
    return Compilation(log="a warning")


def never(path: Path) -> Compilation:
    raise AssertionError("compiled, though the seed has it")


@pytest.fixture
def seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "seed"
    CompileCache(folder).get_or_build(RECIPE, ".so", compile_to)
    monkeypatch.setenv(SEED_VARIABLE, str(folder))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_the_seed_has_is_copied_and_not_compiled(tmp_path: Path, seed: Path) -> None:
    before = contents(seed)
    cache = CompileCache(tmp_path / "own")
    build = cache.get_or_build(RECIPE, ".so", never)
    assert build.cached
    assert build.log == "a warning"
    assert build.artifact.parent == cache.directory
    assert cache.content(build.key) == b"compiled"
    assert contents(seed) == before


def test_a_copy_is_no_link(tmp_path: Path, seed: Path) -> None:
    build = CompileCache(tmp_path / "own").get_or_build(RECIPE, ".so", never)
    original = next(seed.glob("*.so"))
    assert not os.path.samefile(build.artifact, original)
    build.artifact.write_bytes(b"poisoned")
    assert original.read_bytes() == b"compiled"


def test_a_damaged_entry_of_the_seed_is_compiled(tmp_path: Path, seed: Path) -> None:
    next(seed.glob("*.so")).write_bytes(b"damaged")
    build = CompileCache(tmp_path / "own").get_or_build(RECIPE, ".so", compile_to)
    assert not build.cached


def test_what_the_seed_lacks_is_compiled_and_not_put_there(tmp_path: Path, seed: Path) -> None:
    before = contents(seed)
    other = replace(RECIPE, kernel="another")
    assert not CompileCache(tmp_path / "own").get_or_build(other, ".so", compile_to).cached
    assert contents(seed) == before


def test_a_seed_that_is_not_there_is_no_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, str(tmp_path / "none"))
    assert not CompileCache(tmp_path / "own").get_or_build(RECIPE, ".so", compile_to).cached
    assert not (tmp_path / "none").exists()
