"""Machines that the user's own OpenSSH reaches. They are the user's: nothing is started, and only runs are ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cudadent42.base.errors import LabError
from cudadent42.remote.core import hosts, record
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import Workspace
from cudadent42.remote.core.money import Paid
from cudadent42.remote.core.protection import Terms, protect, release
from cudadent42.remote.core.provider import Lease, Machine, Offer
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Returned, RunRequest, begin, persistently, workspace_of
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.core.terminal import Say
from cudadent42.runs.starts import MachineStart


class AtHand:
    """The lease of a machine that is on anyway."""

    log_is_shown = False

    def __init__(self, workspace: Workspace, say: Say, begun: JobRecord | None = None) -> None:
        self.workspace = workspace
        self._say = say
        self._output = None if begun is None else begun.output

    def begin(self, request: RunRequest, on_log: Callable[[bytes], None]) -> JobRecord:
        self._output = str(request.output.absolute())
        return begin(self.workspace, request, self._say)

    def keep(self, returned: Returned) -> None:
        """It is here."""

    def failed(self, error: BaseException) -> None:
        """Say what to do about a run that goes on there, if it was started."""
        if not isinstance(error, KeyboardInterrupt | ConnectionLostError):
            return
        for waiting in record.readable()[0]:
            if waiting.output == self._output and not waiting.fetched:
                self._say(
                    f"{waiting.job} goes on running there; bring it back with: cudadent42 remote attach {waiting.job}"
                )
                self._say(f"or end it with: cudadent42 remote stop {waiting.job}")

    def end(self) -> LabError | None:
        release(self.workspace, None, self._say)
        return None


@dataclass(frozen=True)
class Own:
    """A machine of the user's own that answers."""

    workspace: Workspace
    architectures: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.workspace.remote.name

    @property
    def has_gpu(self) -> bool:
        return bool(self.architectures)

    def cost(self) -> Paid:
        return Paid(rented=False, own_environment=not self.workspace.remote.python)

    def agree(self, terms: Terms, say: Say) -> Offer:
        return self

    def start(self, terms: Terms, say: Say) -> Lease:
        protect(self.workspace, None, terms, say)
        return AtHand(self.workspace, say)


def looked_at(workspace: Workspace, say: Say) -> Own:
    """Raises LabError where it does not answer."""
    return Own(workspace, persistently(lambda: jobs.architectures(workspace), say))


class Ssh:
    """The provider of every named machine that is no other's."""

    scheme = ""

    def has(self, remote: Remote) -> bool:
        return True

    def ran(self, begun: JobRecord) -> bool:
        return True

    def resolve(self, on: str, device: str, say: Say) -> Offer:
        return looked_at(workspace_of(hosts.get(on)), say)

    def reach(self, remote: Remote, begun: JobRecord | None = None) -> Workspace:
        return workspace_of(remote)

    def adopt(self, begun: JobRecord, terms: Terms, say: Say, *, start: bool = False) -> Lease:
        return AtHand(workspace_of(record.remote_of(begun)), say, begun)

    def machine(self, start: MachineStart) -> Machine | None:
        """None: none is ever started."""
        return None
