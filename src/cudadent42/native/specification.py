"""The TOML file of a kernel: what to compile, for which cases, and how to launch it. Data only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from cudadent42.base.errors import NewerVersionError, UsageError
from cudadent42.base.paths import real_path
from cudadent42.base.reading import read_text
from cudadent42.base.toml import Table, did_you_mean, parse_toml
from cudadent42.model.cases import DEFAULT_OPERATION
from cudadent42.operations import names
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.suites.loader import parse_dtype
from flashmoe_science.jit.limits import LIMITS, MAX_THREADS_PER_BLOCK

SCHEMA_VERSION = 1
ABI_VERSION = 1
"""CUDADENT42_ABI_VERSION of ``cudadent42/attention.h``."""

RESERVED = "CUDADENT42_"
"""Macros of this prefix are the lab's."""


class Language(Enum):
    CPP = ".cpp"
    CUDA = ".cu"


class Dimension(str, Enum):
    """What a grid may be made of."""

    BATCH = "batch"
    NUM_HEADS = "num_heads"
    NUM_KV_HEADS = "num_kv_heads"
    SEQLEN_Q = "seqlen_q"
    SEQLEN_K = "seqlen_k"
    HEAD_DIM = "head_dim"
    MULTIPROCESSORS = "multiprocessors"
    """Of the GPU: for kernels that stay on it."""


@dataclass(frozen=True)
class Factor:
    """``ceil(dimension / per)``."""

    dimension: Dimension
    per: int = 1


Grid = tuple[tuple[Factor, ...], tuple[Factor, ...], tuple[Factor, ...]]
"""Blocks in x, y and z: each the product of its factors, 1 without any."""


@dataclass(frozen=True)
class Target:
    """An entry of ``architectures``: ``sm_80`` is that and whatever is newer, ``sm_90a`` exactly that."""

    number: int
    suffix: str

    def admits(self, architecture: str) -> bool:
        number = int(architecture.removeprefix("sm_").rstrip("af"))
        return number == self.number if self.suffix else number >= self.number


@dataclass(frozen=True)
class Configuration:
    """One way to compile and launch the source."""

    dtypes: tuple[str, ...]
    """That it is for; empty: all of the kernel's."""
    head_dims: tuple[int, ...]
    targets: tuple[Target, ...]
    macros: Mapping[str, int]
    threads: int
    shared_bytes: int
    shared_bytes_per_head_dim: int
    grid: Grid

    def dynamic_shared_bytes(self, head_dim: int) -> int:
        return self.shared_bytes + self.shared_bytes_per_head_dim * head_dim

    def suits(self, dtype: str, head_dim: int, architecture: str | None) -> bool:
        """``architecture`` is None on a CPU."""
        return (
            (not self.dtypes or dtype in self.dtypes)
            and (not self.head_dims or head_dim in self.head_dims)
            and (
                architecture is None
                or not self.targets
                or any(target.admits(architecture) for target in self.targets)
            )
        )

    def compiled_for(self, architecture: str) -> str:
        """The target to compile for on a GPU of ``architecture`` (without suffix)."""
        exact = [target for target in self.targets if target.suffix and target.admits(architecture)]
        return architecture + exact[0].suffix if exact else architecture


@dataclass(frozen=True)
class Specification:
    """One kernel file."""

    path: Path
    name: str
    description: str
    operation: str
    source: Path
    language: Language
    entry: str
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    """Empty: any."""
    causal: bool
    """Whether it does causal masks."""
    grouped_heads: bool
    seqlen_q_multiple: int
    seqlen_k_multiple: int
    toolkit_headers: bool
    configurations: tuple[Configuration, ...]

    @property
    def device(self) -> str:
        """The kind of device that it runs on."""
        return "cuda" if self.language is Language.CUDA else "cpu"

    def why_not(self, case: AttentionCase, architecture: str | None) -> str | None:
        """The reason why the kernel does not do a case, or None."""
        if case.dtype not in self.dtypes:
            return f"{self.name} takes {', '.join(self.dtypes)}, not {case.dtype}"
        if self.head_dims and case.head_dim not in self.head_dims:
            return f"{self.name} takes head_dim {', '.join(map(str, self.head_dims))}, not {case.head_dim}"
        if case.causal and not self.causal:
            return f"{self.name} does no causal mask"
        if case.num_heads != case.num_kv_heads and not self.grouped_heads:
            return f"{self.name} does no grouped heads"
        for name, length, multiple in (
            ("seqlen_q", case.seqlen_q, self.seqlen_q_multiple),
            ("seqlen_k", case.seqlen_k, self.seqlen_k_multiple),
        ):
            if length % multiple:
                return f"{self.name} takes a {name} that is a multiple of {multiple}, not {length}"
        if self.find(case.dtype, case.head_dim, architecture) is None:
            where = f" on {architecture}" if architecture else ""
            return f"{self.name} has no configuration for {case.dtype} and head_dim {case.head_dim}{where}"
        return None

    def find(self, dtype: str, head_dim: int, architecture: str | None) -> Configuration | None:
        """The first configuration that suits, as they stand in the file."""
        for configuration in self.configurations:
            if configuration.suits(dtype, head_dim, architecture):
                return configuration
        return None


