"""What `tune install` and `tune check` do: put winners into a table, and look through the tables that there are."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.processor import cpu_name
from cudadent42.native import specification
from cudadent42.native.tuned import sources_digest, table_name
from cudadent42.operations import definition, names
from cudadent42.tune import journal as events
from cudadent42.tune.journal import TuningJournal, read
from cudadent42.tune.space import DEFAULT
from cudadent42.tune.state import fold
from cudadent42.tune.table import InstalledTable, install
from flashmoe_science.tuned.lookup import (
    KERNELS_FOLDER,
    PACKAGE_FOLDER,
    SWITCH_VARIABLE,
    folders,
    read_table,
    refresh,
    switched_off,
    user_folder,
)
from flashmoe_science.tuned.table import TableEntry, TableError

_OTHER_SOURCES = "tuned for other sources of the kernel; tune it again"


def install_tuning(folder: Path, *, package: bool) -> InstalledTable:
    """What the tuning in ``folder`` confirmed, into the user's table or, for whoever works on this package, its own.

    Raises UsageError where nothing is confirmed, where the kernel's sources changed since, or where a kernel in a file
    of its own is to go into the package.
    """
    setup, entries = read(folder)
    state = fold(setup, entries)
    if _digest_now(setup) not in ("", setup.kernel_digest):
        raise UsageError(
            f"{folder}: the sources of {setup.kernel} changed since it was tuned, so no call would take what is "
            "installed; put the former back, or tune it again"
        )
    if package and setup.kernel.startswith("file:"):
        raise UsageError(
            f"{folder} is of a kernel in a file of its own; only the library's go into the package"
        )
    target = PACKAGE_FOLDER if package else user_folder()
    if target is None:
        raise UsageError(
            "there is no home directory to install into; set HOME or XDG_CONFIG_HOME to a folder of yours"
        )
    with TuningJournal(folder, setup) as journal:
        table = install(state, folder, target)
        journal.append(events.Installed(str(table.path), len(table.entries)))
    refresh()
    return table


def _digest_now(setup: events.Setup) -> str:
    """Of the tuned kernel's sources as they are; empty where they are not here."""
    if setup.kernel.startswith("file:"):
        try:
            return sources_digest(specification.load(Path(setup.arms[DEFAULT])))
        except (UsageError, OSError):
            return ""
    return _digest_of_library(setup.kernel)


def _digest_of_library(kernel: str) -> str:
    """Of the sources of one of the library's kernels, as tables name it; empty for one that is not there."""
    for operation in names():
        tuned = definition(operation).tuned()
        if tuned is not None and kernel in tuned.names():
            return tuned.digest(kernel)
    return ""


@dataclass(frozen=True)
class CheckedEntry:
    """One entry of a table that is here."""

    table: str
    kernel: str
    device: str
    ratio: float
    low: float
    high: float
    problem: str
    """Why it is not used; empty where it is."""


def check() -> tuple[CheckedEntry, ...]:
    """Every entry of every table, and whether calls of this machine take it: its kernel has the sources that were
    tuned, and its device is here."""
    checked: list[CheckedEntry] = []
    for folder in folders():
        for path in sorted(folder.glob("*.toml")):
            try:
                entries = read_table(path)
            except TableError as error:
                checked.append(CheckedEntry(str(path), "", "", 0.0, 0.0, 0.0, str(error)))
                continue
            for entry in entries:
                checked.append(
                    CheckedEntry(
                        str(path),
                        entry.kernel,
                        entry.device,
                        entry.ratio,
                        entry.low,
                        entry.high,
                        _problem(entry, path),
                    )
                )
    return tuple(checked)


def _problem(entry: TableEntry, table: Path) -> str:
    """The first of all there are."""
    if switched_off():
        return f"{SWITCH_VARIABLE}={os.environ[SWITCH_VARIABLE]} asks no table"
    return _problem_of_sources(entry, table) or _problem_of_device(entry)


def _problem_of_device(entry: TableEntry) -> str:
    if (entry.device, entry.multiprocessors) in _devices():
        return ""
    return "this machine has another device"


@functools.cache
def _devices() -> frozenset[tuple[str, int]]:
    """Names and multiprocessors of what this machine has, as tables say them."""
    import torch

    from flashmoe_science.cuda.device import device_of

    gpus = [device_of(index) for index in range(torch.cuda.device_count())]
    return frozenset({(cpu_name(), 0), *((gpu.name, gpu.multiprocessors) for gpu in gpus)})


def _problem_of_sources(entry: TableEntry, table: Path) -> str:
    if entry.kernel.startswith("file:"):
        return _problem_of_file(entry, table)
    digest = _digest_of_library(entry.kernel)
    if not digest:
        return f"there is no kernel {entry.kernel!r}"
    return "" if digest == entry.digest else _OTHER_SOURCES


def _problem_of_file(entry: TableEntry, table: Path) -> str:
    """Where the kernel's own file lies is not on record, but its source is: it is looked for beside that. If it is not
    there, what can be told is whether the file of its settings is whole."""
    path = table.parent / KERNELS_FOLDER / entry.file
    try:
        source = specification.load(path).source
    except UsageError as error:
        return str(error)
    digests = []
    for beside in sorted(source.parent.glob("*.toml")):
        with suppress(UsageError, OSError):
            kernel = specification.load(beside)
            if table_name(kernel) == entry.kernel and kernel.source.samefile(source):
                digests.append(sources_digest(kernel))
    return _OTHER_SOURCES if digests and entry.digest not in digests else ""
