"""All that can be known of a cloud machine before it is started. Nothing here costs anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.remote.core import record
from cudadent42.remote.core.address import GceAddress, SpecificationFile
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.policy import Ending, Reach
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.providers.gce import (
    accelerators,
    creation,
    gcloud,
    identity,
    machine,
    results,
    specification,
)
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.remote.providers.gce.specification import GUEST_ATTRIBUTES, SPECIFICATION_LABEL, Specification
from cudadent42.runs import starts

_KNOWN_HOSTS = "~/.ssh/google_compute_known_hosts"
"""Where gcloud keeps the host keys of instances, by their numbers."""


@dataclass(frozen=True)
class Candidate:
    """A machine that a run can be on."""

    machine: Machine
    state: MachineState
    """GONE for one that is to be made."""


@dataclass(frozen=True)
class Prepared:
    """A run's machine, checked and not started."""

    remote: Remote
    candidates: tuple[Candidate, ...]
    """In the order of preference: one instance, or a specification's zones."""
    specification: Specification | None
    reach: Reach
    results: str
    spot: bool
    accelerator: str
    """Empty for a machine without a GPU, and for a run on the CPU: nobody waits for a driver then."""
    architectures: tuple[str, ...]
    """CUDA architectures of its GPUs; empty where it has none, or they are not known here."""
    guarded: bool
    """The provider ends it by itself, whatever happens here."""
    notes: tuple[str, ...] = ()
    """What the user should hear before it starts."""


def prepare(remote: Remote, device: str) -> Prepared:
    """Look at everything that a run on ``remote`` needs. Raises UsageError, CloudError, MachineNotReadyError."""
    if isinstance(remote.address, SpecificationFile):
        prepared = _of_specification(remote, specification.load(remote.address.path))
    else:
        assert isinstance(remote.address, GceAddress)
        prepared = _of_instance(remote, remote.address)
    if device.startswith("cuda") and not prepared.accelerator:
        raise MachineNotReadyError(
            f"{remote.name} has no GPU, and --device is {device}; nothing was started: take another machine type"
        )
    if prepared.results:
        results.check_exists(prepared.results)
    if device == "cpu":
        return replace(prepared, accelerator="", architectures=())
    if prepared.accelerator and not prepared.architectures:
        unknown = f"{prepared.accelerator} is not known here, so kernels are first compiled on the machine, which costs"
        return replace(prepared, notes=(*prepared.notes, unknown))
    return prepared


def _of_instance(remote: Remote, address: GceAddress) -> Prepared:
    instance = Machine(str(address), remote.rate)
    instance.check_made_here()
    _check_nothing_waits(instance)
    description = instance.describe()
    _check_host_keys(address, description)
    _check_disks(remote, description)
    accelerator = _accelerator(description)
    state = machine.state_in(description)
    if state is MachineState.STOPPING:
        raise MachineNotReadyError(f"{address} is being stopped; wait until it is, then try again")
    return Prepared(
        remote=remote,
        candidates=(Candidate(instance, state),),
        specification=None,
        reach=remote.reach,
        results=remote.results,
        spot=description.get("scheduling", {}).get("provisioningModel") == "SPOT",
        accelerator=accelerator,
        architectures=_architectures(accelerator),
        guarded=machine.has_own_limit(description, datetime.now(timezone.utc)),
    )


def _of_specification(remote: Remote, wanted: Specification) -> Prepared:
    creation.check_image(wanted)
    new = (Machine(str(address), wanted.rate) for address in creation.new_addresses(wanted))
    kept, notes = _kept(remote, wanted)
    return Prepared(
        remote=remote,
        candidates=(*kept, *(Candidate(instance, MachineState.GONE) for instance in new)),
        specification=wanted,
        reach=wanted.reach,
        results=wanted.results,
        spot=wanted.spot,
        accelerator=wanted.accelerator_type,
        architectures=_architectures(wanted.accelerator_type),
        guarded=True,
        notes=notes,
    )


def _kept(remote: Remote, wanted: Specification) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """The machine that the last run here left, if it is free and of the same specification; what to say if not."""
    last = [job for job in record.records() if job.remote == remote.name and job.cloud][-1:]
    if not last or last[0].cloud is None:
        return (), ()
    left = Machine(last[0].cloud.machine, wanted.rate)
    waiting = record.waiting_on(left.name)
    if waiting:
        return (), (f"{left.name} is kept for {waiting[-1].job}, which is not brought back yet",)
    if not left.is_on_record:
        return (), (f"{left.name} is on no record of starts here, so it is not used again",)
    description = left.find()
    state = machine.state_in(description)
    if description is None or state is MachineState.STOPPING:
        return (), ()
    if description.get("labels", {}).get(SPECIFICATION_LABEL) == wanted.digest:
        return (Candidate(left, state),), ()
    return (), (
        f"{left.name} was made from another specification and is {state.value}; end it with: {left.end_command}",
    )


