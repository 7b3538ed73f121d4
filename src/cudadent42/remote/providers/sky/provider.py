"""SkyPilot behind the protocol of providers: a machine that it finds, or that was kept, on record before it is had."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.remote.core import hosts, money, record
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import Workspace
from cudadent42.remote.core.money import Paid
from cudadent42.remote.core.protection import Terms
from cudadent42.remote.core.provider import Lease, Machine, Offer
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import working_tree
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.sky import cluster, keys
from cudadent42.remote.providers.sky.cluster import Cluster
from cudadent42.remote.providers.sky.lease import Adopted, Held
from cudadent42.remote.providers.sky.reach import workspace_of
from cudadent42.remote.providers.sky.spec import SCHEME, Spec, load
from cudadent42.remote.providers.ssh import looked_at
from cudadent42.runs import starts
from cudadent42.runs.starts import MachineStart, StartOutcome


def kept_start(spec: Spec) -> str | None:
    """The start on record of a machine that was kept and still runs; None where one is to be started.

    SkyPilot is asked, and the journal corrected. Raises UsageError for a machine of that name that is somebody's, or
    that has what was not brought back: it would be taken down after the run. LabError where SkyPilot does not say.
    """
    at = Cluster(spec.cluster)
    state = at.state()
    mine = [start for start in starts.load() if start.machine == spec.machine]
    if state is MachineState.GONE:
        for start in mine:
            if start.outcome in (StartOutcome.READY, StartOutcome.STOPPED):
                starts.mark(start.id, StartOutcome.DELETED, cluster.IS_GONE)
        return None
    if not mine or mine[-1].outcome in (StartOutcome.FAILED, StartOutcome.DELETED):
        raise UsageError(
            f"SkyPilot has a machine {at.name} that was not started from here; give this one another `cluster`, or end "
            f"that one with: {at.end_command}"
        )
    last = mine[-1]
    waiting = _unfetched(last)
    if waiting and not (spec.keep and state.costs):
        how = (
            f"bring it back with: cudadent42 remote attach {waiting[-1].job}"
            if state.costs
            else at.how_to_bring_back
        )
        raise UsageError(
            f"{at.name} has what {waiting[-1].job} measured, and would be taken down after this run; {how}; "
            f"or give it up with: {at.end_command}"
        )
    if not state.costs:
        if last.ended is None:
            starts.mark(last.id, StartOutcome.STOPPED, cluster.IS_STOPPED)
        return None
    if last.ended is not None:
        starts.mark(last.id, StartOutcome.READY, cluster.RUNS_AGAIN)
    return last.id


def _unfetched(start: MachineStart) -> list[JobRecord]:
    """Runs on the machine of a start that were not brought back."""
    at = cluster.of_start(start)
    return [each for each in record.readable()[0] if at and at.ran(each, start) and not each.fetched]


@dataclass(frozen=True)
class Wanted:
    """A machine that SkyPilot is to find, or that was kept from a run before."""

    spec: Spec
    kept: str | None
    """What ``kept_start`` says."""

    @property
    def name(self) -> str:
        return self.spec.cluster

    @property
    def has_gpu(self) -> bool:
        return "accelerators" in self.spec.resources or "instance_type" in self.spec.resources

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.spec.architectures

    def cost(self) -> Paid:
        return Paid(
            rate=self.spec.rate,
            rented=True,
            starting=self.kept is None,
            own_environment=True,
            idle_minutes=self.spec.idle_minutes,
        )

    def agree(self, terms: Terms, say: Say) -> Wanted:
        """With the longest time that is left for what was agreed on."""
        if terms.limit is None or terms.estimate is None:
            return self
        left = money.run_minutes(terms.limit.usd, terms.estimate)
        if left is None:
            return self
        minutes = min(left, self.spec.max_minutes)
        say(f"{self.name}: the run is ended {minutes} min after it has arrived there")
        return replace(self, spec=replace(self.spec, max_minutes=minutes))

    def start(self, terms: Terms, say: Say) -> Lease:
        """Raises UsageError where another terminal has asked for the machine since ``kept_start`` looked."""
        cluster.find_sky()
        keys.file()  # else what was measured could not be had back after the launch
        tree = working_tree()
        return Held(self.spec, _on_record(self.spec, self.kept), self.kept is not None, tree, say)


class Sky:
    """The provider."""

    scheme = SCHEME

    def has(self, remote: Remote) -> bool:
        return bool(remote.start)

    def ran(self, begun: JobRecord) -> bool:
        return begun.cloud is None and bool(record.remote_of(begun).start)

    def resolve(self, on: str, device: str, say: Say) -> Offer:
        if not on.startswith(SCHEME):
            return looked_at(workspace_of(hosts.get(on)), say)
        spec = load(Path(on.removeprefix(SCHEME)))
        cluster.find_sky()
        return Wanted(spec, kept_start(spec))

    def reach(self, remote: Remote, begun: JobRecord | None = None) -> Workspace:
        return workspace_of(remote)

    def adopt(self, begun: JobRecord, terms: Terms, say: Say, *, start: bool = False) -> Lease:
        return Adopted(workspace_of(record.remote_of(begun)), say, begun)

    def machine(self, start: MachineStart) -> Machine | None:
        return cluster.of_start(start)


def _on_record(spec: Spec, kept: str | None) -> str:
    """The start's identity. SkyPilot writes an alias for ``ssh``; by that name it is a remote, for attach and stop."""
    with hosts.changing() as registered:
        other = registered.get(spec.cluster)
        if other is not None and other.address != spec.address:
            raise UsageError(
                f"{spec.cluster} is already the name of the remote {other.address}; "
                "give the machine another `cluster`"
            )
        identity = _start_of(spec, kept) or starts.request(spec.machine, spec.rate)
        registered[spec.cluster] = Remote(spec.cluster, spec.address, start=identity)
    return identity


def _start_of(spec: Spec, kept: str | None) -> str | None:
    """``kept`` where it is still the start of the machine. Since SkyPilot was asked, a question was answered.

    Raises UsageError where another terminal waits for a run on that machine: whoever ends first would take it down.
    """
    going_on = [start for start in starts.load() if start.machine == spec.machine and start.ended is None]
    if not going_on:
        return None
    last = going_on[-1]
    waiting = _unfetched(last)
    if waiting and not (spec.keep and last.id == kept):
        raise UsageError(
            f"{spec.cluster} is asked for already, for {waiting[-1].job}, which is not back; bring it back or give it "
            f"up with: cudadent42 remote attach {waiting[-1].job}; or give this one another `cluster`"
        )
    return kept if last.id == kept else None
