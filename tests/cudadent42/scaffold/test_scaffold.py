"""What ``cudadent42 new`` writes verifies and races as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.scaffold import Kind, create

ROOT = Path(__file__).resolve().parents[3]
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUITE = """
name = "unit"
dtypes = ["fp32", "bf16"]
repeats = 4
warmup = 1
case = [{ name = "one", batch = 1, num_heads = 2, seqlen = 32, head_dim = 64 }]
"""


def cudadent42(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cudadent42", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def commands(folder: Path) -> list[list[str]]:
    """Those of the README, for a suite that takes seconds, without the gate."""
    text = (folder / "README.md").read_text()
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block
    lines = [line.split() for line in block[1].splitlines()]
    assert [line[:2] for line in lines] == [["cudadent42", word] for word in ("verify", "run", "run")]
    assert lines[2][-2:] == ["--gate", "gate.toml"]
    return [["unit.toml" if word == "small" else word for word in line[1:]] for line in lines]


@pytest.mark.parametrize("kind", [Kind.PYTHON, Kind.CPU])
def test_a_new_kernel_verifies_and_races_as_it_is(tmp_path: Path, kind: Kind) -> None:
    made = cudadent42("new", "my-kernel", "--kind", kind.value, "--json", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "my-kernel"
    assert {tmp_path / path for path in json.loads(made.stdout)["files"]} == set(folder.iterdir())
    (folder / "unit.toml").write_text(SUITE)
    verify, run, _ = commands(folder)
    done = cudadent42(*verify, "--device", "cpu", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    own = [item for item in report["cases"] if "my-kernel" in item["implementation"]]
    assert len(own) > 20
    assert not any("my-kernel" in key for key in report["skipped"])
    done = cudadent42(*run, "--device", "cpu", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert {row["dtype"] for row in results["cases"]} == {"fp32", "bf16"}
    assert "my-kernel" in results["candidate"]
    if kind is Kind.CPU:
        manifest = json.loads(next(folder.glob("runs/*/manifest.json")).read_text())
        assert {item["recipe"]["kernel"] for item in manifest["build"]["kernels"]} == {"my_kernel"}


@pytest.mark.gpu
def test_a_new_cuda_kernel_verifies_and_races_as_it_is(tmp_path: Path) -> None:
    (folder,) = {path.parent for path in create("my-kernel", Kind.CUDA, tmp_path)}
    (folder / "unit.toml").write_text(SUITE.replace('"fp32"', '"fp16"'))
    for command in commands(folder)[:2]:
        done = cudadent42(*command, folder=folder)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", Kind)
def test_files_are_filled_in(tmp_path: Path, kind: Kind) -> None:
    paths = create("a-b", kind, tmp_path)
    assert {"README.md", "gate.toml"} < {path.name for path in paths}
    for path in paths:
        text = path.read_text()
        assert "@" not in text.replace(" @ ", "")
        if path.suffix == ".toml":
            tomllib.loads(text)
    sources = [path for path in paths if path.suffix in (".cu", ".cpp")]
    assert all(" a_b(" in path.read_text() for path in sources)


@pytest.mark.parametrize("name", ["", "1a", "a/b", "../a", "a b", "a" * 49, "é"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a kernel"):
        create(name, Kind.CPU, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    create("mine", Kind.CPU, tmp_path)
    (tmp_path / "mine" / "mine.cpp").write_text("my work")
    with pytest.raises(UsageError, match="is not empty"):
        create("mine", Kind.CPU, tmp_path)
    assert (tmp_path / "mine" / "mine.cpp").read_text() == "my work"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="choose another --output-dir"):
        create("mine", Kind.CPU, tmp_path / "file")
