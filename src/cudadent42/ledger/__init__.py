"""The ledger: a database of all runs and sessions, derived from their folders.

This module needs no database package; what it calls does, and says which extra brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cudadent42.base.errors import LabError, MachineNotReadyError, UsageError
from cudadent42.ledger.location import locate
from cudadent42.ledger.remembered import remember
from flashmoe_science.jit.requirements import install_command

if TYPE_CHECKING:
    from cudadent42.ledger.database import Ledger
    from cudadent42.ledger.store import Rebuilt

REBUILD = "`cudadent42 ledger rebuild` puts it in later"


def record(folder: Path, named: str | None = None) -> str | None:
    """Put a run folder into the ledger. Never raises for the ledger's sake: the run is in its folder, whole.

    ``named`` is a path or URL instead of the configured one. Where SQLAlchemy is not installed only the folder's place
    is kept, for a later rebuild.

    Returns:
        None, or a sentence about why the ledger lacks this, with the remedy.
    """
    return _entered(folder, named, session=False)


def record_session(folder: Path, named: str | None = None) -> str | None:
    """Put a session folder into the ledger as it is now, without its runs; otherwise as `record`."""
    return _entered(folder, named, session=True)


def _entered(folder: Path, named: str | None, *, session: bool) -> str | None:
    location = locate(named)
    if location is None:
        return None
    with suppress(UsageError):  # only the ledger's second memory; the ledger itself says what it cannot do
        remember(location, [folder])
    if not is_installed():
        return None
    from cudadent42.ledger import store
    from cudadent42.ledger.database import DamagedLedgerError

    write = store.record_session if session else store.record
    try:
        write(location, folder)
    except DamagedLedgerError as error:  # which says the remedy itself
        return f"{folder.name} is not in the ledger: {error}"
    except LabError as error:
        return f"{folder.name} is not in the ledger: {error}; {REBUILD}"
    return None


def rebuild(
    named: str | None = None,
    roots: Sequence[Path] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rebuilt:
    """Make the ledger again from every run and session folder below ``roots``, and those that it was told of; see
    `store.rebuild`.

    Raises LabError where there is no ledger to write, or a root is not a folder.
    """
    location = require_location(named)
    from cudadent42.ledger import store

    return store.rebuild(location, roots, on_progress)


def require_location(named: str | None = None) -> Path | str:
    """Where the ledger is. Raises MachineNotReadyError where it is switched off or SQLAlchemy is missing."""
    location = locate(named)
    if location is None:
        raise MachineNotReadyError(
            "no ledger is kept (CUDADENT42_LEDGER=none); unset that, or name one with --ledger"
        )
    if not is_installed():
        raise MachineNotReadyError(f"the ledger needs SQLAlchemy: {install_command('ledger')}")
    return location


def open_for_reading(named: str | None = None) -> Ledger:
    """The ledger as it is. Raises LabError where there is none, or it cannot be used.

    What needs SQLAlchemy is imported after this, which says so where it is missing.
    """
    location = require_location(named)
    from cudadent42.ledger.database import connect, exists, name_of

    opened = connect(location) if exists(location) else None
    if opened is None or opened.is_empty():
        raise UsageError(
            f"there is no ledger at {name_of(location)} yet; runs enter it as they end, "
            "and `cudadent42 ledger rebuild` reads the existing ones"
        )
    opened.require_version()
    return opened


def is_installed() -> bool:
    return find_spec("sqlalchemy") is not None
