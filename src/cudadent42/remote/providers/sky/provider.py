"""SkyPilot behind the protocol of providers: a machine that it finds, on record, launched, read back, taken down.

Whatever happens here, the machine ends by itself: SkyPilot's idle limit is set with the launch, and the run's longest
time is in the task. It is taken down from here only once what was measured is back, or where nothing was.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from cudadent42.base.errors import ExitCode, LabError, MachineNotReadyError, UsageError
from cudadent42.remote.core import hosts, money, record
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import Address, parse
from cudadent42.remote.core.hosts import DEFAULT_FOLDER, Remote
from cudadent42.remote.core.job import JobState, Workspace
from cudadent42.remote.core.money import Paid
from cudadent42.remote.core.protection import Terms
from cudadent42.remote.core.provider import Lease, Machine, Offer
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import (
    Returned,
    RunLostError,
    RunRequest,
    give_up,
    persistently,
    working_tree,
)
from cudadent42.remote.core.scripts import script as far_script
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.status import Status
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.core.tree import Tree, archive
from cudadent42.remote.providers.sky import cluster, keys, status
from cudadent42.remote.providers.sky.cluster import Cluster, ClusterLostError
from cudadent42.remote.providers.sky.launch import Launched, launch
from cudadent42.remote.providers.sky.reach import workspace_of
from cudadent42.remote.providers.sky.spec import SCHEME, Spec, load
from cudadent42.remote.providers.sky.task import Files, script, task
from cudadent42.remote.providers.ssh import AtHand, looked_at
from cudadent42.runs import starts
from cudadent42.runs.starts import MachineStart, StartOutcome


class StillUpError(LabError):
    """A machine that should have been taken down is still there."""

    exit_code = ExitCode.NOT_READY


def kept_start(spec: Spec) -> str | None:
    """The start on record of a machine that was kept and still runs; None where one is to be started.

    SkyPilot is asked, and the journal corrected. Raises UsageError for a machine of that name that is somebody's, or
    that has what was not brought back: it would be taken down after the run. LabError where SkyPilot does not say.
    """
    at = Cluster(spec.cluster)
    state = cluster.state(at)
    mine = [start for start in starts.load() if start.machine == spec.machine]
    if state is MachineState.GONE:
        for start in mine:
            if start.outcome in (StartOutcome.READY, StartOutcome.STOPPED):
                starts.mark(start.id, StartOutcome.DELETED, "SkyPilot has no such machine any more")
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
            else cluster.how_to_start(at)
        )
        raise UsageError(
            f"{at.name} has what {waiting[-1].job} measured, and would be taken down after this run; {how}; "
            f"or give it up with: {at.end_command}"
        )
    if not state.costs:
        if last.ended is None:
            starts.mark(last.id, StartOutcome.STOPPED, "SkyPilot says that it is stopped")
        return None
    if last.ended is not None:
        starts.mark(last.id, StartOutcome.READY, cluster.RUNS_AGAIN)
    return last.id


def _unfetched(start: MachineStart) -> list[JobRecord]:
    """Runs on the machine of a start that were not brought back."""
    return [each for each in record.readable()[0] if cluster.ran_on(each, start) and not each.fetched]


class Held:
    """The lease of a machine that SkyPilot is asked for: it sends the working tree and starts the run itself."""

    log_is_shown = True

    def __init__(self, spec: Spec, identity: str, kept: str | None, tree: Tree, say: Say) -> None:
        self._spec = spec
        self._identity = identity
        self._kept = kept
        self._tree = tree
        self._say = say
        self._begun: JobRecord | None = None
        """Once it may have begun."""
        self._place: Workspace | None = None

    @property
    def workspace(self) -> Workspace:
        assert self._place is not None, "its run has not begun"
        return self._place

    def begin(self, request: RunRequest, on_log: Callable[[bytes], None]) -> JobRecord:
        """Lasts until SkyPilot says that the run has ended.

        Raises MachineNotReadyError where the machine did not come up; it is taken down again.
        """
        spec, say = self._spec, self._say
        begun = JobRecord(
            record.new_job(),
            spec.cluster,
            str(request.output.absolute()),
            request.arguments,
            datetime.now(timezone.utc).isoformat(),
            folder=DEFAULT_FOLDER,
            address=str(_address(spec)),
            start=self._identity,
        )
        record.save(begun)
        say(f"asking SkyPilot for {spec.cluster}; it takes it down after {spec.idle_minutes} idle minutes")
        launched = _launched(spec, self._tree, begun, self._identity, request.device, say, on_log)
        self._begun, self._place = begun, workspace_of(record.remote_of(begun))
        if _state(self._place, begun, launched, spec, say) is JobState.NONE:
            self._begun = None
            record.save(replace(begun, fetched=True))  # there is nothing that could be brought back
            raise _never_ran(spec, self._identity, launched, self._kept, say)
        if not launched.arrived:
            starts.mark(self._identity, StartOutcome.READY)
        return begun

    def keep(self, returned: Returned) -> None:
        """It is here."""

    def failed(self, error: BaseException) -> None:
        """A run that may be there keeps the machine, until it was idle for its minutes."""
        begun = self._begun
        if begun is None:
            return
        if isinstance(error, ClusterLostError):
            raise _lost(begun, self._identity, error) from error
        # A run that was lost there is an error, and is back all the same.
        back = record.find(begun.job).fetched
        trouble = self.end() if back else _left(self._spec, begun)
        if trouble is not None:
            self._say(str(trouble))

    def end(self) -> LabError | None:
        return _end(self._spec, self._identity, self.workspace, self._say)


class Adopted(AtHand):
    """The lease of a run that was left on its machine, which stays until it was idle for its minutes."""

    def __init__(self, workspace: Workspace, say: Say, begun: JobRecord) -> None:
        super().__init__(workspace, say, begun)
        self._begun = begun

    def failed(self, error: BaseException) -> None:
        if isinstance(error, ClusterLostError):
            raise _lost(self._begun, self.workspace.remote.start, error) from error
        super().failed(error)

    def end(self) -> LabError | None:
        at = Cluster(self._begun.remote)
        self._say(f"{at.name} is taken down when it was idle for some minutes; sooner: {at.end_command}")
        return None


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
        return Held(self.spec, _on_record(self.spec, self.kept), self.kept, tree, say)


@dataclass(frozen=True)
class SkyMachine:
    """A machine of SkyPilot's that was started from here."""

    cluster: Cluster

    fresh = True
    ending = "taking down"
    ended = "taken down"
    to_end = "take it down"

    @property
    def name(self) -> str:
        return self.cluster.name

    @property
    def end_command(self) -> str:
        return self.cluster.end_command

    def attach_command(self, job: str) -> str:
        return f"{self.cluster.start_command}; then: cudadent42 remote attach {job}"

    def ran(self, begun: JobRecord, start: MachineStart) -> bool:
        return cluster.ran_on(begun, start)

    def status(self, start: MachineStart, now: datetime) -> Status:
        return status.ask(self.cluster, start, now)

    def stop(self) -> None:
        cluster.stop(self.cluster)

    def end(self) -> None:
        cluster.end(self.cluster)


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
        at = cluster.of_start(start)
        return None if at is None else SkyMachine(at)


