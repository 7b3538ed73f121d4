"""What a process of the lab is asked to do, and what it says on the way: records on pipes, never words of a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudadent42.base.reading import parse_json
from cudadent42.base.serialise import decode, dumps, encode
from cudadent42.plan import Choices


@dataclass(frozen=True)
class Preflight:
    device: str


@dataclass(frozen=True)
class Verification:
    device: str
    choices: Choices
    untrusted: bool = False


@dataclass(frozen=True)
class Race:
    device: str
    choices: Choices
    sealed: bool
    against: str = ""
    """A git revision that the working tree is raced against; empty for the suite's baseline."""
    entry: str = ""
    """What is raced of both, relative to the top of the repository; empty for this project's kernels."""
    untrusted: bool = False


@dataclass(frozen=True)
class Examination:
    folder: Path
    case: str
    implementation: str
    measure: bool


Task = Preflight | Verification | Race | Examination
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Preflight, Verification, Race, Examination)}


def to_line(task: Task) -> str:
    return dumps({"task": type(task).__name__, "data": encode(task)}, indent=None) + "\n"


def from_line(line: str) -> Task:
    """Raises ValueError where it is none."""
    document = parse_json(line)
    if not isinstance(document, dict) or document.get("task") not in KINDS:
        raise ValueError(f"not a task: {line[:80]!r}")
    task: Task = decode(KINDS[document["task"]], document.get("data"))
    return task


@dataclass(frozen=True)
class News:
    """One line of what a task's process says. All but the last are about how far it is."""

    stage: str | None = None
    """That begins."""
    fraction: float | None = None
    """Of the stage, from 0 to 1."""
    note: str | None = None
    folder: str | None = None
    """Of the run, once there is one."""
    answer: Any = None
    """A record's JSON. It is done then."""
    exit_code: int | None = None
    """With the answer, or with the error."""
    error: str | None = None
    """Why there is no answer. It is done then."""

    @property
    def is_last(self) -> bool:
        return self.exit_code is not None
