"""A tuning, opened and led to its end or to a limit: on this machine, or by a fleet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cudadent42.base.observer import Observer
from cudadent42.base.paths import real_path
from cudadent42.fleet.engine import Engine
from cudadent42.fleet.perform import untuned
from cudadent42.fleet.worker import tree_digest
from cudadent42.tune import space as spaces
from cudadent42.tune.coordinator import Coordinator, Limits, Proposer
from cudadent42.tune.fleet import FleetCoordinator
from cudadent42.tune.journal import TuningJournal
from cudadent42.tune.machine import ThisMachine
from cudadent42.tune.opening import Opened
from cudadent42.tune.report.page import write
from cudadent42.tune.state import State

Engines = Callable[[Path], Engine]
"""Starts the workers of a fleet, given the folder that the work is in."""


def go_on(opened: Opened, limits: Limits, observer: Observer, *, audits: bool = True) -> State:
    """The tuning from where it stands, on this machine. Raises LabError; what was measured until then is on record."""
    setup, folder = opened.setup, opened.folder
    with (
        untuned(),
        TuningJournal(folder, setup) as journal,
        ThisMachine(setup, folder, opened.machine, observer, audits=audits) as engine,
    ):
        proposer = _proposer(opened)
        try:
            return Coordinator(folder, journal, setup, limits, observer, proposer).run(engine)
        finally:
            write(folder)


def go_on_with(
    opened: Opened,
    engines: Engines,
    limits: Limits,
    observer: Observer,
    *,
    suite: str = "",
    audits: bool = True,
) -> State:
    """``go_on`` by a fleet, whose workers are started here. ``suite``: as the user named it."""
    setup, folder = opened.setup, opened.folder
    with untuned(), TuningJournal(folder, setup) as journal:
        coordinator = FleetCoordinator(
            folder,
            journal,
            setup,
            limits,
            observer,
            tree=tree_digest(),
            suite=suite,
            audits=audits,
            proposer=_proposer(opened),
        )
        here = ThisMachine(setup, folder, opened.machine, observer)
        try:
            return coordinator.run(engines(folder), here)
        finally:
            write(folder)


def _proposer(opened: Opened) -> Proposer | None:
    """Raises UsageError where the tuning searches and Optuna is not installed."""
    if opened.setup.search is None:
        return None
    from cudadent42.tune import search

    search.imported()
    space, folder = spaces.load(Path(opened.setup.space)), real_path(opened.folder)
    return lambda state: search.propose(space, state, folder)
