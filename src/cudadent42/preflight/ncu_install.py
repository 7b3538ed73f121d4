"""Nsight Compute on this machine: where it is, which version, and whether it may read the GPU's counters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

MIN_VERSION = (2023, 1)
"""The first that knows Hopper's metrics by these names."""

PLACES = (
    "opt/nvidia/nsight-compute/*/ncu",
    "usr/local/cuda*/bin/ncu",
    "usr/local/NVIDIA-Nsight-Compute*/ncu",
    "opt/cuda/bin/ncu",
)
"""Below the root, where installers put it."""

PARAMETERS = Path("proc/driver/nvidia/params")
_VERSION = re.compile(r"Version (\d+)\.(\d+)(?:\.(\d+))?")
_VERSION_TIMEOUT_S = 20
_ADMIN_ONLY = re.compile(r"RmProfilingAdminOnly:\s*(\d)")
_CAPABILITIES = re.compile(r"CapEff:\s*([0-9a-fA-F]+)")
_CAP_SYS_ADMIN = 21

ADMIN_REMEDY = (
    "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | "
    "sudo tee /etc/modprobe.d/nvidia-profiling.conf && sudo reboot"
)
CONTAINER_REMEDY = "docker run --cap-add=SYS_ADMIN ... (or have the host open the counters to all users)"


class Permission(str, Enum):
    """Of a process to read the GPU's performance counters."""

    OPEN = "open"
    CLOSED = "closed"
    UNKNOWN = "unknown"
    """The driver does not say: only a profile shows."""


@dataclass(frozen=True)
class Tool:
    """An installed Nsight Compute."""

    path: Path
    version: tuple[int, ...]
    """``(2025, 3, 1)``; empty where it did not say."""

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version)) or "unknown version"


def find(root: Path = Path("/")) -> Path | None:
    """``ncu`` on the PATH, else in the places where installers put it, the newest first."""
    on_path = shutil.which("ncu")
    if on_path:
        return Path(on_path)
    paths = [path for pattern in PLACES for path in root.glob(pattern) if os.access(path, os.X_OK)]
    return max(paths, key=lambda path: _numbers(str(path)), default=None)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def tool(path: Path) -> Tool:
    """The installation at ``path``, with its version. It may hang or not run at all: then without."""
    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return Tool(path, ())
    match = _VERSION.search(done.stdout)
    return Tool(path, tuple(int(part) for part in match.groups() if part) if match else ())


def permission(root: Path = Path("/")) -> Permission:
    """Whether the driver lets a process like this read the counters, by what it says itself."""
    try:
        setting = _ADMIN_ONLY.search((root / PARAMETERS).read_text())
    except OSError:
        return Permission.UNKNOWN
    if setting is None:
        return Permission.UNKNOWN
    return Permission.CLOSED if setting[1] == "1" and not _may_administer(root) else Permission.OPEN


def _may_administer(root: Path) -> bool:
    try:
        capabilities = _CAPABILITIES.search((root / "proc/self/status").read_text())
    except OSError:
        return False
    return capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_SYS_ADMIN & 1)


def in_container(root: Path = Path("/")) -> bool:
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()


def remedy(root: Path = Path("/")) -> str:
    """What opens the counters to this process."""
    return CONTAINER_REMEDY if in_container(root) else ADMIN_REMEDY
