"""Where machines elsewhere come from: the providers there are, and which of them has what.

All stand behind ``remote.core.provider``; nothing above this package names one.
"""

from __future__ import annotations

from pathlib import Path

from cudadent42.remote.core import hosts
from cudadent42.remote.core.address import SpecificationFile
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.provider import Machine, Provider
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.providers.gce.provider import Gce
from cudadent42.remote.providers.gce.specification import of_file
from cudadent42.remote.providers.sky.provider import Sky
from cudadent42.remote.providers.ssh import Ssh
from cudadent42.runs.starts import MachineStart

PROVIDERS: tuple[Provider, ...] = (Gce(), Sky(), Ssh())
"""The first that has a machine is its provider; the last has any."""


def provider_for(on: str) -> Provider:
    """Of what ``--on`` names. Raises UsageError where no machine has that name."""
    files = (each for each in PROVIDERS if each.scheme and on.startswith(each.scheme))
    return next(files, None) or provider_of(hosts.get(on))


def specified(file: Path) -> SpecificationFile:
    """The address of machines that are made as a file says. Raises UsageError where it says no machine."""
    return of_file(file)  # of Google Cloud, where alone machines with a name are made


def provider_of(remote: Remote) -> Provider:
    return next(each for each in PROVIDERS if each.has(remote))


def provider_of_run(begun: JobRecord) -> Provider:
    """Raises UsageError where nothing is known of its machine any more."""
    return next(each for each in PROVIDERS if each.ran(begun))


def machine_of(start: MachineStart) -> Machine | None:
    """The machine of a line of the journal; None where no provider that is known here has it."""
    machines = (each.machine(start) for each in PROVIDERS)
    return next((machine for machine in machines if machine is not None), None)
