"""How a rented machine is, whoever provides it."""

from __future__ import annotations

from enum import Enum

from cudadent42.base.errors import LabError


class MachineState(str, Enum):
    """How a machine is. All but the last two cost what it costs to run."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Its disk still costs something."""
    GONE = "gone"
    """Deleted, or never made."""

    @property
    def costs(self) -> bool:
        return self not in (MachineState.STOPPED, MachineState.GONE)


class MachineOffError(LabError):
    """The machine of a run does not run any more, so that trying to reach it is of no use."""

    def __init__(self, message: str, state: MachineState) -> None:
        super().__init__(message)
        self.state = state
