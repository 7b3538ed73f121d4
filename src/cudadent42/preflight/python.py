"""Python, the packages, torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
import types
from dataclasses import dataclass

from cudadent42.model.records import Status
from cudadent42.preflight.definitions import THIS_PYTHON, Context, Definition, Fact, Finding, Problem

MIN_PYTHON = (3, 10)


@dataclass(frozen=True)
class Package:
    """A distribution that a run imports."""

    name: str
    minimum: tuple[int, ...]
    gpu_only: bool = False

    @property
    def requirement(self) -> str:
        return f"{self.name}>={'.'.join(map(str, self.minimum))}"


TORCH = Package("torch", (2, 10))
# The floors of pyproject.toml, which has no reader on a bare Python; a test keeps the two alike.
PACKAGES = (
    Package("cuda-pathfinder", (1, 2, 3), gpu_only=True),
    Package("numpy", (1, 26)),
    Package("typer", (0, 16)),
    Package("rich", (13, 8)),
    Package("matplotlib", (3, 8)),
    Package("jinja2", (3, 1)),
    *((Package("tomli", (2,)),) if sys.version_info < (3, 11) else ()),
)


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The numbers at a version's beginning: ``2.13.0+cpu`` gives (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def lacking(context: Context) -> tuple[Package, ...]:
    """Packages beside torch that a run on this device needs and that are missing or too old."""
    return tuple(
        package
        for package in PACKAGES
        if (context.wants_gpu or not package.gpu_only)
        and release(installed_version(package.name) or "") < package.minimum
    )


def _python(context: Context) -> Finding:
    version = platform.python_version()
    facts = {
        "python": version,
        "python_path": sys.executable,
        "os": _os_name(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    problem = None if sys.version_info >= MIN_PYTHON else "old"
    return Finding(f"{version} at {sys.executable}", problem, {"version": version}, facts)


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.platform()


def _pip(context: Context) -> Finding:
    """Only Debian and its kin have Pythons without both."""
    if importlib.util.find_spec("pip") is not None:
        return Finding(f"{installed_version('pip') or 'of unknown version'}")
    if importlib.util.find_spec("ensurepip") is not None:
        return Finding("comes with Python")
    missing = installed_version(TORCH.name) is None or lacking(context)
    if not missing:
        return Finding("none, and nothing is missing", skipped=True)
    return Finding("neither pip nor ensurepip", "missing")


def _packages(context: Context) -> Finding:
    versions = {package.name: installed_version(package.name) for package in PACKAGES}
    facts: dict[str, Fact] = {
        f"package_{name}": version for name, version in versions.items() if name != "torch"
    }
    missing = lacking(context)
    values = {
        "missing": ", ".join(package.name for package in missing),
        "requirements": " ".join(f"'{package.requirement}'" for package in missing),
        "python": THIS_PYTHON,
    }
    if missing:
        descriptions = (f"{package.name} {versions[package.name] or 'missing'}" for package in missing)
        return Finding("; ".join(descriptions), "missing", values, facts)
    present = sum(version is not None for version in versions.values())
    return Finding(f"all {present} present", facts=facts)


def import_torch() -> types.ModuleType | None:
    """torch; None where it is not installed. Raises ImportError or OSError where it is broken."""
    if importlib.util.find_spec("torch") is None:
        return None
    return importlib.import_module("torch")


def _torch(context: Context) -> Finding:
    values = {"python": THIS_PYTHON}
    try:
        torch = import_torch()
    except (ImportError, OSError) as error:  # a missing shared library shows as either
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Finding("cannot be imported", "broken", values | {"reason": reason})
    if torch is None:
        return Finding("not installed", "missing", values, {"torch": None})
    version, threads = str(torch.__version__), torch.get_num_threads()
    facts = {
        "torch": version,
        "torch_cuda": torch.version.cuda,
        "torch_threads": threads,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    problem = "old" if release(version) < TORCH.minimum else None
    return Finding(f"{version}, {threads} threads", problem, values | {"version": version}, facts)


DEFINITIONS = (
    Definition(
        "python",
        "runs everything",
        _python,
        (
            Problem(
                "missing",
                Status.FAIL,
                "there is no Python on PATH; 3.10 or newer is needed",
                "sudo apt-get install python3 python3-venv",
            ),
            Problem(
                "old",
                Status.FAIL,
                "Python {version} is too old; 3.10 or newer is needed",
                "sudo apt-get install python3.11 python3.11-venv",
            ),
        ),
    ),
    Definition(
        "pip",
        "brings the packages",
        _pip,
        (
            Problem(
                "missing",
                Status.FAIL,
                "this Python has neither pip nor ensurepip, so nothing can be installed with it",
                "tools/bootstrap.sh",
            ),
        ),
    ),
    Definition(
        "packages",
        "what the lab imports",
        _packages,
        (
            Problem(
                "missing",
                Status.FAIL,
                "missing or too old: {missing}",
                "{python} -m pip install {requirements}",
            ),
        ),
    ),
    Definition(
        "torch",
        "tensors, and the baseline",
        _torch,
        (
            Problem(
                "missing", Status.FAIL, "torch is not installed", "{python} -m pip install 'torch>=2.10'"
            ),
            Problem(
                "broken",
                Status.FAIL,
                "torch is installed but cannot be imported: {reason}",
                "{python} -m pip install --force-reinstall 'torch>=2.10'",
            ),
            Problem(
                "old",
                Status.FAIL,
                "torch {version} is too old; 2.10 or newer is needed",
                "{python} -m pip install --upgrade 'torch>=2.10'",
            ),
        ),
    ),
)