def _address(spec: Spec) -> Address:
    """The alias for ssh that SkyPilot writes."""
    return parse(f"ssh://{spec.cluster}")


def _on_record(spec: Spec, kept: str | None) -> str:
    """The start's identity. SkyPilot writes an alias for ``ssh``; by that name it is a remote, for attach and stop."""
    address = _address(spec)
    with hosts.changing() as registered:
        other = registered.get(spec.cluster)
        if other is not None and other.address != address:
            raise UsageError(
                f"{spec.cluster} is already the name of the remote {other.address}; "
                "give the machine another `cluster`"
            )
        identity = _start_of(spec, kept) or starts.request(spec.machine, spec.rate)
        registered[spec.cluster] = Remote(spec.cluster, address, start=identity)
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


def _launched(
    spec: Spec,
    tree: Tree,
    begun: JobRecord,
    identity: str,
    device: str,
    say: Say,
    on_output: Callable[[bytes], None],
) -> Launched:
    """The launch, with its files. Raises KeyboardInterrupt, once it is said what goes on."""

    def on_arrival() -> None:
        with suppress(UsageError):  # a full disk here ends no run there; it is tried again when it is back
            starts.mark(identity, StartOutcome.READY)

    with tempfile.TemporaryDirectory() as folder, archive(tree) as packed:
        files = Files(Path(folder) / "job.sh", Path(folder) / "tree.tar", tree.digest)
        files.script.write_text(script(far_script("job.sh")))
        with files.tree.open("wb") as file:
            shutil.copyfileobj(packed, file)
        path = Path(folder) / "task.yaml"
        path.write_text(task(spec, files, begun.job, device, begun.arguments))
        try:
            return launch(spec, path, begun.job, on_arrival, on_output)
        except KeyboardInterrupt:
            say(
                f"{spec.cluster} may be up, or come up, and {begun.job} may go on there; to bring it back: "
                f"cudadent42 remote attach {begun.job}; to end it: cudadent42 remote stop --all"
            )
            raise


