"""What a lesson is, and reading one from its TOML file.

A lesson has symptoms; it applies when any of them does. A symptom applies when every clause of ``all``, at least one of
``any`` (where there are any) and none of ``none`` holds. A clause is about a line of a log, a metric, a kernel's
resources or a fact of the machine.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from cudadent42.base.errors import NewerVersionError, UsageError
from cudadent42.base.files import write_text
from cudadent42.base.folders import config_folder, make_private
from cudadent42.base.reading import open_file
from cudadent42.base.serialise import decode
from cudadent42.base.toml import parse_toml
from cudadent42.patterns.expression import ExpressionError, compile_bounded

SCHEMA_VERSION = 1
_ID = re.compile(r"[a-z0-9][a-z0-9-]{2,63}")
_FILE_LIMIT = 64 * 1024
"""Bytes of a lesson's file."""


@dataclass(frozen=True)
class Clause:
    """One thing that holds or does not; about exactly one of ``log``, ``metric``, ``resource`` and ``fact``.

    What was not measured or is not known holds in no clause, except ``missing``.
    """

    log: str = ""
    """A regular expression, searched in each line."""
    metric: str = ""
    """A number of a run or session, such as ``speedup_geomean``."""
    resource: str = ""
    """A field of ``Resources``, such as ``spill_store_bytes``: the clause holds if it does for any kernel."""
    fact: str = ""
    """A fact of the machine or of the source, such as ``gpu_count``."""
    above: float = -math.inf
    """The number is larger than this."""
    below: float = math.inf
    equals: str | int | float | bool | None = None
    matches: str = ""
    """A regular expression, searched in the fact's text."""
    missing: bool = False
    """The fact is stated, and it is that there is none (null, false, 0 or empty)."""

    @property
    def subject(self) -> str:
        return self.metric or self.resource or self.fact or "log"

    @property
    def numeric(self) -> bool:
        return self.above != -math.inf or self.below != math.inf

    def describe(self) -> str:
        """``log has "..."``, ``speedup_geomean below 0.5``."""
        if self.log:
            return f'log has "{self.log}"'
        words = [f"above {self.above:g}"] if self.above != -math.inf else []
        words += [f"below {self.below:g}"] if self.below != math.inf else []
        words += [f"is {self.equals}"] if self.equals is not None else []
        words += [f'has "{self.matches}"'] if self.matches else []
        words += ["is missing"] if self.missing else []
        return f"{self.subject} {' and '.join(words)}"


@dataclass(frozen=True)
class Symptom:
    all: tuple[Clause, ...] = ()
    any: tuple[Clause, ...] = ()
    none: tuple[Clause, ...] = ()

    @property
    def clauses(self) -> tuple[Clause, ...]:
        return (*self.all, *self.any, *self.none)

    def describe(self) -> Iterator[str]:
        """A line for each kind of clause."""
        for word, clauses in (("all of", self.all), ("any of", self.any), ("none of", self.none)):
            if clauses:
                yield f"{word}: " + "; ".join(clause.describe() for clause in clauses)


@dataclass(frozen=True)
class Lesson:
    """One file of the library."""

    schema_version: int
    id: str
    title: str
    cause: str
    remedy: str
    """What to do, first thing first."""
    evidence: str
    """Where the lesson comes from: what happened, or the committed run that shows it."""
    cost: str
    """What it cost when it was not known."""
    symptom: tuple[Symptom, ...] = field(default=())


@functools.cache
def shipped() -> tuple[Lesson, ...]:
    """The lessons that come with the package, by id; read once in a process."""
    folder = resources.files("cudadent42.patterns") / "data"
    lessons = [
        parse(entry.read_text(encoding="utf-8"), f"lesson {entry.name}")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    ]
    return tuple(sorted(lessons, key=lambda lesson: lesson.id))


def own_folder() -> Path:
    """Where the user's own lessons lie."""
    return config_folder() / "patterns"


def own() -> tuple[Lesson, ...]:
    """The user's lessons, by id. Raises UsageError where one of the files is wrong."""
    return tuple(load(path) for path in _own_files())


def _own_files() -> Iterator[Path]:
    folder = own_folder()
    if folder.is_dir():
        yield from sorted(folder.glob("*.toml"))


def library() -> tuple[Lesson, ...]:
    """All lessons; one of the user's replaces the shipped one of the same id."""
    return tuple({lesson.id: lesson for lesson in (*shipped(), *own())}.values())


