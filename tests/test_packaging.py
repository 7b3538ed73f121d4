"""The wheel: pure Python, with the kernels and everything else that is read at run time inside."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cudadent42.version import __version__

ROOT = Path(__file__).resolve().parents[1]
DATA_SUFFIXES = (".cpp", ".h", ".cu", ".cuh", ".toml", ".j2", ".css", ".typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building the wheel offline needs hatchling and pip; ./test.sh installs them")
    return built_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def built_wheel(source: Path, folder: Path) -> Path:
    """Of a checkout or a source archive."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


def test_the_wheel_runs_on_any_platform(wheel: Path) -> None:
    assert wheel.name == f"cudadent42-{__version__}-py3-none-any.whl"
    # Text alone, so it installs in seconds. The kernels' part is what everybody downloads for.
    assert wheel.stat().st_size < 2_060_000
    with zipfile.ZipFile(wheel) as archive:
        kernels = [
            each.compress_size for each in archive.infolist() if each.filename.startswith("flashmoe_science/")
        ]
    assert sum(kernels) < 820_000


def test_the_wheel_is_packed_as_tightly_as_deflate_can(wheel: Path) -> None:
    """By the build hook, tools/wheel_hook.py: hatchling packs with zlib's default level."""
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        for each in archive.infolist():
            content = archive.read(each)
            pack = zlib.compressobj(9, zlib.DEFLATED, -15)  # as a file of a zip: without a header
            assert each.compress_size == len(pack.compress(content) + pack.flush()), each.filename
            assert each.compress_type == zipfile.ZIP_DEFLATED  # PyPI takes no other


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
        "--no-compile",  # of 800 modules it imports few
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


class Environment:
    """An environment with the wheel and, by link, what it requires: as after an installation, without an index."""

    def __init__(self, folder: Path, wheel: Path, extras: tuple[str, ...]) -> None:
        self.folder = folder
        self.python = folder / "env/bin/python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run([*pip, "--quiet", str(wheel)], check=True, capture_output=True)
        (site,) = (folder / "env/lib").glob("python*/site-packages")
        for name in required(wheel, extras):
            for file in importlib.metadata.files(name) or ():
                top = file.parts[0]
                if top not in ("..", "__pycache__") and not (site / top).exists():
                    (site / top).symlink_to(importlib.metadata.distribution(name).locate_file(top))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [str(self.python), *arguments], env=environment, cwd=self.folder, capture_output=True, text=True
        )


def required(wheel: Path, extras: tuple[str, ...]) -> list[str]:
    """Distributions that an installation of the wheel brings, and what those require in their turn."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    lines = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    waiting = [(line.partition(": ")[2], ("", *extras)) for line in lines]
    chosen: dict[str, None] = {}
    while waiting:
        text, wanted = waiting.pop()
        requirement = Requirement(text)
        needed = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in wanted)
        if not needed or requirement.name in chosen:
            continue
        chosen[requirement.name] = None
        own = ("", *requirement.extras)
        try:
            waiting += [(each, own) for each in importlib.metadata.requires(requirement.name) or []]
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{requirement.name} is not installed here; without a network it cannot be had")
    return list(chosen)


KERNELS = (
    "import importlib.util, torch, flashmoe_science as f\n"
    "q = torch.randn(1, 2, 8, 32)\n"
    "assert torch.allclose(f.flash_attention(q, q, q), "
    "torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-5)\n"
    "x, w13, w2 = torch.randn(3, 32), torch.randn(2, 128, 32), torch.randn(2, 32, 64)\n"
    "weights, experts = torch.tensor([[0.25, 0.75]] * 3), torch.tensor([[1, 0]] * 3, dtype=torch.int32)\n"
    "def expert(e):\n"
    "    gate, up = (x @ w13[e].T).chunk(2, dim=1)\n"
    "    return (torch.nn.functional.silu(gate) * up) @ w2[e].T\n"
    "assert torch.allclose(f.fused_moe(x, w13, w2, weights, experts), "
    "0.25 * expert(1) + 0.75 * expert(0), rtol=1e-4, atol=1e-3)\n"
    "lab = ('typer', 'rich', 'matplotlib', 'scipy', 'sqlalchemy')\n"
    "print([name for name in lab if importlib.util.find_spec(name)])\n"
)


@pytest.mark.slow
def test_an_environment_with_the_wheel_alone_has_the_kernels_and_nothing_of_the_lab(
    wheel: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path, wheel, ())
    done = environment.run("-c", KERNELS)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    lab = environment.run("-m", "cudadent42", "run")
    assert lab.returncode == 4
    assert "lacks typer" in lab.stderr


@pytest.mark.slow
def test_an_environment_with_the_extra_has_the_lab(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path, wheel, ("lab",))
    done = environment.run("-m", "cudadent42", "implementations", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    assert '"cudadent42"' in done.stdout
    race = (
        "run",
        "--suite",
        "small",
        "--case",
        "tiny",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--repeats",
        "3",
    )
    done = environment.run("-m", "cudadent42", *race, "--ignore-preflight", "--output-dir", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == "run"
    assert (tmp_path / "run/report.html").exists()


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """So what installs from it has all that the wheel has."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    again = built_wheel(archive, tmp_path / "again")
    assert again.name == wheel.name
    first, second = (zipfile.ZipFile(each) for each in (wheel, again))
    assert second.namelist() == first.namelist()
    assert [name for name in first.namelist() if first.read(name) != second.read(name)] == []


def test_both_packages_say_that_they_are_typed(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {"flashmoe_science/py.typed", "cudadent42/py.typed"} <= inside