def _state(workspace: Workspace, begun: JobRecord, launched: Launched, spec: Spec, say: Say) -> JobState:
    """What the machine knows of the run; none where there is no machine, or where it was not given the task.

    Raises ConnectionLostError where it may have run and does not answer; ClusterLostError where it is gone.
    """
    try:
        return jobs.state(workspace, begun.job).state
    except ConnectionLostError:
        if launched.exit_code != 0 and not _may_have_run(launched, Cluster(spec.cluster)):
            return JobState.NONE
    return persistently(lambda: jobs.state(workspace, begun.job).state, say, workspace.on_lost)


def _may_have_run(launched: Launched, at: Cluster) -> bool:
    """Whether a machine that does not answer may have something that was measured; in doubt it may."""
    if launched.arrived:
        return True
    try:
        status_there = cluster.status(at)
    except LabError:
        # A launch that came to its end has shown all that the machine said.
        return launched.exit_code < 0
    if status_there is None:
        return False
    # SkyPilot sets the limit directly before it gives the machine the task. So one without it has not run, and nothing
    # would end it; one with it ends by itself.
    return status_there.idle_minutes is None or status_there.idle_minutes >= 0


def _never_ran(
    spec: Spec, identity: str, launched: Launched, kept: str | None, say: Say
) -> MachineNotReadyError:
    """The end of a machine that did not run, with the reason. One that was kept has its idle limit from before, and
    may have what another run measured."""
    at = Cluster(spec.cluster)
    said = f"{spec.cluster} did not run: {launched.reason}"
    if kept is not None:
        return MachineNotReadyError(
            f"{said}; it was kept from a run before, and is left to its idle limit; sooner: {at.end_command}"
        )
    try:
        _take_down(spec, say)
    except LabError as error:
        return MachineNotReadyError(f"{said}; {error}{_may_go_on(spec)}")
    starts.mark(identity, StartOutcome.FAILED, launched.reason)
    return MachineNotReadyError(said)


def _lost(begun: JobRecord, identity: str, error: ClusterLostError) -> RunLostError:
    """What became of a run whose machine does not run any more; on record, and in words."""
    if error.state is MachineState.STOPPED:
        starts.mark(identity, StartOutcome.STOPPED, str(error))
        return RunLostError(f"{error}, which brings back what {begun.job} measured")
    give_up(begun)
    starts.mark(identity, StartOutcome.DELETED, str(error))
    return RunLostError(f"{error}: nothing of {begun.job} is left")


def _end(spec: Spec, identity: str, workspace: Workspace, say: Say) -> StillUpError | None:
    """What becomes of the machine once its run is back."""
    if spec.keep:
        say(
            f"{spec.cluster} is kept until it was idle for {spec.idle_minutes} minutes; "
            f"sooner: {Cluster(spec.cluster).end_command}"
        )
        return None
    workspace.connection.close()  # another machine may have its name and address before a shared connection ends itself
    try:
        _take_down(spec, say)
    except LabError as error:
        return StillUpError(f"NOT TAKEN DOWN: {error}{_may_go_on(spec)}")
    say(f"{spec.cluster} is taken down")
    try:
        starts.mark(identity, StartOutcome.DELETED)
    except LabError as error:
        say(str(error))  # the run is back all the same; `remote status` corrects the journal
    return None


def _take_down(spec: Spec, say: Say) -> None:
    """Raises LabError where that fails. An interrupt leaves it open, and that is said."""
    try:
        cluster.end(Cluster(spec.cluster))
    except KeyboardInterrupt:
        say(f"whether {spec.cluster} is taken down is not known{_may_go_on(spec)}")
        raise


def _left(spec: Spec, begun: JobRecord) -> str:
    return (
        f"{spec.cluster} is not taken down, since what {begun.job} measured is only there; it takes itself down, with "
        f"that, when it was idle for {spec.idle_minutes} minutes. Bring it back before: cudadent42 remote attach "
        f"{begun.job}; or end it with: {Cluster(spec.cluster).end_command}"
    )


def _may_go_on(spec: Spec) -> str:
    return f"; it may still cost money: sky status --refresh, {Cluster(spec.cluster).end_command}"
