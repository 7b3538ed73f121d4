"""The side of whoever starts a confined process: what it is started with, and what the machine offers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.base.errors import MachineNotReadyError
from cudadent42.model.sandbox import Layer, LayerState, Protection, SandboxReport
from cudadent42.sandbox import cgroup
from cudadent42.sandbox.environment import cleaned
from cudadent42.sandbox.policy import Limits, Policy

FOLDER = "/"
"""Where a sandboxed process is started: Python takes modules from the current folder, which may be a candidate's."""

_PROBE_TIMEOUT_S = 60.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Sandbox:
    """What a process is confined to, for those that start one."""

    policy: Policy
    report: SandboxReport

    def command(self, command: Sequence[str]) -> list[str]:
        """``command``, confined. It is given one more argument at its end: the process id of its parent."""
        return [*_launcher(self.policy), "-1", *command]

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        return cleaned(environment)

    def settle(self) -> None:
        """Wait until the processes that were started in it, and killed, no longer count."""
        cgroup.settle(self.policy.cgroups)


def _launcher(policy: Policy) -> list[str]:
    return [sys.executable, "-m", "cudadent42.sandbox.enter", policy.to_json()]


def probe(policy: Policy) -> SandboxReport:
    """What a process with this policy would be confined by: one is started, confined, and ends.

    Raises MachineNotReadyError where not even that can be done.
    """
    read, write = os.pipe()
    try:
        with os.fdopen(write, "wb"):
            paths = [_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            done = subprocess.run(
                [*_launcher(replace(policy, wanted=None)), str(write)],
                env=cleaned(environment),
                cwd=FOLDER,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                pass_fds=(write,),
                timeout=_PROBE_TIMEOUT_S,
                check=False,
            )
        with os.fdopen(read, "rb", closefd=False) as answer:
            text = answer.read().decode()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineNotReadyError(f"no sandbox can be made here: {error}") from error
    finally:
        os.close(read)
    if not text:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise MachineNotReadyError(f"no sandbox can be made here: {words[-1]}")
    return SandboxReport(
        tuple(LayerState(Layer(name), there, detail) for name, there, detail in json.loads(text))
    )


def offered() -> SandboxReport:
    """What this machine makes a sandbox of. Raises MachineNotReadyError."""
    limits = Limits(1 << 30, None, 1024, 1 << 20, 256, 1 << 20)
    groups = cgroup.make(limits)
    try:
        with tempfile.TemporaryDirectory(prefix="cudadent42-sandbox-") as scratch:
            readable = ("/usr", "/bin", "/lib", "/lib64", sys.prefix, sys.base_prefix, _PACKAGE_ROOT)
            return probe(Policy(readable, (), os.path.realpath(scratch), FOLDER, limits, cgroups=groups))
    finally:
        cgroup.remove(groups)


def required(report: SandboxReport, accepted: Sequence[Protection]) -> SandboxReport:
    """The report, with what is done without. Raises MachineNotReadyError where more is missing."""
    for protection in report.missing:
        if protection not in accepted:
            raise MachineNotReadyError(
                f"--untrusted: this machine gives no protection of {protection.value} "
                f"({report.why_missing(protection)}); run in a virtual machine of its own, "
                f"or do without by --accept-missing {protection.value}"
            )
    return replace(report, accepted_missing=tuple(each for each in report.missing if each in accepted))


def sandbox(policy: Policy, accepted: Sequence[Protection] = ()) -> Sandbox:
    """A sandbox of what this machine offers. Raises MachineNotReadyError where that is too little."""
    report = required(probe(policy), accepted)
    wanted = tuple(state.layer.value for state in report.layers if state.there)
    return Sandbox(replace(policy, wanted=wanted), report)
