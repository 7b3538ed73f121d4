"""How many things a diff changes, so that "one thing at a time" can be checked.

A *thing* is one place with one purpose: a function (or another top-level block) of a file, by the heading that git
prints behind ``@@``, or a constant that got another value. Documentation and tests are not things: they do not change
speed. Counting headings is a guess about intent, so what rests on it warns and never refuses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

_FILE = re.compile(r"^\+\+\+ (?:b/)?(.*?)\t?$")
_OLD_FILE = re.compile(r"^--- (?:a/)?(.*?)\t?$")
_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@ ?(.*)$")
_CONSTANT = re.compile(
    r"^\s*(?:#define\s+|(?:static\s+|inline\s+)?(?:constexpr|const)\s+[\w:<>\s]{0,60}?)?([A-Za-z_]\w{0,60})(?:\s*:\s*[\w.\[\]]{1,40})?\s*=?\s*[-+]?(?:\d|true|false|\"|')"
)
_DEFINE = re.compile(r"^\s*#define\s+(\w{1,60})\s")
_NEUTRAL_FOLDERS = frozenset(("docs", "doc", "tests", "test", "runs", "sessions"))
_NEUTRAL_SUFFIXES = frozenset((".md", ".rst", ".txt"))


@dataclass(frozen=True)
class Change:
    """What a diff changes."""

    files: tuple[str, ...]
    functions: tuple[str, ...]
    """``file: heading`` of every function or block that is touched."""
    constants: tuple[str, ...]
    """``file: NAME`` of every constant that got another value, in or outside of a function."""

    @property
    def things(self) -> int:
        """A constant inside a function that changes nothing else is one thing, not two."""
        return len(self._things())

    def _things(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.functions, *self.constants)))

    def describe(self) -> str:
        """``2 things: a.cu: NUM_WARPS; b.py: def launch``."""
        parts = self._things()
        shown = "; ".join(parts[:5]) + (f"; and {len(parts) - 5} more" if len(parts) > 5 else "")
        return f"{len(parts)} thing{'' if len(parts) == 1 else 's'}" + (f": {shown}" if parts else "")


@dataclass
class _Hunk:
    file: str
    heading: str
    removed: list[str]
    added: list[str]


def count(diff: str, inside: str = "") -> Change:
    """What a unified diff changes. A diff that was cut at its end is counted as far as it goes.

    Args:
        inside: name of a folder; only what lies in one of that name counts. Empty: everything.
    """
    files: dict[str, None] = {}
    functions: dict[str, None] = {}
    constants: dict[str, None] = {}
    for hunk in _hunks(diff):
        if _neutral(hunk.file) or (inside and inside not in PurePosixPath(hunk.file).parts):
            continue
        files[hunk.file] = None
        changed, rest = _constants(hunk)
        constants.update(dict.fromkeys(f"{hunk.file}: {name}" for name in changed))
        if rest:
            functions[f"{hunk.file}: {hunk.heading or 'top level'}"] = None
    return Change(tuple(files), tuple(functions), tuple(constants))


def _neutral(file: str) -> bool:
    path = PurePosixPath(file)
    return path.suffix in _NEUTRAL_SUFFIXES or (bool(path.parts) and path.parts[0] in _NEUTRAL_FOLDERS)


def _hunks(diff: str) -> list[_Hunk]:
    hunks: list[_Hunk] = []
    old = file = ""
    left_old = left_new = 0
    for line in diff.split("\n"):
        if left_old > 0 or left_new > 0:
            hunk = hunks[-1]
            if line.startswith("-"):
                hunk.removed.append(line[1:])
                left_old -= 1
            elif line.startswith("+"):
                hunk.added.append(line[1:])
                left_new -= 1
            elif not line.startswith("\\"):
                left_old, left_new = left_old - 1, left_new - 1
            continue
        if match := _OLD_FILE.match(line):
            old = match[1]
        elif match := _FILE.match(line):
            file = old if match[1] == "/dev/null" else match[1]
        elif match := _HUNK.match(line):
            left_old, left_new = int(match[1] or 1), int(match[2] or 1)
            hunks.append(_Hunk(file, match[3].strip(), [], []))
    return hunks


def _constants(hunk: _Hunk) -> tuple[list[str], bool]:
    """Names of the constants whose line is replaced by one with another value, and whether anything else changed."""
    removed = [line for line in hunk.removed if line.strip() and not _comment(line)]
    added = [line for line in hunk.added if line.strip() and not _comment(line)]
    old, new = _by_name(removed), _by_name(added)
    changed = [name for name in new if name in old and new[name] != old[name]]
    rest = [line for line in removed if _name(line) not in changed] + [
        line for line in added if _name(line) not in changed
    ]
    return changed, bool(rest)


def _by_name(lines: list[str]) -> dict[str, str]:
    return {name: line for line in lines if (name := _name(line))}


def _name(line: str) -> str:
    match = _DEFINE.match(line) or _CONSTANT.match(line)
    return match[1] if match else ""


def _comment(line: str) -> bool:
    return line.strip().startswith(("#", "//", "/*", "*")) and not line.strip().startswith(
        ("#define", "#pragma", "#include", "#if")
    )
