"""What SkyPilot says of a start on record."""

from __future__ import annotations

from datetime import datetime

from cudadent42.base.errors import LabError
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.status import ENDED, NOT_ANSWERED, Status, correct, is_under_way
from cudadent42.remote.providers.sky import cluster
from cudadent42.remote.providers.sky.cluster import Cluster
from cudadent42.runs.starts import MachineStart, StartOutcome


def ask(at: Cluster, start: MachineStart, now: datetime) -> Status:
    """How a machine is; the journal is told where it was wrong. SkyPilot forgets those that are gone, and when they
    went."""
    try:
        state = cluster.state(at)
    except LabError as error:
        return Status(None, f"{error}; end it with: {at.end_command}")
    if state.costs:
        ended = start.outcome in ENDED
        return Status(state, "", correct(start, StartOutcome.READY, cluster.RUNS_AGAIN) if ended else None)
    if is_under_way(start, now):
        return Status(state, NOT_ANSWERED)
    if state is MachineState.STOPPED:
        left = f"its disk costs until it is taken down: {at.end_command}"
        if start.outcome in ENDED:
            return Status(state, left)
        return Status(state, left, correct(start, StartOutcome.STOPPED, "SkyPilot says that it is stopped"))
    never = start.outcome is StartOutcome.REQUESTED
    outcome = StartOutcome.FAILED if never else StartOutcome.DELETED
    return Status(state, "", correct(start, outcome, "SkyPilot has no such machine any more"))
