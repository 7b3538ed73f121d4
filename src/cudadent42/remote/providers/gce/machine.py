"""One rented machine: what it is called, what an hour of it costs, how it is, and how it is started and ended.

The journal of starts (`cudadent42.runs.starts`) has its name: by that, whoever reads the journal can ask for it and end
it (`status.of_start`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.remote.core.address import GceAddress, parse
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.providers.gce import gcloud
from cudadent42.remote.providers.gce.failures import CloudError, Failure
from cudadent42.runs import starts
from cudadent42.runs.starts import MachineStart

FRESH_PREFIX = "cudadent42-run-"
"""Names of instances that were made for one run begin so; no other instance is ever deleted."""
LABEL = "cudadent42"
FRESH_LABEL = "fresh"
"""What they are labelled with besides; `delete` looks at both."""


# https://cloud.google.com/compute/docs/instances/instance-lifecycle
_STATES = {
    "PENDING": MachineState.STARTING,
    "PROVISIONING": MachineState.STARTING,
    "STAGING": MachineState.STARTING,
    "REPAIRING": MachineState.STARTING,
    "RUNNING": MachineState.RUNNING,
    "PENDING_STOP": MachineState.STOPPING,
    "STOPPING": MachineState.STOPPING,
    "SUSPENDING": MachineState.STOPPING,
    "DEPROVISIONING": MachineState.STOPPING,
    "SUSPENDED": MachineState.STOPPED,
    "TERMINATED": MachineState.STOPPED,
    "STOPPED": MachineState.STOPPED,
}


@dataclass(frozen=True)
class Machine:
    """An instance."""

    name: str
    """As the journal of starts has it: ``gce://PROJECT/ZONE/INSTANCE``."""
    rate: str
    """Its entry in the table of rates."""

    @property
    def address(self) -> GceAddress:
        address = parse(self.name)
        assert isinstance(address, GceAddress)
        return address

    @property
    def fresh(self) -> bool:
        """Made for one run: ended by being deleted. Any other is stopped."""
        return self.address.instance.startswith(FRESH_PREFIX)

    @property
    def end_command(self) -> str:
        """What ends it, for a user to type."""
        verb = "delete" if self.fresh else "stop"
        at = self.address
        return f"gcloud compute instances {verb} {at.instance} --zone={at.zone} --project={at.project}"

    ending = "ending"
    ended = "deleted"
    to_end = "delete it"

    def attach_command(self, job: str) -> str:
        return f"cudadent42 remote attach {job} --start"

    def ran(self, begun: JobRecord, start: MachineStart) -> bool:
        return begun.cloud is not None and begun.cloud.machine == self.name

    @property
    def is_on_record(self) -> bool:
        """Whether it was ever asked for from here."""
        return any(start.machine == self.name for start in starts.load())

    def check_made_here(self) -> None:
        """Raises UsageError for a machine that was made for a run, and not from here: somebody else's run may be on it.

        Which were made here is known from the journal of starts: none is made that is not on record, and none of
        another's comes onto it.
        """
        if self.fresh and not self.is_on_record:
            raise UsageError(
                f"{self.name} was made for a run from another place: it is on no record of starts here, so it is "
                f"neither used nor deleted; if it is certain that nobody needs it, end it with: {self.end_command}"
            )

    def describe(self) -> dict[str, Any]:
        """All that the provider says of it. Raises CloudError; with NO_INSTANCE where there is none."""
        description = gcloud.ask(f"looking at {self.name}", *self._words("describe"))
        if not isinstance(description, dict):
            raise CloudError(Failure.UNKNOWN, f"expected an instance, found {description!r:.200}", self.name)
        return description

    def find(self) -> dict[str, Any] | None:
        """As ``describe``; None where there is no such machine."""
        try:
            return self.describe()
        except CloudError as error:
            if error.failure is Failure.NO_INSTANCE:
                return None
            raise

    def state(self) -> MachineState:
        """How it is now, asked of the provider. Raises CloudError where that cannot be told."""
        return state_in(self.find())

    def start(self) -> None:
        """Start it; nothing happens to one that runs. It must be on record before. Raises CloudError."""
        gcloud.change(f"starting {self.name}", *self._words("start"))

    def stop(self) -> None:
        """Stop it, and wait until it is; nothing happens to one that is stopped or gone. Raises CloudError."""
        self._unless_gone("stopping", "stop")

    def delete(self) -> None:
        """Delete one that was made for a run, disk and all; nothing happens to one that is gone.

        Raises CloudError; UsageError for a machine that is not labelled as made for a run, or was made elsewhere.
        """
        description = self.find()
        if description is None:
            return
        if not self.fresh or description.get("labels", {}).get(LABEL) != FRESH_LABEL:
            raise UsageError(
                f"{self.name} was not made for a run here, so it is not deleted; stop it instead"
            )
        self.check_made_here()
        self._unless_gone("deleting", "delete")

    def end(self) -> None:
        """What ends its cost: delete one that was made for a run, stop any other. Raises like them."""
        (self.delete if self.fresh else self.stop)()

    def _unless_gone(self, doing: str, verb: str) -> None:
        try:
            gcloud.change(f"{doing} {self.name}", *self._words(verb))
        except CloudError as error:
            if error.failure is not Failure.NO_INSTANCE:
                raise

    def _words(self, verb: str) -> tuple[str, ...]:
        at = self.address
        zone = (f"--project={at.project}", f"--zone={at.zone}")
        return ("compute", "instances", verb, *zone, "--quiet", at.instance)


def state_in(description: dict[str, Any] | None) -> MachineState:
    """How a machine is that ``find`` has found. Raises CloudError for a word that is not known: it may cost money."""
    if description is None:
        return MachineState.GONE
    word = description.get("status")
    if word not in _STATES:
        raise CloudError(Failure.UNKNOWN, f"an instance with the status {word!r}")
    return _STATES[word]


def has_own_limit(description: dict[str, Any], now: datetime) -> bool:
    """Whether the provider itself ends a described machine some time after its next start, whatever happens here."""
    scheduling = description.get("scheduling", {})
    if scheduling.get("maxRunDuration"):
        return True
    ends = moment(scheduling.get("terminationTime"))
    return ends is not None and ends > now


def moment(text: object) -> datetime | None:
    """A time as the provider writes it, RFC 3339 with an offset; None for anything else."""
    try:
        parsed = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return parsed if parsed.tzinfo else None
