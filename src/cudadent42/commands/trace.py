"""What a command has come across, so that its failure can be met with the lessons that apply."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cudadent42.base.errors import LabError
from cudadent42.base.observer import Forwarding

if TYPE_CHECKING:
    from cudadent42.model.records import BuildReport, MachineReport
    from cudadent42.patterns import PatternEvidence

_LINES = 5000
"""Of what was said that are kept: the last ones."""


@dataclass
class Trace:
    """Filled while the command runs, read when it fails."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))
    folders: list[Path] = field(default_factory=list)
    """Run folders that were opened."""
    sessions: list[Path] = field(default_factory=list)
    """Session folders that were worked on."""
    machine: MachineReport | None = None
    build: BuildReport | None = None
    answered: bool = False
    """The document that ``--json`` asks for was printed."""

    def evidence(self) -> PatternEvidence:
        """All of it, in the form in which lessons are matched."""
        from cudadent42.patterns import evidence
        from cudadent42.runs.source import revision

        collected = evidence.of_text("\n".join(self.lines), "output")
        if self.machine is not None:
            collected |= evidence.of_machine(self.machine)
        if self.build is not None:
            collected |= evidence.of_build(self.build) | evidence.of_source(revision())
        for folder, read in self._folders():
            try:
                collected |= read(folder)
            except LabError as error:  # the folder may be what failed
                collected |= evidence.of_text(str(error), "folder")
        return collected

    def _folders(self) -> Iterator[tuple[Path, Callable[[Path], PatternEvidence]]]:
        from cudadent42.patterns.evidence import of_run
        from cudadent42.session.evidence import of_session

        yield from ((folder, of_run) for folder in self.folders)
        yield from ((folder, of_session) for folder in self.sessions)


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def following() -> Iterator[Trace]:
    """A trace for the command that runs inside."""
    token = _current.set(trace := Trace())
    try:
        yield trace
    finally:
        _current.reset(token)


def current() -> Trace:
    """The running command's trace; one that nobody reads where there is no command, as in a test."""
    return _current.get() or Trace()


def teach(trace: Trace) -> None:
    """Print the lessons that apply, and count them. An error is on its way: this adds no second one."""
    from cudadent42.patterns import after_failure

    try:
        after_failure(trace.evidence())
    except (LabError, OSError) as error:
        print(f"note: lessons were not looked for: {error}", file=sys.stderr)


class Heard(Forwarding):
    """An observer whose words also go into the trace."""

    def note(self, text: str) -> None:
        current().lines.extend(text.splitlines())
        super().note(text)

    def detail(self, text: str) -> None:
        current().lines.extend(text.splitlines())
        super().detail(text)
