"""Google Compute Engine behind the protocol of providers: what an instance is offered, leased, watched and ended as.

A run that goes on there when this process ends is left its machine; whoever brings it back ends the machine, by the
policy that was asked for when it was started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from cudadent42.base.errors import LabError, UsageError
from cudadent42.remote.core import hosts, record
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import GceAddress, SpecificationFile
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import JobState, Workspace
from cudadent42.remote.core.money import Paid
from cudadent42.remote.core.protection import Terms, protect
from cudadent42.remote.core.provider import Lease as AnyLease
from cudadent42.remote.core.provider import Machine as AnyMachine
from cudadent42.remote.core.provider import Offer
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Returned, RunLostError, RunRequest, begin, give_up
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.gce import lease as leases
from cudadent42.remote.providers.gce import results, status
from cudadent42.remote.providers.gce.checks import Prepared, prepare
from cudadent42.remote.providers.gce.fate import MachineLostError
from cudadent42.remote.providers.gce.lease import Lease, StillRunningError
from cudadent42.remote.providers.gce.unguarded import agree_to_start
from cudadent42.runs.starts import MachineStart

_STOPPING_S = 120.0
"""How long a machine that is being taken away is watched; 30 s are usual."""
_STOPPING_PAUSE_S = 3.0


@dataclass(frozen=True)
class Held:
    """An instance that a run is on, and what becomes of it however that ends."""

    lease: Lease
    say: Say

    log_is_shown = False

    @property
    def workspace(self) -> Workspace:
        return self.lease.workspace

    def begin(self, request: RunRequest, on_log: Callable[[bytes], None]) -> JobRecord:
        return begin(self.workspace, request, self.say, self.lease.cloud)

    def keep(self, returned: Returned) -> None:
        """Copy the run folder to where the user asked for."""
        if self.lease.cloud.results and returned.folder.is_dir():
            results.copy(returned.folder, self.lease.cloud.results, returned.record.job, self.say)

    def failed(self, error: BaseException) -> None:
        """The machine is ended, unless a run goes on there, or what it measured is only there."""
        lease, say = self.lease, self.say
        begun = _waiting(lease)
        if isinstance(error, MachineLostError):
            if begun is not None:
                raise _lost(begun, error, say) from error
            leases.lost(lease.cloud, error, say)
        elif isinstance(error, KeyboardInterrupt | ConnectionLostError):
            if begun is None:
                _finish(lease, say)
                return
            say(
                f"{begun.job} goes on there. Bring it back, and end the machine as asked, with: "
                f"cudadent42 remote attach {begun.job}\n{leases.what_runs(lease.machine)}"
            )
        else:
            self._failed(begun)

    def _failed(self, begun: JobRecord | None) -> None:
        lease, say = self.lease, self.say
        if begun is not None and not _is_there(lease, begun.job):
            with suppress(LabError):
                give_up(begun)
                say(f"{begun.job} is not waited for any more: {lease.machine.name} has nothing of it")
            begun = None
        if lease.machine.fresh and begun is not None:
            say(
                f"{lease.machine.name} is not deleted, since what {begun.job} measured is only there; bring it back "
                f"with: cudadent42 remote attach {begun.job}\n{leases.what_runs(lease.machine)}"
            )
        else:
            _finish(lease, say)

    def end(self) -> LabError | None:
        return _finish(self.lease, self.say)


@dataclass(frozen=True)
class Candidate:
    """An instance that is there or can be made, as a run's machine."""

    prepared: Prepared

    @property
    def name(self) -> str:
        return self.prepared.remote.name

    @property
    def has_gpu(self) -> bool:
        return bool(self.prepared.accelerator)

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.prepared.architectures

    def cost(self) -> Paid:
        first = self.prepared.candidates[0]
        return Paid(
            rate=first.machine.rate,
            rented=True,
            starting=not first.state.costs,
            own_environment=not self.prepared.remote.python,
        )

    def agree(self, terms: Terms, say: Say) -> Offer:
        first = self.prepared.candidates[0]
        if not self.prepared.guarded and not first.state.costs:
            agree_to_start(self.prepared.remote, first.machine, terms.consent)
        return self

    def start(self, terms: Terms, say: Say) -> AnyLease:
        return Held(leases.begin(self.prepared, say, _protecting(terms, say)), say)


