"""Machines of several kinds, made of this one by taking from it: what each test of a sandbox runs a program on."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cudadent42.sandbox.policy import Limits, Policy

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
LIMITS = Limits(
    memory_bytes=512 * MIB,
    address_bytes=2048 * MIB,
    processes=60,
    file_bytes=64 * MIB,
    open_files=256,
    scratch_bytes=128 * MIB,
)
_ARM = platform.machine() == "aarch64"
UNSHARE, MOUNT = (97, 40) if _ARM else (272, 165)
SECCOMP = 277 if _ARM else 317
NO_NAMESPACES = {UNSHARE: errno.EPERM, MOUNT: errno.EPERM}
"""A container: Docker's filter refuses these."""
NO_LANDLOCK = {444: errno.ENOSYS, 445: errno.ENOSYS, 446: errno.ENOSYS}
"""An older kernel, or gVisor."""
NO_MOUNT_SETATTR = {442: errno.ENOSYS}
"""Before Linux 5.12, and gVisor."""
NO_FILTER = {SECCOMP: errno.EPERM}


@dataclass(frozen=True)
class Outcome:
    layers: dict[str, bool]
    missing: list[str]
    refused: str
    exit_code: int
    """Of the lab where it refused, else of the program."""
    printed: str


def policy(scratch: Path, *readable: Path, limits: Limits = LIMITS, groups: tuple[str, ...] = ()) -> Policy:
    system = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", sys.prefix, sys.base_prefix)
    return Policy(
        readable=(*system, str(ROOT / "src"), *map(str, readable)),
        devices=(),
        scratch=str(scratch),
        folder="/",
        limits=limits,
        cgroups=groups,
    )


def run(
    confined: Policy,
    *program: str,
    without: dict[int, int] | None = None,
    accepted: tuple[str, ...] = (),
    python: str = sys.executable,
    user: int | None = None,
) -> Outcome:
    """The program's end and what it printed, in a sandbox on a machine ``without`` some system calls."""
    driver = str(Path(__file__).with_name("restricted.py"))
    arguments = [json.dumps(without or {}), confined.to_json(), json.dumps(accepted), *program]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "SECRET_TOKEN_OF_THE_TEST": "a secret"}
    done = subprocess.run(
        [python, driver, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        user=user,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    report = json.loads(first)
    if "refused" in report:
        return Outcome({}, [], report["refused"], report["exit_code"], "")
    ended = json.loads(lines[-1])["ended"]
    return Outcome(report["layers"], report["missing"], "", ended, "\n".join([*lines[:-1], done.stderr]))
