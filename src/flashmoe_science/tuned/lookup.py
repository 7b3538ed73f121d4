"""The look into the tables, once for each new shape: a plan keeps what came of it."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flashmoe_science.tuned.table import TableEntry, TableError, Value, parse_table, shortened

SWITCH_VARIABLE = "FLASHMOE_TUNED"
"""``off``: no table is asked, and every kernel is configured by the usual choice."""

PACKAGE_FOLDER = Path(__file__).parent / "tables"

KERNELS_FOLDER = "kernels"
"""Beside a table: kernels in files of their own, with the settings of an entry."""

MOST_BYTES = 4 << 20
"""Of a table."""


@dataclass(frozen=True)
class TunedEntry:
    """An entry, and the table that it stands in."""

    entry: TableEntry
    table: Path

    @property
    def reason(self) -> str:
        """Where a configuration came from, for `explain`."""
        entry = self.entry
        return (
            f"tuned on {entry.device}: {entry.ratio:.3f}x the usual choice ({entry.low:.3f} to {entry.high:.3f}), "
            f"by {self.table}"
        )


def user_folder() -> Path | None:
    """``$XDG_CONFIG_HOME/flashmoe_science/tuned``, else the same under ``~/.config``; None without a home."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification: a relative path is invalid and to be ignored.
    if not base.startswith("/"):
        base = os.path.expanduser("~/.config")
    # Without HOME and an entry in the table of users the tilde stays, which in the current folder is anybody's.
    return Path(base) / "flashmoe_science" / "tuned" if base.startswith("/") else None


def folders() -> tuple[Path, ...]:
    """That tables lie in, those that are asked first first."""
    own = user_folder()
    return (PACKAGE_FOLDER,) if own is None else (own, PACKAGE_FOLDER)


def read_table(path: Path) -> tuple[TableEntry, ...]:
    """The entries of a table; none where the path leads to no file. Raises TableError where it cannot be read."""
    if not path.is_file():  # opening a pipe would wait for whoever writes into it
        return ()
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise TableError(f"{path} is larger than {MOST_BYTES >> 20} MiB; split it")
        return parse_table(content.decode(), str(path))
    except TableError:
        raise
    except (OSError, ValueError) as error:
        raise TableError(f"{path} cannot be read: {error}") from error


def switched_off() -> bool:
    return os.environ.get(SWITCH_VARIABLE, "").lower() in ("off", "0", "no")


def lookup(
    kernels: tuple[str, ...],
    digest: Callable[[str], str],
    device: str,
    multiprocessors: int,
    problem: Mapping[str, Value],
) -> Iterator[TunedEntry]:
    """The entries for one of these kernels whose regions hold the problem, in order; the user's tables come first.

    Args:
        kernels: names, as ``TableEntry.kernel``.
        digest: from one of them to the digest of its sources now; asked only where an entry fits otherwise.
        device: its name.
        multiprocessors: 0 on a CPU.

    An entry for other sources is ignored, with one warning. Of an entry that turns out to be of no use, the caller
    tells `warn_unusable` and takes the next.
    """
    if switched_off():
        return
    for tuned in entries():
        entry = tuned.entry
        if (
            entry.kernel in kernels
            and (entry.device, entry.multiprocessors) == (device, multiprocessors)
            and entry.region.holds(problem)
        ):
            if entry.digest == digest(entry.kernel):
                yield tuned
            else:
                _warn_of_other_sources(entry.kernel, tuned.table)


def warn_unusable(tuned: TunedEntry, reason: str) -> None:
    """Say that an entry is passed over: once for each, whatever the problem and the reason."""
    entry = tuned.entry
    _warn_once(
        _Unusable(tuned.table, entry.kernel, tuple(sorted(entry.settings.items())), entry.file, reason)
    )


@dataclass(frozen=True)
class _Unusable:
    table: Path
    kernel: str
    settings: tuple[tuple[str, Value], ...]
    file: str
    reason: str = field(compare=False)


@functools.cache
def _warn_once(unusable: _Unusable) -> None:
    settings = shortened(", ".join(f"{name} = {value!r}" for name, value in unusable.settings))
    warnings.warn(
        f"{unusable.table}: the entry of {unusable.kernel} with {settings or unusable.file or 'no settings'} is passed "
        f"over: {shortened(unusable.reason)}. Take it out, or run `cudadent42 tune` again",
        RuntimeWarning,
        stacklevel=4,
    )


@functools.cache
def entries() -> tuple[TunedEntry, ...]:
    """Of all tables, as they were when they were first asked. A table that cannot be read is left out, with a
    warning."""
    every: list[TunedEntry] = []
    for folder in folders():
        for path in sorted(folder.glob("*.toml")):
            try:
                every += [TunedEntry(entry, path) for entry in read_table(path)]
            except TableError as error:
                warnings.warn(f"tuned configurations are not used: {error}", RuntimeWarning, stacklevel=2)
    return tuple(every)


def refresh() -> None:
    """Read the tables again at the next look; plans that were made before stay."""
    entries.cache_clear()
    _warn_once.cache_clear()
    _warn_of_other_sources.cache_clear()


@functools.cache
def _warn_of_other_sources(kernel: str, table: Path) -> None:
    warnings.warn(
        f"{table} was tuned for other sources of {kernel}; its entries for that kernel are ignored until "
        f"`cudadent42 tune` is run again. {SWITCH_VARIABLE}=off asks no table",
        RuntimeWarning,
        stacklevel=3,
    )
