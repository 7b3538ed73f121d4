"""Google Compute Engine behind the protocol of providers: an instance that is there or can be made, for a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cudadent42.base.errors import UsageError
from cudadent42.remote.core import hosts, record
from cudadent42.remote.core.address import GceAddress, SpecificationFile
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import Workspace
from cudadent42.remote.core.money import Paid
from cudadent42.remote.core.protection import Terms, protect
from cudadent42.remote.core.provider import Lease as AnyLease
from cudadent42.remote.core.provider import Machine as AnyMachine
from cudadent42.remote.core.provider import Offer
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.gce import starting, status
from cudadent42.remote.providers.gce.checks import Prepared, prepare
from cudadent42.remote.providers.gce.fate import MachineLostError
from cudadent42.remote.providers.gce.lease import Lease, lost, what_runs
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.remote.providers.gce.unguarded import agree_to_start
from cudadent42.runs.starts import MachineStart


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
        return starting.begin(self.prepared, say, _protecting(terms, say))


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
        return starting.workspace_of(clouds[-1], remote)

    def adopt(self, begun: JobRecord, terms: Terms, say: Say, *, start: bool = False) -> AnyLease:
        assert begun.cloud is not None
        remote = record.remote_of(begun)
        try:
            workspace = starting.workspace_of(begun.cloud, remote)
        except MachineLostError as error:
            if not (start and error.state is MachineState.STOPPED):
                raise lost(begun, error, say) from error
            lease = starting.restart(begun.cloud, remote, say, _protecting(terms, say), terms.consent)
            try:
                record.save(replace(begun, cloud=lease.cloud))
            except BaseException:
                say(what_runs(lease.machine))
                raise
            return lease
        return Lease(begun.cloud, Machine(begun.cloud.machine, begun.cloud.rate), workspace, say)

    def machine(self, start: MachineStart) -> AnyMachine | None:
        return status.of_start(start)


def _protecting(terms: Terms, say: Say) -> starting.Protect:
    return lambda lease: protect(lease.workspace, lease.cloud, terms, say)
