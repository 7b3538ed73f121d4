"""A tuning on this machine, opened and led to its end or to a limit."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from cudadent42.base.observer import Observer
from cudadent42.tune import space as spaces
from cudadent42.tune.arms import materialise
from cudadent42.tune.coordinator import Coordinator, Limits
from cudadent42.tune.journal import TuningJournal
from cudadent42.tune.machine import ThisMachine, devices
from cudadent42.tune.opening import Opened, untuned
from cudadent42.tune.report.page import write
from cudadent42.tune.state import State


def go_on(opened: Opened, limits: Limits, observer: Observer, *, audits: bool = True, gpus: int = 1) -> State:
    """The tuning from where it stands, on so many GPUs of this machine.

    Raises LabError; what was measured until then is on record.
    """
    setup, folder = opened.setup, opened.folder
    names = devices(setup.plan, gpus)
    with untuned(), TuningJournal(folder, setup) as journal, ExitStack() as stack:
        engines = [
            stack.enter_context(
                ThisMachine(setup, folder, opened.machine, observer, audits=audits, device=device)
            )
            for device in names
        ]
        space = spaces.load(Path(setup.space))
        materialise(space, space.arms(), folder.resolve())
        coordinator = Coordinator(folder, journal, setup, limits, observer)
        try:
            return coordinator.run(*engines)
        finally:
            write(folder)
