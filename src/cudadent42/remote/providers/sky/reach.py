"""From a machine of SkyPilot's to an OpenSSH connection."""

from __future__ import annotations

from cudadent42.base.errors import UsageError
from cudadent42.remote.core.address import SshAddress
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import Workspace
from cudadent42.remote.core.ssh import connect
from cudadent42.remote.providers.sky import keys
from cudadent42.remote.providers.sky.cluster import Cluster


def workspace_of(remote: Remote) -> Workspace:
    """The project's folder on the machine of ``remote.start``. Raises UsageError where its key could not be kept."""
    if not isinstance(remote.address, SshAddress):
        raise UsageError(f"{remote.name} is {remote.address}; expected a machine that ssh reaches by itself")
    connection = connect(remote.address, keys.options(remote.start))
    return Workspace(connection, remote, Cluster(remote.name).raise_if_lost)
