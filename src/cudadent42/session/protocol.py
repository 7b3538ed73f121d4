"""What a session does and in which order: checkpoints with minutes and gates, from TOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any

from cudadent42.base.errors import NewerVersionError, UsageError
from cudadent42.base.reading import open_file
from cudadent42.base.toml import Table, did_you_mean, parse_toml

SCHEMA_VERSION = 1
DEFAULT = "default"

MAX_MINUTES = 7 * 24 * 60
_TOP_KEYS = frozenset(
    ("schema_version", "name", "description", "budget_minutes", "profile_below", "checkpoint")
)
_CHECKPOINT_KEYS = frozenset(("name", "work", "minutes", "gates", "goal"))
_FILE_LIMIT = 256 * 1024


class Work(str, Enum):
    """What is done at a checkpoint."""

    MEASURE = "measure"
    """The whole suite against its baseline."""
    PROFILE = "profile"
    """What limits the slowest case of the last measured run."""
    CHANGE = "change"
    """Race one change of the source after another against its parent."""
    DOCUMENT = "document"
    """Notes, and the report."""


@dataclass(frozen=True)
class Checkpoint:
    name: str
    work: Work
    minutes: float
    """Planned."""
    gates: str
    """Name of built-in gates or path of a gate file; empty: only that the work is done."""
    goal: str
    """One sentence, for the user."""


@dataclass(frozen=True)
class Protocol:
    name: str
    description: str
    checkpoints: tuple[Checkpoint, ...]
    budget_minutes: float
    """The session stops here; by default the sum of the checkpoints' minutes."""
    profile_below: float
    """Below this speed-up nothing is changed before it was profiled."""


def load(name_or_path: str) -> tuple[Protocol, str]:
    """The built-in protocol of that name or the file at that path (with a slash or ``.toml``), and its text."""
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        text = read_text(Path(name_or_path), "the protocol")
        return parse(text, name_or_path), text
    builtin = _builtin()
    if name_or_path not in builtin:
        raise UsageError(
            f"unknown protocol {name_or_path!r}; expected one of {', '.join(builtin)}, or the path of a TOML file"
            + did_you_mean(name_or_path, builtin)
        )
    return parse(builtin[name_or_path], f"protocol {name_or_path}"), builtin[name_or_path]


def gate_text(name_or_path: str, beside: Path) -> str:
    """The text of a checkpoint's gates: those that come with sessions, those of ``cudadent42 gate``, or a file, whose
    path is relative to the folder of the protocol."""
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        return read_text(beside / name_or_path, "the gates")
    from cudadent42.stages.gates import builtin_gates

    available = {**builtin_gates(), **_data("gates")}
    if name_or_path not in available:
        raise UsageError(
            f"unknown gates {name_or_path!r}; expected one of {', '.join(sorted(available))}, "
            "or the path of a TOML file" + did_you_mean(name_or_path, available)
        )
    return available[name_or_path]


def parse(text: str, where: str) -> Protocol:
    """A protocol from its TOML; ``where`` names it in errors. Raises UsageError where it is wrong."""
    document = parse_toml(text, where)
    table = Table(document, where)
    schema = table.integer("schema_version", 1, 1 << 30, None)
    if schema > SCHEMA_VERSION:
        raise NewerVersionError(
            f"{where} was written for a newer cudadent42 (schema {schema}); "
            f"this one reads up to {SCHEMA_VERSION}: upgrade it"
        )
    table.check_keys(_TOP_KEYS)
    items = table.value("checkpoint", list, "a list of checkpoints, each beginning with [[checkpoint]]")
    if not items:
        raise UsageError(f"{where}: expected at least one [[checkpoint]]")
    checkpoints = tuple(_checkpoint(item, f"{where}, checkpoint {i + 1}") for i, item in enumerate(items))
    _check_order(checkpoints, where)
    return Protocol(
        name=table.name("name"),
        description=table.value("description", str, "text", ""),
        checkpoints=checkpoints,
        budget_minutes=_number(
            document, "budget_minutes", where, MAX_MINUTES, sum(c.minutes for c in checkpoints)
        ),
        profile_below=_number(document, "profile_below", where, 1e6, 0.5),
    )


def _check_order(checkpoints: tuple[Checkpoint, ...], where: str) -> None:
    names = [checkpoint.name for checkpoint in checkpoints]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{where}: the checkpoint {twice!r} is given twice")
    if checkpoints[0].work is not Work.MEASURE:
        raise UsageError(
            f"{where}: the first checkpoint is {checkpoints[0].work.value!r}; expected 'measure': "
            "without a baseline nothing that follows can be judged"
        )


def _checkpoint(item: object, where: str) -> Checkpoint:
    if not isinstance(item, dict):
        raise UsageError(f"{where}: expected a table, found {item!r}")
    table = Table(item, where)
    name = table.name("name")
    table = Table(item, f"{where} ({name})")
    table.check_keys(_CHECKPOINT_KEYS)
    return Checkpoint(
        name=name,
        work=_work(item, table.where),
        minutes=_number(item, "minutes", table.where, MAX_MINUTES, None),
        gates=table.value("gates", str, "the name of gates or the path of a gate file", ""),
        goal=table.value("goal", str, "text", ""),
    )


def _work(item: Mapping[str, Any], where: str) -> Work:
    words = [work.value for work in Work]
    if item.get("work") not in words:
        raise UsageError(f"{where}: work = {item.get('work')!r}; expected {', '.join(words)}")
    return Work(item["work"])


def _number(item: Mapping[str, Any], key: str, where: str, high: float, default: float | None) -> float:
    """A number above 0 and up to ``high``; a default of None makes the key required."""
    value = item.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= high:
        raise UsageError(f"{where}: {key} = {value!r}; expected a number above 0 and up to {high:g}")
    return float(value)


def read_text(path: Path, what: str) -> str:
    """A small text file. Raises UsageError where it cannot be read."""
    try:
        with open_file(path) as file:
            data = file.read(_FILE_LIMIT + 1)
        if len(data) > _FILE_LIMIT:
            raise UsageError(f"{what} {path} is larger than {_FILE_LIMIT // 1024} KiB; expected a TOML file")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read {what} {path}: {reason}; expected a TOML file") from error


def _builtin() -> dict[str, str]:
    return _data("protocols")


def _data(kind: str) -> dict[str, str]:
    folder = resources.files("cudadent42.session") / "data" / kind
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }
