"""Whether a machine that runs was started from here, or by somebody else since.

An instance that was stopped and started again, or deleted and made again, has the same name. The provider's own words
tell one start from another: the number of the instance, and the time of its last start. Where those of our start are on
record they are compared as they are, so that no clock matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cudadent42.remote.providers.gce import fate, gcloud
from cudadent42.remote.providers.gce.machine import Machine, moment
from cudadent42.runs.starts import MachineStart, StartOutcome

# https://cloud.google.com/compute/docs/instances/host-maintenance-overview#automatic-restart
_BY_THE_PROVIDER = (
    "compute.instances.automaticRestart",
    "compute.instances.hostError",
    "compute.instances.terminateOnHostMaintenance",
)
"""After one of these, where nobody is listed with a start, the provider started it."""
_BY_SOMEBODY = ("start", "startWithEncryptionKey", "insert", "bulkInsert")


@dataclass(frozen=True)
class TakenOver:
    """How a start of ours ended, on a machine that runs from somebody else's by now."""

    outcome: StartOutcome
    reason: str
    time: datetime | None
    """When it ended; None where the provider does not say."""


def provider_start(description: dict[str, Any]) -> str:
    """What tells the last start of a described machine from every other; empty where the provider does not say."""
    number, began = description.get("id"), description.get("lastStartTimestamp")
    return f"{number} {began}" if number and began else ""


def taken_over(machine: Machine, description: dict[str, Any], start: MachineStart) -> TakenOver | None:
    """How ``start`` ended, where the described machine runs from another; None where it is ours, as far as can be told.

    What the provider restarts by itself after an error of its host goes on being ours. Raises CloudError where it does
    not look like ours, and its operations cannot be asked.
    """
    began = moment(description.get("lastStartTimestamp"))
    if began is None or start.provider_start == provider_start(description):
        return None
    number, _, ours = start.provider_start.partition(" ")
    latest = moment(ours) or _latest(start)
    if began <= latest:
        return None
    operations = fate.operations(machine)
    since = [item for item in operations if (moment(item.get("insertTime")) or latest) > latest]
    theirs = [item for item in since if item.get("operationType") in _BY_SOMEBODY]
    anew = bool(number) and number != str(description.get("id"))
    if not anew and not theirs and any(item.get("operationType") in _BY_THE_PROVIDER for item in since):
        return None
    by = f" by {user}" if (user := _last_user(theirs)) else ""
    if anew:
        end = fate.last_end(operations, machine.address.instance, start.requested)
        made = moment(description.get("creationTimestamp"))
        return TakenOver(
            StartOutcome.DELETED, f"it was deleted, and made again{by}", moment(end.time) or made
        )
    stopped = moment(description.get("lastStopTimestamp"))
    during = stopped is not None and datetime.fromisoformat(start.requested) - fate.SKEW <= stopped <= began
    return TakenOver(
        StartOutcome.STOPPED,
        f"it was stopped, and started again{by}, {began.isoformat()}; it is not ours any more",
        stopped if during else began,
    )


def _latest(start: MachineStart) -> datetime:
    """When a start that was asked for here can have begun at the latest, by the provider's clock.

    There is no earliest: a machine is seen to be off before it is asked for, so a time before that is a clock's error.
    """
    asked = datetime.fromisoformat(start.requested) + timedelta(seconds=gcloud.TIMEOUT_S)
    ready = asked if start.ready is None else datetime.fromisoformat(start.ready)
    return max(asked, ready) + fate.SKEW


def _last_user(operations: Sequence[dict[str, Any]]) -> str:
    users = {moment(item.get("insertTime")): str(item.get("user", "")) for item in operations}
    times = [time for time in users if time is not None]
    return users[max(times)] if times else ""
