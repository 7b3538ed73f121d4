"""requirements/*.txt: what pyproject.toml asks for, by hash, on every Python and machine, in one set of versions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
HERE = {**default_environment(), "extra": ""}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
PLATFORMS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.{patch}",
        "platform_machine": machine,
        "sys_platform": sys_platform,
        "platform_system": system,
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    for python, patch, (sys_platform, system, machine) in product(
        ("3.10", "3.11", "3.12", "3.13", "3.14"),
        (0, 4),
        (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64")),
    )
]
AGAIN = "run tools/lock.py"


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    specification = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def pins(lock: ModuleType, path: Path) -> list[Requirement]:
    return [Requirement(pin) for pin in lock.packages(path.read_text())]


def version(pin: Requirement) -> str:
    [specifier] = pin.specifier
    assert specifier.operator == "==", f"{pin}: {AGAIN}"
    return specifier.version


def holds(requirement: Requirement, where: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**HERE, **where})


def wanted(lock: ModuleType) -> dict[str, list[str]]:
    torch = lock.torch_pin()
    return {**lock.groups(), "torch": [torch], "torch-cpu": [torch]}


def test_there_is_a_file_for_each_group(lock: ModuleType) -> None:
    assert {path.stem for path in FILES} == set(wanted(lock)), AGAIN


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_package_has_hashes(lock: ModuleType, path: Path) -> None:
    for pin, text in lock.packages(path.read_text()).items():
        assert HASH.search(text), pin
    assert "://" not in path.read_text(), "an index is the user's choice"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_pyproject_asks_for_is_pinned_everywhere(lock: ModuleType, path: Path) -> None:
    """Once for each Python and machine, and in a version that it allows."""
    pinned = pins(lock, path)
    for where in PLATFORMS:
        names = [canonicalize_name(pin.name) for pin in pinned if holds(pin, where)]
        assert len(names) == len(set(names)), where
        for text in wanted(lock)[path.stem]:
            requirement = Requirement(text)
            if not holds(requirement, where):
                continue
            versions = [
                version(pin)
                for pin in pinned
                if canonicalize_name(pin.name) == canonicalize_name(requirement.name) and holds(pin, where)
            ]
            assert versions, f"{path.name} lacks {requirement} for {where}: {AGAIN}"
            assert requirement.specifier.contains(versions[0].partition("+")[0]), f"{requirement}: {AGAIN}"


@pytest.mark.parametrize("build", ["torch", "torch-cpu"])
def test_the_files_agree_and_are_complete(lock: ModuleType, build: str) -> None:
    """One version of each package on each platform; and what an installed one of that version requires is there."""
    paths = [path for path in FILES if not path.stem.startswith("torch") or path.stem == build]
    everything = [pin for path in paths for pin in pins(lock, path)]
    for where in PLATFORMS:
        versions: dict[str, set[str]] = {}
        for pin in everything:
            if holds(pin, where):
                versions.setdefault(canonicalize_name(pin.name), set()).add(version(pin))
        assert {name: several for name, several in versions.items() if len(several) > 1} == {}, AGAIN
    here = {canonicalize_name(pin.name): version(pin) for pin in everything if holds(pin, {})}
    for name, pinned in here.items():
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.version != pinned:
            continue
        for text in installed.requires or ():
            required = Requirement(text)
            if holds(required, {"extra": ""}):
                assert canonicalize_name(required.name) in here, f"{name} requires {required}"


def test_macos_gets_nothing_of_cuda(lock: ModuleType) -> None:
    """NVIDIA has no wheels for it, and pip ends at the first package that has none."""
    mac = next(where for where in PLATFORMS if where["sys_platform"] == "darwin")
    for path in FILES:
        names = {pin.name for pin in pins(lock, path) if holds(pin, mac)}
        assert not {name for name in names if re.match(r"nvidia-cu|cuda-bindings|triton", name)}, path.name


def test_the_cpu_build_has_no_packages_of_the_other(lock: ModuleType) -> None:
    names = {pin.name for pin in pins(lock, ROOT / "requirements" / "torch-cpu.txt")}
    assert not [name for name in names if re.match(r"nvidia|cuda|triton", name)]
    [torch] = [pin for pin in pins(lock, ROOT / "requirements" / "torch-cpu.txt") if pin.name == "torch"]
    assert version(torch) == lock.torch_pin().partition("==")[2] + "+cpu"


def test_workflows_install_by_hash() -> None:
    """Those that start the scripts say which lock, and no other index is asked without one."""
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            steps = "\n".join(step.get("run", "") for step in job["steps"])
            assert "pip install" not in steps, f"{path.name}, {name}: which hash?"
            environment = job.get("env", {})
            if "bootstrap.sh" in steps or "PIP_EXTRA_INDEX_URL" in environment:
                assert environment.get("CUDADENT42_LOCK"), f"{path.name}, {name}"
    watched = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert {(each["package-ecosystem"], each["directory"]) for each in watched} >= {
        ("pip", "/requirements"),
        ("github-actions", "/"),
    }


def test_another_file_is_refused(tmp_path: Path) -> None:
    """pip, as the scripts call it: a wheel of the right name and version, with another content."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this Python has no pip")
    wheel = tmp_path / "editables-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "editables-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: editables\nVersion: 9.9\n"
        )
        archive.writestr(
            "editables-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("editables-9.9.dist-info/RECORD", "")
    (tmp_path / "lock.txt").write_text(f"editables==9.9 --hash=sha256:{'0' * 64}\n")
    command = [
        *(sys.executable, "-m", "pip", "install", "--require-hashes", "--no-deps", "--only-binary", ":all:"),
        *("--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "target")),
        *("--requirement", str(tmp_path / "lock.txt")),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "HASHES" in done.stderr
    assert not (tmp_path / "target" / "editables-9.9.dist-info").exists()


CHOICE = """
set -eu
root={root}
self=x
. "$root/scripts/environment.sh"
python={python}
choose_lock
echo "lock=$lock"
"""


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({"CUDADENT42_LOCK": "cpu"}, "torch-cpu"),
        ({"CUDADENT42_LOCK": "pypi"}, "torch"),
        ({"CUDADENT42_LOCK": "none"}, ""),
        ({}, "torch"),
        ({"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}, ""),
        ({"PIP_EXTRA_INDEX_URL": "http://127.0.0.1:9/simple"}, ""),
        ({"PIP_FIND_LINKS": "/wheels"}, ""),
    ],
)
def test_which_lock_is_chosen(variables: dict[str, str], chosen: str) -> None:
    """Who names other sources of packages in pip's settings wants what those have."""
    if not chosen and variables.get("CUDADENT42_LOCK") != "none" and importlib.util.find_spec("pip") is None:
        pytest.skip("this Python has no pip")
    if (sys.platform, platform.machine()) not in (("linux", "x86_64"), ("linux", "aarch64")):
        pytest.skip("what is chosen elsewhere stands below")
    assert lock_for(shlex.quote(sys.executable), variables) == f"lock={chosen}\n"


@pytest.mark.parametrize(
    ("platform", "chosen"),
    [
        ({"system": "linux", "machine": "aarch64", "python": (3, 10, 0)}, "torch"),
        ({"system": "linux", "machine": "x86_64", "python": (3, 14, 1)}, "torch"),
        ({"system": "linux", "machine": "x86_64", "python": (3, 15, 0)}, ""),
        ({"system": "linux", "machine": "x86_64", "libc": "musl"}, ""),
        ({"system": "linux", "machine": "ppc64le"}, ""),
        ({"system": "darwin", "machine": "arm64", "mac": "14.0"}, "torch"),
        ({"system": "darwin", "machine": "arm64", "mac": "26.1", "python": (3, 10, 4)}, "torch"),
        ({"system": "darwin", "machine": "arm64", "mac": "13.7"}, ""),
        ({"system": "darwin", "machine": "x86_64", "mac": "15.0"}, ""),
        ({"system": "linux", "machine": "x86_64", "implementation": "pypy"}, ""),
    ],
    ids=str,
)
def test_which_lock_is_chosen_elsewhere(tmp_path: Path, platform: dict[str, Any], chosen: str) -> None:
    """A Python that says of itself what one there would."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this Python has no pip")
    (tmp_path / "sitecustomize.py").write_text(
        "import platform, sys, types\n"
        f"told = {platform!r}\n"
        "sys.platform = told['system']\n"
        "platform.machine = lambda: told['machine']\n"
        "platform.libc_ver = lambda: (told.get('libc', 'glibc'), '2.36')\n"
        "platform.mac_ver = lambda: (told.get('mac', ''), ('', '', ''), told['machine'])\n"
        "sys.version_info = (*told.get('python', (3, 12, 0)), 'final', 0)\n"
        "sys.implementation = types.SimpleNamespace(name=told.get('implementation', 'cpython'))\n"
    )
    python = tmp_path / "python"
    interpreter = shlex.quote(sys.executable)
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || export PYTHONPATH={shlex.quote(str(tmp_path))}\nexec {interpreter} "$@"\n'
    )
    python.chmod(0o755)
    assert lock_for(shlex.quote(str(python)), {}) == f"lock={chosen}\n"


def test_the_cpu_build_on_macos_is_pypis(tmp_path: Path) -> None:
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (tmp_path / "uname").chmod(0o755)
    variables = {"CUDADENT42_LOCK": "cpu", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert lock_for(shlex.quote(sys.executable), variables) == "lock=torch\n"


def lock_for(python: str, variables: dict[str, str]) -> str:
    """What scripts/environment.sh says for that Python, a word of a shell."""
    script = CHOICE.format(root=shlex.quote(str(ROOT)), python=python)
    sh = shutil.which("sh")
    assert sh is not None
    done = subprocess.run(
        [sh, "-c", script],
        env={"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", "HOME": "/nonexistent", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