def usable() -> tuple[tuple[Lesson, ...], tuple[str, ...]]:
    """All lessons that can be read, and what is wrong with the rest: for where an error is already being told."""
    lessons = {lesson.id: lesson for lesson in shipped()}
    troubles = []
    for path in _own_files():
        try:
            lesson = load(path)
        except UsageError as error:
            troubles.append(str(error))
        else:
            lessons[lesson.id] = lesson
    return tuple(lessons.values()), tuple(troubles)


def add(path: Path, replace: bool) -> Path:
    """Keep a checked copy of a lesson's file among the user's own; its path.

    Raises UsageError where the lesson is wrong, or there already.
    """
    lesson = load(path)
    folder = make_private(own_folder())
    target = folder / f"{lesson.id}.toml"
    if not replace and lesson.id in {existing.id for existing in library()}:
        raise UsageError(f"there is a lesson {lesson.id!r} already; choose another id, or give --replace")
    write_text(target, path.read_text(encoding="utf-8"))
    return target


def load(path: Path) -> Lesson:
    """A lesson's file. Raises UsageError where it cannot be read or is wrong."""
    try:
        with open_file(path) as file:
            data = file.read(_FILE_LIMIT + 1)
        if len(data) > _FILE_LIMIT:
            raise UsageError(
                f"{path} is larger than {_FILE_LIMIT // 1024} KiB; expected the TOML file of one lesson"
            )
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the lesson {path}: {reason}; expected a TOML file") from error
    return parse(text, str(path))


def parse(text: str, where: str) -> Lesson:
    """A lesson from its TOML; ``where`` names it in errors."""
    document = parse_toml(text, where)
    schema = document.get("schema_version")
    if type(schema) is not int or schema < 1:
        raise UsageError(f"{where}: expected schema_version = {SCHEMA_VERSION} as its first key")
    if schema > SCHEMA_VERSION:
        raise NewerVersionError(
            f"{where} was written for a newer cudadent42 (schema {schema}); "
            f"this one reads up to {SCHEMA_VERSION}: upgrade it"
        )
    try:
        lesson = decode(Lesson, document)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error
    _check(lesson, where)
    return lesson


def _check(lesson: Lesson, where: str) -> None:
    if not _ID.fullmatch(lesson.id):
        raise UsageError(
            f"{where}: id = {lesson.id!r}; expected 3 to 64 lower-case letters, digits and dashes"
        )
    for name in ("title", "cause", "remedy", "evidence", "cost"):
        if not getattr(lesson, name).strip():
            raise UsageError(f"{where}: {name} is empty; expected a sentence")
    if not lesson.symptom:
        raise UsageError(
            f"{where}: expected at least one [[symptom]]: a lesson that nothing can match is never shown"
        )
    for number, symptom in enumerate(lesson.symptom, 1):
        symptom_where = f"{where}, symptom {number}"
        if not (symptom.all or symptom.any):
            raise UsageError(f"{symptom_where}: expected clauses in all or any")
        for clause in symptom.clauses:
            _check_clause(clause, symptom_where)


def _check_clause(clause: Clause, where: str) -> None:
    subjects = [name for name in ("log", "metric", "resource", "fact") if getattr(clause, name)]
    if len(subjects) != 1:
        raise UsageError(
            f"{where}: a clause is about one of log, metric, resource and fact, not {subjects or 'none'}"
        )
    tests = clause.numeric + (clause.equals is not None) + bool(clause.matches) + clause.missing
    if subjects == ["log"]:
        if tests:
            raise UsageError(f"{where}: a log clause is a regular expression and nothing else")
    elif subjects == ["fact"]:
        if tests != 1:
            raise UsageError(
                f"{where}: fact {clause.fact!r} needs one of above or below, equals, matches, missing"
            )
    elif tests != 1 or not clause.numeric:
        raise UsageError(f"{where}: {clause.subject!r} needs above or below, or both, and nothing else")
    if clause.numeric and (
        math.isnan(clause.above) or math.isnan(clause.below) or clause.above >= clause.below
    ):
        raise UsageError(
            f"{where}: {clause.subject!r}: no number is above {clause.above} and below {clause.below}"
        )
    for pattern in filter(None, (clause.log, clause.matches)):
        try:
            compile_bounded(pattern)
        except ExpressionError as error:
            raise UsageError(f"{where}: {error}") from error