def _check_nothing_waits(instance: Machine) -> None:
    """Raises UsageError where one that was made for a run has what was not brought back: a start of it that fails, and
    the end of another run there, delete it."""
    waiting = record.waiting_on(instance.name)
    if instance.fresh and waiting:
        raise UsageError(
            f"{instance.name} has what {waiting[-1].job} measured, and would be deleted after another run; bring it "
            f"back with: cudadent42 remote attach {waiting[-1].job}"
        )


def open_start(instance: Machine, description: dict[str, Any]) -> str | None:
    """The start in the journal that a described machine, which runs, still runs from.

    Where somebody else has started it since, that start is closed, and there is none. Raises CloudError where that
    cannot be told.
    """
    mine = [start for start in starts.load() if start.machine == instance.name and start.ended is None]
    if not mine:
        return None
    other = identity.taken_over(instance, description, mine[-1])
    if other is None:
        return mine[-1].id
    for start in mine:
        starts.mark(start.id, other.outcome, other.reason, other.time)
    return None


def settle(instance: Machine, description: dict[str, Any] | None) -> None:
    """Close the journal's starts of a machine that is found not running: somebody, or it itself, ended it."""
    stopped = machine.moment((description or {}).get("lastStopTimestamp"))
    for start in starts.load():
        if start.machine == instance.name and start.ended is None:
            after = stopped is not None and stopped >= datetime.fromisoformat(start.requested)
            starts.mark(start.id, starts.StartOutcome.STOPPED, "found stopped", stopped if after else None)


def _check_host_keys(address: GceAddress, description: dict[str, Any]) -> None:
    """Raises UsageError where its host key can neither be known already nor be had before the first connection."""
    alias = f"compute.{description.get('id', '')}"
    try:
        lines = Path(_KNOWN_HOSTS).expanduser().read_text(errors="replace").splitlines()
        key_is_known = any(line.split(" ")[0] == alias for line in lines)
    except (OSError, RuntimeError):  # the latter: a user without a home
        key_is_known = False
    publishes = _publishes(description.get("metadata"))
    if key_is_known or publishes:
        return
    if publishes is None:
        project = gcloud.ask(
            f"looking at {address.project}",
            "compute",
            "project-info",
            "describe",
            f"--project={address.project}",
        )
        if _publishes(project.get("commonInstanceMetadata") if isinstance(project, dict) else None):
            return
    raise UsageError(
        f"{address} does not publish its host keys, so it could not be told from another machine; let it, once, "
        f"before it starts: gcloud compute instances add-metadata {address.instance} --zone={address.zone} "
        f"--project={address.project} --metadata={GUEST_ATTRIBUTES}=TRUE"
    )


def _publishes(metadata: Any) -> bool | None:
    """Whether metadata lets host keys be published; None where it does not say."""
    items = metadata.get("items", []) if isinstance(metadata, dict) else []
    said = [str(item.get("value", "")) for item in items if item.get("key") == GUEST_ATTRIBUTES]
    return said[-1].upper() == "TRUE" if said else None


def _check_disks(remote: Remote, description: dict[str, Any]) -> None:
    """Raises UsageError where ending it would lose what is on its local SSDs."""
    local = [disk for disk in description.get("disks", []) if disk.get("type") == "SCRATCH"]
    if local and remote.after.ending is not Ending.KEEP:
        raise UsageError(
            f"{remote.address} has {len(local)} local SSDs, whose contents a stop loses; use --after keep, and stop "
            "it yourself"
        )


def _accelerator(description: dict[str, Any]) -> str:
    attached = [_last(item.get("acceleratorType")) for item in description.get("guestAccelerators", [])]
    return attached[0] if attached else accelerators.built_in(_last(description.get("machineType")))


def _last(url: Any) -> str:
    return str(url or "").rpartition("/")[2]


def _architectures(accelerator: str) -> tuple[str, ...]:
    architecture = accelerators.architecture(accelerator)
    return (architecture,) if architecture else ()