class Gce:
    """The provider."""

    scheme = ""

    def has(self, remote: Remote) -> bool:
        return isinstance(remote.address, GceAddress | SpecificationFile)

    def ran(self, begun: JobRecord) -> bool:
        return begun.cloud is not None

    def resolve(self, on: str, device: str, say: Say) -> Offer:
        return Candidate(prepare(hosts.get(on), device))

    def reach(self, remote: Remote, begun: JobRecord | None = None) -> Workspace:
        on_record = [begun] if begun else [each for each in record.records() if each.remote == remote.name]
        clouds = [each.cloud for each in on_record if each.cloud is not None]
        if begun is None and isinstance(remote.address, GceAddress):
            # Before, the name may have been another machine's.
            clouds = [cloud for cloud in clouds if cloud.machine == str(remote.address)]
        if not clouds:
            raise UsageError(f"no run was started on {remote.name} yet")
        return leases.resume(clouds[-1], remote).workspace

    def adopt(self, begun: JobRecord, terms: Terms, say: Say, *, start: bool = False) -> AnyLease:
        assert begun.cloud is not None
        remote = record.remote_of(begun)
        try:
            lease = leases.resume(begun.cloud, remote)
        except MachineLostError as error:
            if not (start and error.state is MachineState.STOPPED):
                raise _lost(begun, error, say) from error
            lease = leases.restart(begun.cloud, remote, say, _protecting(terms, say), terms.consent)
            try:
                record.save(replace(begun, cloud=lease.cloud))
            except BaseException:
                say(leases.what_runs(lease.machine))
                raise
        return Held(lease, say)

    def machine(self, start: MachineStart) -> AnyMachine | None:
        return status.of_start(start)


def _protecting(terms: Terms, say: Say) -> leases.Protect:
    return lambda lease: protect(lease.workspace, lease.cloud, terms, say)


def _finish(lease: Lease, say: Say) -> StillRunningError | None:
    try:
        leases.finish(lease, say)
    except StillRunningError as error:
        say(str(error))
        return error
    return None


def _waiting(lease: Lease) -> JobRecord | None:
    """The run on this machine that was not brought back yet."""
    mine = [job for job in record.readable()[0] if job.cloud == lease.cloud and not job.fetched]
    return mine[-1] if mine else None


def _is_there(lease: Lease, job: str) -> bool:
    """Whether the machine has something of a run; so where that cannot be asked."""
    try:
        return jobs.state(lease.workspace, job).state is not JobState.NONE
    except LabError:
        return True


def _lost(begun: JobRecord, error: MachineLostError, say: Say) -> RunLostError:
    """What became of a run whose machine does not run any more; on record, and in words."""
    assert begun.cloud is not None
    leases.lost(begun.cloud, error, say)
    say(str(error))
    if _settled(error) is MachineState.GONE:
        kept = give_up(begun)
        what = (
            f"what had been copied of {begun.job} is in {kept}" if kept else f"nothing of {begun.job} is left"
        )
        return RunLostError(f"{error}; {what}")
    return RunLostError(
        f"{error}; its disk is kept, with what {begun.job} measured: to start it again for that, bring it back and end "
        f"it, use: cudadent42 remote attach {begun.job} --start"
    )


def _settled(error: MachineLostError) -> MachineState:
    """How the machine is once it has ended; a fresh one is deleted when it is preempted, others are kept."""
    now, begun = error.state, time.monotonic()
    while now is MachineState.STOPPING and time.monotonic() - begun < _STOPPING_S:
        time.sleep(_STOPPING_PAUSE_S)
        try:
            now = error.machine.state()
        except LabError:
            break
    return now
