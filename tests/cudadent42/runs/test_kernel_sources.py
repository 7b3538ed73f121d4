"""Which state of whose code was raced, with real repositories and files."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.model.records import Plan, Version
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.runs.kernel_sources import KernelSource, of_plan
from cudadent42.scaffold import Kind, create

CASE = AttentionCase("tiny", "fp32", 1, 1, 1, 16, 16, 32)
PLAN = Plan("unit", "cpu", (CASE,), "pytorch", ("pytorch", "cudadent42"), repeats=3, warmup=0, seed=7)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def source_of(name: str) -> KernelSource:
    return of_plan(replace(PLAN, implementations=("pytorch", name)))[name]


def test_ours_and_pytorch_have_none_of_their_own() -> None:
    assert of_plan(PLAN) == {}


def test_the_files_of_a_race_are_its_versions() -> None:
    versions = {"a": Version("main", "c" * 40, "d" * 64), "b": Version("WORKTREE", "", "e" * 64)}
    sources = of_plan(replace(PLAN, baseline="a", implementations=("a", "b"), versions=versions))
    assert [its.label for its in sources.values()] == ["cccccccc", "file eeeeeeee"]


@pytest.mark.parametrize(("kind", "suffix"), [(Kind.CPU, ".toml"), (Kind.PYTHON, ".py:attention")])
def test_a_kernel_of_ones_own_in_a_repository_and_outside(tmp_path: Path, kind: Kind, suffix: str) -> None:
    folder = create("mine", kind, tmp_path)[0].parent
    name = f"{folder}/mine{suffix}"
    outside = source_of(name)
    assert (outside.commit, outside.label) == ("", f"file {outside.digest[:8]}")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    committed = source_of(name)
    assert committed == KernelSource(git(tmp_path, "rev-parse", "HEAD"), outside.digest)
    assert committed.label == committed.commit[:8]
    file = folder / ("mine.cpp" if kind is Kind.CPU else "mine.py")
    file.write_text(file.read_text() + "\n")
    changed = source_of(name)
    assert changed.commit == ""
    assert changed.digest != outside.digest


def test_a_header_beside_a_kernel_is_part_of_it(tmp_path: Path) -> None:
    folder = create("mine", Kind.CPU, tmp_path)[0].parent
    before = source_of(f"{folder}/mine.toml")
    (folder / "tiles.h").write_text("#define TILE 64\n")
    assert source_of(f"{folder}/mine.toml").digest != before.digest


def test_a_file_that_is_gone_is_somebody_elses_to_report(tmp_path: Path) -> None:
    assert of_plan(replace(PLAN, implementations=("pytorch", f"{tmp_path}/gone.py:attention"))) == {}
