"""``--fix``: mend what needs no asking: this user's cache directory, the project's own environment.

Nothing here needs root, touches a Python that is not the project's, or changes another program's settings.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cudadent42.base.compile_cache import empty_cache
from cudadent42.model.records import Check, MachineReport, Status
from cudadent42.preflight.definitions import Context
from cudadent42.preflight.python import TORCH, installed_version, lacking
from cudadent42.preflight.toolchain import is_open_to_others, named_cache_directory
from flashmoe_science.errors import BuildError, DeviceError

_PIP_TIMEOUT_S = 1800


def apply(report: MachineReport, context: Context) -> list[str]:
    """Mend the failed checks that can safely be mended; one line of text per attempt."""
    done = []
    for check in report.checks:
        mend = _MENDERS.get(check.name)
        if mend is not None and check.status is Status.FAIL:
            outcome = mend(check, context)
            if outcome:
                done.append(f"{check.name}: {outcome}")
    return done


def in_project_environment() -> bool:
    """Whether this Python is a ``.venv``, which is the project's own to change."""
    return sys.prefix != sys.base_prefix and Path(sys.prefix).name == ".venv"


def _install_packages(check: Check, context: Context) -> str:
    requirements = [package.requirement for package in lacking(context)]
    return _pip_install(requirements)


def _install_torch(check: Check, context: Context) -> str:
    return _pip_install([TORCH.requirement]) if installed_version(TORCH.name) is None else ""


def _install_compiler(check: Check, context: Context) -> str:
    return _pip_install(["ziglang"])


def _install_nvrtc(check: Check, context: Context) -> str:
    return _pip_install(["cuda-bindings>=13.0.3,<14", "nvidia-cuda-nvrtc>=13.0,<14"])


def _pip_install(requirements: list[str]) -> str:
    if not requirements:
        return ""
    if not in_project_environment():
        return f"left alone: {sys.executable} is not the project's own .venv; run the command above yourself"
    command = [sys.executable, "-m", "pip", "install", "--quiet", *requirements]
    try:
        subprocess.run(command, check=True, timeout=_PIP_TIMEOUT_S, stdout=sys.stderr)
    except (OSError, subprocess.SubprocessError) as error:
        return f"pip failed: {error}"
    return f"installed {' '.join(requirements)}"


def _close_cache(check: Check, context: Context) -> str:
    if not is_open_to_others(named_cache_directory()):
        return ""
    # What others put there while they could must go with their permission.
    try:
        directory, cleared = empty_cache()
    except (DeviceError, BuildError) as error:
        return f"left alone: {error}"
    return f"only you can write to {directory} now, and its {cleared.entries} kernels were removed"


_MENDERS: dict[str, Callable[[Check, Context], str]] = {
    "packages": _install_packages,
    "torch": _install_torch,
    "compiler": _install_compiler,
    "nvrtc": _install_nvrtc,
    "cache": _close_cache,
}
