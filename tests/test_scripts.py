"""run.sh and test.sh: run for real, on Pythons that are there, broken, or missing something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script(
    path: Path, *arguments: str, cwd: Path | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDADENT42_")}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(path), *arguments],
        env=environment | changes,
        capture_output=True,
        text=True,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the scripts need of a checkout, in a folder whose name has a space."""
    folder = tmp_path / "a checkout"
    (folder / "scripts").mkdir(parents=True)
    for name in (
        "run.sh",
        "test.sh",
        "pyproject.toml",
        "constraints.txt",
        "scripts/environment.sh",
        "scripts/fetch_pip.py",
    ):
        shutil.copy(ROOT / name, folder / name)
    (folder / "src").symlink_to(ROOT / "src")
    return folder


def fake_python(path: Path, *modules: str) -> Path:
    """A Python of a good version in which only the given modules can be imported by ``-c 'import ...'``."""
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        + "".join(f'*"import {module}"*) exit 0 ;;\n' for module in ("sys; sys.exit", *modules))
        + '*"print("*) echo 3.12; exit 0 ;;\n'
        "--version) echo Python 3.12.0; exit 0 ;;\n"
        "esac\nexit 1\n"
    )
    path.chmod(0o755)
    return path


def test_a_python_that_is_brought_along_is_used_as_it_is(checkout: Path, tmp_path: Path) -> None:
    done = script(checkout / "run.sh", "--help", cwd=tmp_path, CUDADENT42_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "--suite" in done.stdout
    assert not (checkout / ".venv").exists()


def test_arguments_reach_the_command_unharmed(checkout: Path, tmp_path: Path) -> None:
    done = script(
        checkout / "run.sh", "--suite", "no such; suite", cwd=tmp_path, CUDADENT42_PYTHON=sys.executable
    )
    assert done.returncode == 2
    assert "'no such; suite'" in done.stderr


@pytest.mark.parametrize("variable", ["CUDADENT42_PYTHON", "CUDADENT42_BASE_PYTHON"])
def test_a_python_that_is_none(checkout: Path, variable: str) -> None:
    done = script(checkout / "run.sh", **{variable: "/bin/false"})
    assert done.returncode == 4
    assert f"{variable}=/bin/false is not a Python of 3.10 or newer" in done.stderr


def test_no_python_at_all(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cat", "cksum", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name}"))
    done = script(checkout / "run.sh", PATH=str(tools))
    assert done.returncode == 4
    assert "no Python of 3.10 or newer on PATH" in done.stderr
    assert "apt-get install" in done.stderr


def test_a_python_without_ensurepip_and_pip(checkout: Path, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python3", "venv")
    done = script(checkout / "run.sh", CUDADENT42_BASE_PYTHON=str(python))
    assert done.returncode == 4
    assert "has neither ensurepip nor pip" in done.stderr
    assert "sudo apt-get install python3.12-venv" in done.stderr


def test_a_python_without_venv(checkout: Path, tmp_path: Path) -> None:
    done = script(checkout / "run.sh", CUDADENT42_BASE_PYTHON=str(fake_python(tmp_path / "python3")))
    assert done.returncode == 4
    assert "lacks the module venv" in done.stderr
    assert "sudo apt-get install python3 python3-venv" in done.stderr


def test_the_tools_of_the_tests_are_asked_for(checkout: Path, tmp_path: Path) -> None:
    done = script(checkout / "test.sh", CUDADENT42_PYTHON=str(fake_python(tmp_path / "python3")))
    assert done.returncode == 4
    assert "pip install pytest" in done.stderr


def test_an_environment_that_is_up_to_date_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    python = fake_python(checkout / ".venv/bin/python", "pip")
    text = python.read_text()
    python.write_text(text.replace(" in\n", ' in\n"-m cudadent42 run"*) echo ran; exit 0 ;;\n', 1))
    sums = subprocess.run(
        "cat pyproject.toml constraints.txt | cksum", shell=True, cwd=checkout, capture_output=True, text=True
    )
    (checkout / ".venv/.stamp-run").write_text(f"{checkout} {sums.stdout.strip()}\n")
    done = script(checkout / "run.sh")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
    # A changed pin is not up to date; pip installs nothing here, and that is what is said.
    (checkout / "constraints.txt").write_text("torch==2.12.0\n")
    done = script(checkout / "run.sh")
    assert done.returncode == 4
    assert "pip could not install the packages" in done.stderr


def test_an_environment_that_was_cut_short_is_made_again(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    fake_python(checkout / ".venv/bin/python")  # no pip: stopped during ensurepip
    done = script(checkout / "run.sh", CUDADENT42_BASE_PYTHON=str(fake_python(tmp_path / "python3", "venv")))
    assert done.returncode == 4
    assert "has neither ensurepip nor pip" in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("  sudo apt-get")]


def test_a_python_by_relative_path(checkout: Path, tmp_path: Path) -> None:
    fake_python(tmp_path / "mine", "hypothesis", "pytest")
    done = script(checkout / "test.sh", cwd=tmp_path, CUDADENT42_PYTHON="./mine")
    assert "not found" not in done.stderr
    assert done.returncode == 1  # what this Python answers to -m pytest


@pytest.mark.net
@pytest.mark.slow
def test_two_commands_from_nothing(tmp_path: Path) -> None:
    checkout = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    done = script(checkout / "run.sh", "--suite", "small", "--case", "tiny", "--repeats", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").exists()
