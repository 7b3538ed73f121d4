"""What a check is: a probe that looks, and the problems that it can find, as data.

Causes and fixes are text templates, kept apart from the probes, so that other forms of the same checks
(documentation, a shell script) can be made from the same table.
"""

from __future__ import annotations

import shlex
import string
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cudadent42.model.records import Check, Status
from cudadent42.preflight.gpu_probe import GpuProbe

Fact = str | int | float | bool | None

THIS_PYTHON = shlex.quote(sys.executable)
"""As it stands in a fix, which is copied into a shell."""


@dataclass(frozen=True)
class Context:
    """What the probes are told."""

    device: str
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    output: Path
    """Where the run would write."""
    gpu: GpuProbe

    @property
    def wants_gpu(self) -> bool:
        """Whether a GPU must work: asked for, or there to be used."""
        return self.device.startswith("cuda") or (self.device == "auto" and self.gpu.present)

    @property
    def gpu_index(self) -> int:
        return int(self.device.partition(":")[2] or 0)


@dataclass(frozen=True)
class Problem:
    """One thing that can be wrong. ``{name}`` in the texts stands for one of the finding's values."""

    key: str
    status: Status
    cause: str
    fix: str
    """One command, or one action where no command can do it."""


@dataclass(frozen=True)
class Finding:
    """What a probe saw."""

    detail: str
    problem: str | None = None
    """``Problem.key``; None where all is well."""
    values: Mapping[str, object] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """For the manifest."""
    skipped: bool = False
    """The check does not apply to this machine or device."""


@dataclass(frozen=True)
class Definition:
    name: str
    purpose: str
    """What a run needs it for."""
    probe: Callable[[Context], Finding]
    problems: tuple[Problem, ...]

    def check(self, finding: Finding) -> Check:
        if finding.skipped:
            return Check(self.name, Status.SKIP, finding.detail)
        if finding.problem is None:
            return Check(self.name, Status.OK, finding.detail)
        problem = next(problem for problem in self.problems if problem.key == finding.problem)
        return Check(
            name=self.name,
            status=problem.status,
            detail=finding.detail,
            cause=problem.cause.format_map(finding.values),
            fix=problem.fix.format_map(finding.values),
        )


def template_fields(problem: Problem) -> set[str]:
    """Names that the problem's texts need from the finding."""
    parse = string.Formatter().parse
    return {name for text in (problem.cause, problem.fix) for _, name, _, _ in parse(text) if name}
