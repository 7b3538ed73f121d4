"""What happened to an instance that is not there any more, from the provider's list of operations."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from cudadent42.base.errors import ExitCode
from cudadent42.remote.core.states import MachineOffError, MachineState
from cudadent42.remote.providers.gce import gcloud
from cudadent42.remote.providers.gce.failures import CloudError
from cudadent42.remote.providers.gce.machine import Machine, moment

_MOST_OPERATIONS = 50
SKEW = timedelta(minutes=1)
"""How far this clock may be ahead of the provider's."""


class Fate(Enum):
    """Why an instance does not run. The values are sentences about it."""

    PREEMPTED = "it was preempted: the provider took its Spot capacity back"
    HOST_ERROR = "the host that it ran on failed"
    MAINTENANCE = "its host was taken down for maintenance"
    SHUT_DOWN = "it was shut down from inside"
    STOPPED = "it was stopped"
    DELETED = "it was deleted"
    UNKNOWN = "the provider does not say why"


# https://cloud.google.com/compute/docs/instances/view-audit-logs-system-events
_OPERATIONS = {
    "compute.instances.preempted": Fate.PREEMPTED,
    "compute.instances.hostError": Fate.HOST_ERROR,
    "compute.instances.terminateOnHostMaintenance": Fate.MAINTENANCE,
    "compute.instances.guestTerminate": Fate.SHUT_DOWN,
    "stop": Fate.STOPPED,
    "delete": Fate.DELETED,
}


class MachineLostError(MachineOffError):
    """The machine that a run was on does not run any more."""

    exit_code = ExitCode.NOT_READY

    def __init__(self, machine: Machine, state: MachineState, ending: End) -> None:
        self.machine = machine
        self.ending = ending
        super().__init__(f"{machine.name} is {state.value}: {ending}", state)


@dataclass(frozen=True)
class End:
    fate: Fate
    time: str = ""
    """As the provider gives it."""
    user: str = ""
    """Who asked for it, where somebody did."""

    def __str__(self) -> str:
        by = f" by {self.user}" if self.user and self.fate in (Fate.STOPPED, Fate.DELETED) else ""
        return f"{self.fate.value}{by}{f', {self.time}' if self.time else ''}"


def what_happened(machine: Machine, since: str) -> End:
    """The last operation that can have ended the machine after ``since`` (ISO 8601). UNKNOWN where none is found."""
    try:
        return last_end(operations(machine), machine.address.instance, since)
    except CloudError:
        return End(Fate.UNKNOWN)  # that it does not run is known all the same


def operations(machine: Machine) -> tuple[dict[str, Any], ...]:
    """What was done to the machine of late, as the provider lists it, the newest first. Raises CloudError."""
    at = machine.address
    answer = gcloud.ask(
        f"asking what happened to {machine.name}",
        *("compute", "operations", "list", f"--project={at.project}", f"--zones={at.zone}"),
        f"--filter=targetLink~/instances/{at.instance}$",
        "--sort-by=~insertTime",
        f"--limit={_MOST_OPERATIONS}",
    )
    return of_instance(answer, at.instance)


def of_instance(listed: Any, instance: str) -> tuple[dict[str, Any], ...]:
    """Those of the operations in ``listed``, a list of JSON objects, that were done to ``instance``."""
    objects = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    return tuple(
        item for item in objects if str(item.get("targetLink", "")).endswith(f"/instances/{instance}")
    )


def last_end(listed: Any, instance: str, since: str) -> End:
    """The newest of the operations in ``listed`` that ended ``instance``."""
    newest, end = datetime.fromisoformat(since) - SKEW, End(Fate.UNKNOWN)
    for item in of_instance(list(listed), instance):
        fate = _OPERATIONS.get(item.get("operationType", ""))
        if fate is None:
            continue
        time = moment(item.get("insertTime"))
        if time is not None and time >= newest:
            newest, end = time, End(fate, str(item["insertTime"]), str(item.get("user", "")))
    return end