_KEYS = frozenset(
    (
        *(
            "schema_version",
            "abi",
            "name",
            "description",
            "operation",
            "source",
            "entry",
            "dtypes",
            "head_dims",
        ),
        *("causal", "grouped_heads", "seqlen_q_multiple", "seqlen_k_multiple", "toolkit_headers"),
        "configuration",
    )
)
_CPU_KEYS = frozenset(("dtypes", "head_dims", "macros"))
_CUDA_KEYS = _CPU_KEYS | {"architectures", "threads", "shared_bytes", "shared_bytes_per_head_dim", "grid"}
_FACTOR_KEYS = frozenset(("dimension", "per"))
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_TARGET = re.compile(r"sm_(\d{2,3})([af]?)")
_MOST_SHARED = 1 << 20
_MOST_HEAD_DIM = 512
_MOST_MACRO = 1 << 31


def load(path: Path) -> Specification:
    """The specification at ``path``. Raises UsageError, with the place, where it says nothing that makes sense."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the kernel {path}: {reason}; expected a TOML file") from error
    return parse(text, path)


def parse(text: str, path: Path) -> Specification:
    """``load`` of a text that was read from ``path``."""
    where = str(path)
    document = parse_toml(text, where)
    table = Table(document, where)
    _check_versions(table)
    table.check_keys(_KEYS)
    operation = table.word("operation", names(), DEFAULT_OPERATION)
    if operation != AttentionCase.operation:
        raise UsageError(f"{where}: kernels in files of their own are for attention so far, not {operation}")
    source = _source(table, path)
    language = Language(source.suffix)
    dtypes = _dtypes(table, ["fp16", "bf16"] if language is Language.CUDA else ["fp32"])
    head_dims = _head_dims(table)
    items = table.value("configuration", list, "a list, each entry beginning with [[configuration]]", [{}])
    return Specification(
        path=path,
        name=table.name("name"),
        description=table.value("description", str, "text", ""),
        operation=operation,
        source=source,
        language=language,
        entry=_identifier(table, "entry"),
        dtypes=dtypes,
        head_dims=head_dims,
        causal=table.value("causal", bool, "true or false", True),
        grouped_heads=table.value("grouped_heads", bool, "true or false", True),
        seqlen_q_multiple=table.integer("seqlen_q_multiple", 1, 1 << 16, 1),
        seqlen_k_multiple=table.integer("seqlen_k_multiple", 1, 1 << 16, 1),
        toolkit_headers=table.value("toolkit_headers", bool, "true or false", False),
        configurations=tuple(
            _configuration(item, f"{where}, configuration {number}", language)
            for number, item in enumerate(items or [{}], 1)
        ),
    )


def _check_versions(table: Table) -> None:
    for key, newest in (("schema_version", SCHEMA_VERSION), ("abi", ABI_VERSION)):
        version = table.integer(key, 1, 1 << 30, None)
        if version > newest:
            raise NewerVersionError(
                f"{table.where}: {key} = {version}, of a newer cudadent42; this one knows up to {newest}: upgrade it"
            )


def _source(table: Table, path: Path) -> Path:
    name: str = table.value("source", str, "the name of a .cu or .cpp file")
    source = path.parent / name
    if source.suffix not in {language.value for language in Language}:
        raise UsageError(f"{table.where}: source = {name!r}; expected a .cu or .cpp file")
    if not source.is_file():
        raise UsageError(f"{table.where}: source = {name!r}; no file {source}")
    return real_path(source)


def _dtypes(table: Table, default: list[str]) -> tuple[str, ...]:
    return tuple(parse_dtype(text, table.where).value for text in table.strings("dtypes", default))


def _head_dims(table: Table) -> tuple[int, ...]:
    expected = f"a list of whole numbers from 8 to {_MOST_HEAD_DIM}"
    head_dims = table.value("head_dims", list, expected, [])
    if not all(type(item) is int and 8 <= item <= _MOST_HEAD_DIM for item in head_dims):
        raise UsageError(f"{table.where}: head_dims = {head_dims!r}; expected {expected}")
    return tuple(head_dims)


def _identifier(table: Table, key: str) -> str:
    name: str = table.value(key, str, 'the name of the extern "C" function')
    if not _IDENTIFIER.fullmatch(name):
        raise UsageError(f"{table.where}: {key} = {name!r}; expected the name of a C function")
    return name


def _configuration(item: Any, where: str, language: Language) -> Configuration:
    if not isinstance(item, dict):
        raise UsageError(f"{where}: expected a table, found {item!r}")
    table = Table(item, where)
    cuda = language is Language.CUDA
    if not cuda and (misplaced := sorted(set(item) & (_CUDA_KEYS - _CPU_KEYS))):
        raise UsageError(
            f"{where}: {misplaced[0]!r} is of GPU kernels; this source is a {language.value} file"
        )
    table.check_keys(_CUDA_KEYS if cuda else _CPU_KEYS)
    macros = _macros(table)
    return Configuration(
        dtypes=_dtypes(table, []),
        head_dims=_head_dims(table),
        targets=_targets(table) if cuda else (),
        macros=macros,
        threads=table.integer("threads", 1, MAX_THREADS_PER_BLOCK, None) if cuda else 0,
        shared_bytes=table.integer("shared_bytes", 0, _MOST_SHARED, 0) if cuda else 0,
        shared_bytes_per_head_dim=table.integer("shared_bytes_per_head_dim", 0, _MOST_SHARED, 0)
        if cuda
        else 0,
        grid=_grid(table, macros) if cuda else ((), (), ()),
    )


def _macros(table: Table) -> Mapping[str, int]:
    macros = table.value("macros", dict, "a table of names and whole numbers", {})
    for name, number in macros.items():
        if not _IDENTIFIER.fullmatch(name) or name.startswith(RESERVED):
            raise UsageError(
                f"{table.where}: the macro {name!r}; expected a C name that does not begin with {RESERVED}"
            )
        if type(number) is not int or abs(number) > _MOST_MACRO:
            raise UsageError(f"{table.where}: the macro {name} = {number!r}; expected a whole number")
    return dict(macros)


def _targets(table: Table) -> tuple[Target, ...]:
    targets = []
    for text in table.strings("architectures", []):
        match = _TARGET.fullmatch(text)
        if match is None or f"sm_{match[1]}" not in LIMITS:
            raise UsageError(
                f"{table.where}: the architecture {text!r}; expected one of {', '.join(LIMITS)}, "
                f"with a or f for exactly that one{did_you_mean(text, LIMITS)}"
            )
        targets.append(Target(int(match[1]), match[2]))
    return tuple(targets)


def _grid(table: Table, macros: Mapping[str, int]) -> Grid:
    entries = table.value("grid", dict, 'a table with x, y and z, such as { x = ["num_heads"] }')
    grid = Table(entries, f"{table.where}, grid")
    grid.check_keys(("x", "y", "z"))
    if not entries:
        raise UsageError(f"{grid.where}: expected at least x")
    x, y, z = (
        tuple(
            _factor(item, f"{grid.where}.{axis}", macros)
            for item in grid.value(axis, list, "a list of dimensions", [])
        )
        for axis in ("x", "y", "z")
    )
    return x, y, z


def _factor(item: Any, where: str, macros: Mapping[str, int]) -> Factor:
    """A dimension's name, or a table of one and the number, or the macro, that it is divided by."""
    if isinstance(item, str):
        item = {"dimension": item}
    if not isinstance(item, dict):
        raise UsageError(f"{where}: {item!r}; expected a dimension, or {{ dimension = ..., per = ... }}")
    table = Table(item, where)
    table.check_keys(_FACTOR_KEYS)
    words = [dimension.value for dimension in Dimension]
    name = table.value("dimension", str, f"one of {', '.join(words)}")
    if name not in words:
        raise UsageError(
            f"{where}: unknown dimension {name!r}; expected one of {', '.join(words)}{did_you_mean(name, words)}"
        )
    per = item.get("per", 1)
    if isinstance(per, str):
        if per not in macros:
            raise UsageError(
                f"{where}: per = {per!r} is no macro of this configuration{did_you_mean(per, macros)}; "
                f"it has {', '.join(macros) or 'none'}"
            )
        per = macros[per]
    if type(per) is not int or per < 1:
        raise UsageError(f"{where}: per = {per!r}; expected a whole number from 1 on, or the name of a macro")
    return Factor(Dimension(name), per)
