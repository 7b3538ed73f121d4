"""The wheel: pure Python, with the kernels and everything else that is read at run time inside."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA_SUFFIXES = (".cpp", ".h", ".cu", ".cuh", ".toml", ".j2", ".css", ".typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building the wheel offline needs hatchling and pip; ./test.sh installs them")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


def test_the_wheel_runs_on_any_platform(wheel: Path) -> None:
    assert wheel.name == "cudadent42-0.1.0-py3-none-any.whl"
    assert wheel.stat().st_size < 1_000_000


def test_the_wheel_holds_every_file_that_is_read_at_run_time(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    data = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in DATA_SUFFIXES}
    code = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert "cudadent42/suites/default.toml" in data
    assert "flashmoe_science/kernels/cpu/attention_forward.cpp" in data
    assert data | code <= inside
    assert not any(name.startswith("tests/") for name in inside)


def test_the_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--target",
        str(site),
    ]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    script = (
        "import cudadent42, sys; from pathlib import Path\n"
        f"assert Path(cudadent42.__file__).is_relative_to({str(site)!r}), cudadent42.__file__\n"
        "from cudadent42.suites.loader import load_suite; assert len(load_suite('default').shapes) == 12\n"
        "from cudadent42.runs.source import revision; assert revision() is None\n"
        "from flashmoe_science import cpu; assert cpu.build()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=site
    )
    assert done.returncode == 0, done.stderr


def test_torch_is_pinned_in_one_place() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch")]
    assert len(pins) == 1
    assert pins[0].startswith("torch==")
    assert '"torch>=2.10"' in (ROOT / "pyproject.toml").read_text()
