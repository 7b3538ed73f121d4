"""What an agent may name: files below the project that the server was started for, and what the lab has itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.paths import real_path
from cudadent42.model.implementations import is_kernel_file, is_plug_in

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(\[[A-Za-z0-9_.,=+-]*\])?")
"""Of an implementation, variants included, or of a suite."""

_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./^~@{}-]*")
"""What git understands, and neither an option nor a folder."""


@dataclass(frozen=True)
class Project:
    root: Path
    """Absolute, without links."""

    def path(self, text: str) -> Path:
        """A path below the project, links followed. Raises UsageError for any other."""
        try:
            path = real_path(self.root / text)
        except (OSError, ValueError) as error:
            raise UsageError(f"{text!r} is no path: {error}") from error
        if not path.is_relative_to(self.root):
            raise UsageError(f"{text!r} is outside of the project {self.root}; name a file below it")
        return path

    def file(self, text: str) -> Path:
        """A file below the project. Raises UsageError where there is none."""
        path = self.path(text)
        if not path.is_file():
            raise UsageError(f"the project {self.root} has no file {text!r}")
        return path

    def implementation(self, text: str) -> str:
        """As plans have it: a file of the project, absolute, or a name of the lab's."""
        if is_kernel_file(text):
            return str(self.file(text))
        if is_plug_in(text):
            file, _, function = text.rpartition(":")
            if not function.isidentifier():
                raise UsageError(f"{text!r}: expected path/to/file.py:callable")
            return f"{self.file(file)}:{function}"
        return _named(text, "an implementation")

    def suite(self, text: str) -> str:
        """A TOML file of the project, or a name of the lab's."""
        return str(self.file(text)) if "/" in text or text.endswith(".toml") else _named(text, "a suite")

    def revision(self, text: str) -> str:
        """A revision of git's; folders may lie anywhere and are refused."""
        if not _REVISION.fullmatch(text):
            raise UsageError(
                f"{text!r} is no git revision; expected a commit, a branch or a tag, such as HEAD or main~1"
            )
        return text


def _named(text: str, what: str) -> str:
    if not _NAME.fullmatch(text):
        raise UsageError(f"{text[:80]!r} is not the name of {what}, nor a file of the project")
    return text
