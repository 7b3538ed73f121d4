"""Winners as entries of the tables that the library and the lab ask (`flashmoe_science.tuned`)."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.errors import UnwritableError, UsageError
from cudadent42.base.files import write_text
from cudadent42.base.reading import read_bytes
from cudadent42.model.cases import is_plain, plain_fields
from cudadent42.tune.journal import Confirmed, Setup
from cudadent42.tune.regions import Area, Cell, areas
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import State
from flashmoe_science.tuned.lookup import KERNELS_FOLDER, read_table
from flashmoe_science.tuned.table import SCHEMA_VERSION, TableEntry, TableError

_DIGEST = re.compile("[0-9a-f]{64}")
_MOST_KERNEL_BYTES = 4 << 20


@dataclass(frozen=True)
class InstalledTable:
    path: Path
    entries: tuple[TableEntry, ...]
    """That were added."""


def winning_areas(state: State) -> list[Area]:
    """The regions of what is confirmed.

    A case that is not finished counts as one in which the default stays. One with strides or a scale of its own is left
    out: a table does not speak of them.
    """
    winners = {each.case: each.arm for each in state.winners}
    cells = [
        Cell(case.id, plain_fields(case), winners.get(case.id, DEFAULT))
        for case in state.setup.plan.cases
        if is_plain(case)
    ]
    return areas(cells, state.setup.regions, DEFAULT)


def least_certain(state: State, area: Area) -> Confirmed:
    """Of an area's cases the one that speaks for all: that with the lowest lower bound."""
    return min((each for each in state.winners if each.case in area.cases), key=lambda each: each.low)


def entries_of(state: State, name: str) -> tuple[TableEntry, ...]:
    """The entries of a tuning called ``name``."""
    setup = state.setup
    confirmed = {each.case: each for each in state.winners}
    entries = []
    for area in winning_areas(state):
        runs: list[Confirmed] = [confirmed[case] for case in area.cases]
        least = least_certain(state, area)
        settings = setup.settings[area.winner]
        in_file = setup.kernel.startswith("file:")
        entries.append(
            TableEntry(
                kernel=setup.kernel,
                digest=setup.kernel_digest,
                device=setup.device.name,
                multiprocessors=setup.device.multiprocessors,
                region=area.region,
                settings=settings,
                ratio=round(least.ratio, 4),
                low=round(least.low, 4),
                high=round(least.high, 4),
                evidence=tuple(f"{name}/{run}" for each in runs for run in each.evidence or (each.run,)),
                file=_name_in_tables(setup, area.winner) if in_file else "",
            )
        )
    return tuple(entries)


def install(state: State, tuning: Path, folder: Path) -> InstalledTable:
    """Put what is confirmed into the table of its kernel and device in ``folder``.

    Entries for other sources make room, and those whose region holds a case whose race and confirmation are over: of a
    case that a budget kept from its end, nothing newer is known. Raises UsageError where nothing is confirmed, or the
    table that is there cannot be read.
    """
    setup = state.setup
    new = entries_of(state, tuning.name)
    if not new:
        raise UsageError(
            f"{tuning}: no configuration is confirmed to be faster, so there is nothing to install"
        )
    # A tuning that was brought from elsewhere says what it likes, and its digest becomes part of a file's name.
    if not _DIGEST.fullmatch(setup.kernel_digest):
        raise UsageError(
            f"{tuning}: kernel_digest is {reprlib.repr(setup.kernel_digest)}; expected a SHA-256"
        )
    path = folder / f"{_slug(setup.kernel)}-{_slug(setup.device.name)}.toml"
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for entry, area in zip(new, winning_areas(state), strict=True):
        if entry.file:
            content = _kernel_file(Path(setup.arms[area.winner]))
            with _writable(folder):
                (folder / KERNELS_FOLDER).mkdir(exist_ok=True)
                (folder / KERNELS_FOLDER / entry.file).write_bytes(content)
    raced = [
        plain_fields(case) for case in setup.plan.cases if is_plain(case) and state.cases[case.id].finished
    ]
    kept = tuple(
        entry
        for entry in _existing(path)
        if entry.digest == setup.kernel_digest and not any(entry.region.holds(each) for each in raced)
    )
    with _writable(folder):
        write_text(path, table_text((*new, *kept)))
    return InstalledTable(path, new)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Turn a failed write into what is to be done about a folder of tables."""
    try:
        yield
    except (OSError, UnwritableError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else error
        raise UnwritableError(
            f"cannot write a table to {folder}: {reason}; free some space there, or set XDG_CONFIG_HOME to a folder "
            "that can be written"
        ) from error


def _name_in_tables(setup: Setup, arm: str) -> str:
    """Of the file of a kernel's winner. Spaces whose launches differ have other files for equal settings, so the name
    goes by what the file says."""
    path = Path(setup.arms[arm])
    return (
        f"{setup.kernel_digest[:12]}-{path.stem}-{hashlib.sha256(_kernel_file(path)).hexdigest()[:12]}.toml"
    )


def _kernel_file(path: Path) -> bytes:
    try:
        return read_bytes(path, _MOST_KERNEL_BYTES)
    except OSError as error:
        raise UsageError(f"{path}, a kernel of the tuning, cannot be read: {error.strerror}") from error


def _existing(path: Path) -> Sequence[TableEntry]:
    try:
        return read_table(path)
    except TableError as error:
        raise UsageError(f"{error}; mend or remove the table") from error


def table_text(entries: Sequence[TableEntry]) -> str:
    """A table, as `parse_table` reads it."""
    blocks = [
        "# Written by `cudadent42 tune install`: configurations that were raced and confirmed to be faster.",
        f"schema_version = {SCHEMA_VERSION}",
    ]
    for entry in entries:
        lines = [
            "",
            "[[entry]]",
            f"kernel = {_text(entry.kernel)}",
            f"digest = {_text(entry.digest)}",
            f"device = {_text(entry.device)}",
            f"multiprocessors = {entry.multiprocessors}",
            f"settings = {_inline(entry.settings)}",
            f"same = {_inline(entry.region.same)}",
            f"between = {_inline({name: list(ends) for name, ends in entry.region.between.items()})}",
            f"ratio = {entry.ratio!r}",
            f"interval = [{entry.low!r}, {entry.high!r}]",
            f"evidence = [{', '.join(map(_text, entry.evidence))}]",
        ]
        blocks += [*lines, *([f"file = {_text(entry.file)}"] if entry.file else [])]
    return "\n".join(blocks) + "\n"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _inline(values: Mapping[str, object]) -> str:
    return "{ " + ", ".join(f"{_text(name)} = {_plain(value)}" for name, value in values.items()) + " }"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _text(value) if isinstance(value, str) else str(value)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
