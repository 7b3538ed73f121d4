"""A configuration space as data: the file of it, and the arms that it holds.

A space is of a kernel in a file of its own, whose macros it varies, or of one of the library's CUDA kernels, whose
configuration it varies by its variants (docs/tuning.md). Nothing in it is evaluated but `tune.grammar`'s expressions.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import read_text
from cudadent42.base.toml import Table, did_you_mean, parse_toml
from cudadent42.model.implementations import OURS, is_kernel_file
from cudadent42.native import specification
from cudadent42.native.specification import Language, Specification
from cudadent42.native.tuned import files_of
from cudadent42.operations import definition
from cudadent42.tune.grammar import Expression, Kind, Value, is_name, kind_of, parse

SCHEMA_VERSION = 1

DEFAULT = "default"
"""The arm of the kernel as it is, which never leaves."""

MOST_ARMS = 500
"""That are raced one by one unless that is asked for: of more, a search proposes some."""

MOST_EXHAUSTIVE = 5000
"""That are raced one by one where it is asked for."""

_MOST_COMBINATIONS = 1_000_000
_MOST_VALUES = 64

_NAME = re.compile(r"[A-Za-z_]\w*")

_KEYS = frozenset(("schema_version", "name", "description", "kernel", "where", "regions", "space", "launch"))
_LAUNCH_KEYS = ("threads", "shared_bytes", "shared_bytes_per_head_dim")


@dataclass(frozen=True)
class Arm:
    """One configuration."""

    name: str
    """``BLOCK_M=64, WARPS=4``, or ``default``."""
    settings: Mapping[str, Value]
    """By parameter; none of the default."""


@dataclass(frozen=True)
class Space:
    """What is searched."""

    path: Path
    name: str
    kernel: str
    """The path of a kernel's TOML file, or the name of one of the library's kernels, ``cudadent42[portable]``."""
    operation: str
    """Of the kernel in a file; empty for the library's, where the suite says it."""
    parameters: Mapping[str, tuple[Value, ...]]
    where: tuple[Expression, ...]
    launch: Mapping[str, Expression]
    """How the launch of a kernel's file follows from the settings, where it does: ``threads`` and the like."""
    regions: tuple[str, ...]
    """Fields of a case along which neighbouring cases with one winner are joined."""
    digest: str
    """SHA-256 of the file."""

    @property
    def of_library(self) -> bool:
        return not is_kernel_file(self.kernel)

    @property
    def combinations(self) -> int:
        return math.prod(len(values) for values in self.parameters.values())

    def arms(self, most: int = MOST_ARMS) -> tuple[Arm, ...]:
        """The default, and every combination that the conditions admit, in the file's order. Raises UsageError where
        none is left, or more than ``most`` are."""
        arms = tuple(itertools.islice(self.configurations(), most + 1))
        if len(arms) > most:
            raise UsageError(
                f"{self.path}: more than {most} configurations meet `where`; shorten the lists, add a condition, "
                "or let a search propose some with --search optuna"
            )
        if not arms:
            raise UsageError(f"{self.path}: no configuration meets `where`; loosen a condition")
        return (Arm(DEFAULT, {}), *arms)

    def configurations(self) -> Iterator[Arm]:
        """Every combination that the conditions admit, in the file's order, without the default."""
        for values in itertools.product(*self.parameters.values()):
            settings = dict(zip(self.parameters, values, strict=True))
            if self.admits(settings):
                yield self.arm(settings)

    def admits(self, settings: Mapping[str, Value]) -> bool:
        """Whether a combination meets the conditions."""
        return all(condition.value(settings) for condition in self.where)

    def arm(self, settings: Mapping[str, Value]) -> Arm:
        """The arm of a value for each parameter."""
        ordered = {name: settings[name] for name in self.parameters}
        return Arm(", ".join(f"{name}={shown(value)}" for name, value in ordered.items()), ordered)


def shown(value: Value) -> str:
    """As a space and a variant's brackets write it."""
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"


def load(path: Path) -> Space:
    """The space at ``path``. Raises UsageError, with the place, where it says nothing that makes sense."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the space {path}: {reason}; expected a TOML file") from error
    return parse_space(text, path)


def parse_space(text: str, path: Path) -> Space:
    """``load`` of a text that was read from ``path``."""
    document = parse_toml(text, str(path))
    table = Table(document, str(path))
    table.check_keys(_KEYS)
    if table.integer("schema_version", 1, 1 << 30, None) > SCHEMA_VERSION:
        raise UsageError(f"{path}: schema_version is of a newer cudadent42; upgrade it")
    kernel, file = _kernel(table, path)
    parameters = _parameters(table, file)
    kinds = {name: kind_of(values[0]) for name, values in parameters.items()}
    return Space(
        path=path,
        name=table.name("name"),
        kernel=kernel,
        operation="" if file is None else file.operation,
        parameters=parameters,
        where=_conditions(table, document.get("where"), kinds),
        launch=_launch(table, kinds, file),
        regions=_regions(table, file),
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def unnamed(space: Space) -> tuple[str, ...]:
    """A sentence for each macro that no source of the kernel names: all its values would be the same code."""
    if space.of_library:
        return ()
    names: set[str] = set()
    for path in files_of(specification.load(Path(space.kernel)))[1:]:
        names.update(_NAME.findall(path.read_text(encoding="utf-8", errors="replace")))
    return tuple(
        f"neither the kernel's source nor a header beside it names {name}{did_you_mean(name, names)}; if no other "
        "header does, all its values are the same code"
        for name in space.parameters
        if name not in names
    )


def _kernel(table: Table, path: Path) -> tuple[str, Specification | None]:
    """Its name for the lab, and its file where it has one."""
    expected = f"the path of a kernel's TOML file, or one of the library's kernels, such as {OURS}[portable]"
    name: str = table.value("kernel", str, expected)
    if is_kernel_file(name):
        file = path.parent / name
        if not file.is_file():
            raise UsageError(f"{path}: kernel = {name!r}; no file {file}")
        return str(file), specification.load(file)
    if not (name.startswith(f"{OURS}[") and name.endswith("]")) or set(name) & {",", "="}:
        raise UsageError(f"{path}: kernel = {name!r}; expected {expected}")
    return name, None


def _parameters(table: Table, file: Specification | None) -> dict[str, tuple[Value, ...]]:
    lists = table.value("space", dict, "a table of names and lists of values, [space]")
    if not lists:
        raise UsageError(f"{table.where}: [space] is empty; expected at least one list of values")
    parameters = {name: _values(table, name, values) for name, values in lists.items()}
    for name, values in parameters.items():
        if not is_name(name) or (file is not None and "." in name):
            raise UsageError(
                f"{table.where}: {name!r} cannot name a parameter; expected letters, digits and _, and no word of an "
                "expression"
            )
        if file is not None and kind_of(values[0]) is not Kind.NUMBER:
            raise UsageError(f"{table.where}: {name} = {list(values)!r}; a macro is a whole number")
        if file is not None and name.startswith(specification.RESERVED):
            raise UsageError(f"{table.where}: macros that begin with {specification.RESERVED} are the lab's")
    if math.prod(len(values) for values in parameters.values()) > _MOST_COMBINATIONS:
        raise UsageError(
            f"{table.where}: [space] has more than {_MOST_COMBINATIONS:,} combinations; shorten a list"
        )
    return parameters


def _values(table: Table, name: str, values: Any) -> tuple[Value, ...]:
    expected = f"a list of up to {_MOST_VALUES} whole numbers, of true and false, or of words"
    kinds = {kind_of(value) for value in values} if _is_plain_list(values) else set()
    if len(kinds) != 1 or len(values) > _MOST_VALUES:
        raise UsageError(f"{table.where}: [space] {name} = {values!r}; expected {expected}")
    if len(set(values)) < len(values):
        raise UsageError(f"{table.where}: [space] {name} = {values!r} says a value twice")
    return tuple(values)


def _is_plain_list(values: Any) -> bool:
    return isinstance(values, list) and all(
        (type(value) is int and abs(value) <= 1 << 31) or type(value) in (bool, str) for value in values
    )


def _conditions(table: Table, given: Any, kinds: Mapping[str, Kind]) -> tuple[Expression, ...]:
    texts = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(
            f"{table.where}: where = {given!r}; expected an expression in quotes, or a list of them"
        )
    return tuple(parse(text, kinds, Kind.TRUTH, f"{table.where}, where") for text in texts)


def _launch(table: Table, kinds: Mapping[str, Kind], file: Specification | None) -> dict[str, Expression]:
    texts = table.value("launch", dict, "a table of expressions", {})
    if texts and (file is None or file.language is not Language.CUDA):
        raise UsageError(f"{table.where}: [launch] is for a kernel in a .cu file")
    inner = Table(texts, f"{table.where}, launch")
    inner.check_keys(_LAUNCH_KEYS)
    return {
        name: parse(
            inner.value(name, str, "an expression in quotes"), kinds, Kind.NUMBER, f"{inner.where}.{name}"
        )
        for name in texts
    }


def _regions(table: Table, file: Specification | None) -> tuple[str, ...]:
    names = table.strings("regions", [])
    if file is not None:
        ranges = range_fields(file.operation)
        for name in names:
            if name not in ranges:
                raise UsageError(
                    f"{table.where}: regions has {name!r}; expected some of {', '.join(ranges)}"
                    f"{did_you_mean(name, ranges)}"
                )
    return tuple(names)


def range_fields(operation: str) -> tuple[str, ...]:
    """Fields of an operation's cases that are whole numbers, over which a region can reach."""
    kinds = get_type_hints(definition(operation).case_type)
    return tuple(name for name, kind in kinds.items() if kind is int)
