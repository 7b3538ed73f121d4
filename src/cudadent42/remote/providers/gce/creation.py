"""Making the instance that a specification describes. That it ends by itself is part of what is asked for."""

from __future__ import annotations

from cudadent42.remote.core.address import GceAddress
from cudadent42.remote.core.record import new_job
from cudadent42.remote.providers.gce import gcloud
from cudadent42.remote.providers.gce.machine import FRESH_LABEL, FRESH_PREFIX, LABEL, Machine
from cudadent42.remote.providers.gce.specification import GUEST_ATTRIBUTES, SPECIFICATION_LABEL, Specification


def check_image(specification: Specification) -> None:
    """Raises CloudError where the image family does not exist, which costs nothing to ask."""
    gcloud.ask(
        f"looking for the image family {specification.image_family}",
        "compute",
        "images",
        "describe-from-family",
        specification.image_family,
        f"--project={specification.image_project}",
    )


def new_addresses(specification: Specification) -> tuple[GceAddress, ...]:
    """Where the instance of one run may come to be, in the order of preference; its name is nobody else's."""
    name = f"{FRESH_PREFIX}{new_job()}"
    return tuple(GceAddress(specification.project, zone, name) for zone in specification.zones)


def create(machine: Machine, specification: Specification) -> None:
    """Make it and start it. It must be on record before. Raises CloudError."""
    gcloud.change(f"creating {machine.name}", *words(machine.address, specification))


def words(at: GceAddress, wanted: Specification) -> tuple[str, ...]:
    """The arguments of gcloud."""
    options: dict[str, object] = {
        "--project": at.project,
        "--zone": at.zone,
        "--machine-type": wanted.machine_type,
        "--image-family": wanted.image_family,
        "--image-project": wanted.image_project,
        "--boot-disk-size": f"{wanted.disk_gb}GB",
        "--boot-disk-type": wanted.disk_type,
        "--accelerator": f"type={wanted.accelerator},count={wanted.accelerator_count}"
        if wanted.accelerator
        else "",
        # The provider's own end of it: nothing that is lost here can leave it running.
        "--max-run-duration": f"{wanted.max_run_minutes}m",
        "--instance-termination-action": "DELETE",
        "--provisioning-model": "SPOT" if wanted.spot else "",
        # An instance with GPUs cannot be moved while it runs.
        "--maintenance-policy": "TERMINATE" if wanted.accelerator_type else "",
        "--network": wanted.network,
        "--subnet": wanted.subnet,
        "--service-account": wanted.service_account,
        "--scopes": ",".join(wanted.scopes),
        "--labels": _pairs(
            ((LABEL, FRESH_LABEL), (SPECIFICATION_LABEL, wanted.digest), *wanted.labels),
        ),
        "--metadata": _pairs(((GUEST_ATTRIBUTES, "TRUE"), *wanted.metadata)),
    }
    flags = {
        # After an error of its host it would start again, with nobody to use it.
        "--no-restart-on-failure": True,
        "--no-service-account": not wanted.service_account,
        "--no-scopes": not wanted.service_account,
        "--no-address": not wanted.external_ip,
    }
    return (
        *("compute", "instances", "create", at.instance),
        *(f"{name}={value}" for name, value in options.items() if value),
        *(flag for flag, wanted_flag in flags.items() if wanted_flag),
        "--quiet",
    )


def _pairs(pairs: tuple[tuple[str, str], ...]) -> str:
    return ",".join(f"{name}={value}" for name, value in pairs)
