"""What every provider of machines does, behind one protocol: ``Provider`` and the three things that it gives.

    Provider.resolve -> Offer (cost, agree, start) -> Lease (begin, end) for a run from here
    Provider.adopt -> Lease for a run whose process here is gone
    Provider.reach -> Workspace of a machine that was started before
    Provider.machine -> Machine (status, stop, end) for a start on record

A new one is a folder or module of ``remote.providers`` that implements it, and its line in the list there.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from cudadent42.base.errors import LabError
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import Workspace
from cudadent42.remote.core.money import Paid
from cudadent42.remote.core.protection import Terms
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Returned, RunRequest
from cudadent42.remote.core.status import Status
from cudadent42.remote.core.terminal import Say
from cudadent42.runs.starts import MachineStart


class Lease(Protocol):
    """A machine that answers and has its limits. It has exactly one end, however the run on it ends."""

    @property
    def workspace(self) -> Workspace: ...

    @property
    def log_is_shown(self) -> bool:
        """Whoever began the run has shown its log already."""

    def begin(self, request: RunRequest, on_log: Callable[[bytes], None]) -> JobRecord:
        """Send the working tree and start the run, which is on record before. Raises LabError."""

    def keep(self, returned: Returned) -> None:
        """What else is done with a run that is back, while the machine is still there."""

    def failed(self, error: BaseException) -> None:
        """What becomes of the machine and its run after ``error``; what goes on is said. Raises what is to be told
        in its place, if anything."""

    def end(self) -> LabError | None:
        """What becomes of the machine now that its run is back; the error of one that should have ended and has not."""


class Offer(Protocol):
    """A machine that a run can have: checked, and not started."""

    @property
    def name(self) -> str:
        """As the user calls it."""

    @property
    def has_gpu(self) -> bool: ...

    @property
    def architectures(self) -> tuple[str, ...]:
        """CUDA architectures of its GPUs; empty where it has none, or they are not known here."""

    def cost(self) -> Paid:
        """What of its time a run pays for."""

    def agree(self, terms: Terms, say: Say) -> Offer:
        """The offer under these terms. Raises UsageError where it cannot keep them, or something else that its start
        needs is not agreed on."""

    def start(self, terms: Terms, say: Say) -> Lease:
        """Raises LabError; then nothing is left running, or what is has been said."""


class Machine(Protocol):
    """A machine that was started from here."""

    @property
    def name(self) -> str: ...

    @property
    def fresh(self) -> bool:
        """Made for runs: it is ended by being deleted, and nobody but us would delete its disk."""

    @property
    def end_command(self) -> str:
        """What ends it, for a user to type."""

    @property
    def ending(self) -> str:
        """What its end is called while it is waited for: ``taking down``."""

    @property
    def ended(self) -> str:
        """What a fresh one is that has ended: ``deleted``."""

    @property
    def to_end(self) -> str:
        """What a user does who ends it: ``delete it``."""

    def attach_command(self, job: str) -> str:
        """What brings a run back from it while it is stopped, for a user to type."""

    def ran(self, begun: JobRecord, start: MachineStart) -> bool:
        """Whether a run was on it, from this start."""

    def status(self, start: MachineStart, now: datetime) -> Status:
        """How it is; the journal is told where it was wrong."""

    def stop(self) -> None:
        """Stop it and keep its disk. Raises LabError."""

    def end(self) -> None:
        """What ends its cost: delete a fresh one, stop any other. Raises LabError."""


class Provider(Protocol):
    """Where machines come from."""

    @property
    def scheme(self) -> str:
        """What ``--on`` begins with where it names a file of machines; empty for none."""

    def has(self, remote: Remote) -> bool:
        """Whether a named machine is one of its."""

    def ran(self, begun: JobRecord) -> bool:
        """Whether a run was on one of its machines."""

    def resolve(self, on: str, device: str, say: Say) -> Offer:
        """The machine that ``--on`` names, looked at. Nothing here costs anything. Raises LabError."""

    def reach(self, remote: Remote, begun: JobRecord | None = None) -> Workspace:
        """Where runs happen on a machine that was started before: that of a run, or the last. Raises LabError."""

    def adopt(self, begun: JobRecord, terms: Terms, say: Say, *, start: bool = False) -> Lease:
        """The lease of a run that was left on its machine; ``start``: one that is stopped is started again, on
        ``terms``. Raises RunLostError where the machine does not run any more; UsageError, LabError."""

    def machine(self, start: MachineStart) -> Machine | None:
        """The machine of a line of the journal; None where it is none of its."""
