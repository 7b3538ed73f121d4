"""A run on a machine that SkyPilot finds: on record, launched, read back, taken down, in this order.

Whatever happens here, the machine ends by itself: SkyPilot's idle limit is set with the launch, and the run's longest
time is in the task. It is taken down from here only once what was measured is back, or where nothing was.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from cudadent42.base.errors import ExitCode, LabError, MachineNotReadyError, UsageError
from cudadent42.remote.core import hosts, record
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import Address, parse
from cudadent42.remote.core.hosts import DEFAULT_FOLDER, Remote
from cudadent42.remote.core.job import JobState, Workspace
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import (
    Ended,
    Returned,
    RunLostError,
    bring_back,
    give_up,
    persistently,
    workspace_of,
)
from cudadent42.remote.core.scripts import script as far_script
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.core.tree import Tree, archive, project_root, read_tree
from cudadent42.remote.providers.gce.machine import MachineState
from cudadent42.remote.providers.sky import cluster, keys
from cudadent42.remote.providers.sky.cluster import Cluster, ClusterLostError
from cudadent42.remote.providers.sky.launch import Launched, launch
from cudadent42.remote.providers.sky.spec import Spec
from cudadent42.remote.providers.sky.task import Files, script, task
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


def run_on_sky(
    spec: Spec,
    device: str,
    arguments: Sequence[str],
    output: Path,
    say: Say,
    on_output: Callable[[bytes], None],
    kept: str | None,
) -> Ended:
    """Run ``cudadent42 run ARGUMENTS`` on the machine of ``spec``; its run folder comes to ``output``.

    ``kept`` is what ``kept_start`` says.

    Raises:
        UsageError: another terminal has asked for the machine since ``kept_start`` looked.
        MachineNotReadyError: SkyPilot is not installed, or the machine did not come up; it is taken down again.
        RunLostError: the machine was taken away.
        LabError: the run was lost there, or could not be brought back: then the machine is left to its idle limit.
        ConnectionLostError: the machine does not answer; it is left to its idle limit.
    """
    cluster.find_sky()
    keys.file()  # else what was measured could not be had back after the launch
    tree = read_tree(project_root())
    identity = _on_record(spec, kept)
    begun = JobRecord(
        record.new_job(),
        spec.cluster,
        str(output.absolute()),
        tuple(arguments),
        datetime.now(timezone.utc).isoformat(),
        folder=DEFAULT_FOLDER,
        address=str(_address(spec)),
        start=identity,
    )
    record.save(begun)
    say(f"asking SkyPilot for {spec.cluster}; it takes it down after {spec.idle_minutes} idle minutes")
    launched = _launched(spec, tree, begun, identity, device, say, on_output)
    workspace = workspace_of(record.remote_of(begun))
    returned = None
    try:
        if _state(workspace, begun, launched, spec, say) is not JobState.NONE:
            if not launched.arrived:
                starts.mark(identity, StartOutcome.READY)
            # SkyPilot has shown the log already.
            returned = bring_back(workspace, begun, say, lambda chunk: None)
    except ClusterLostError as error:
        raise _lost(begun, identity, error) from error
    except BaseException:
        # A run that was lost there is an error, and is back all the same.
        back = record.find(begun.job).fetched
        trouble = _end(spec, identity, workspace, say) if back else _left(spec, begun)
        if trouble is not None:
            say(str(trouble))
        raise
    if returned is None:
        record.save(replace(begun, fetched=True))  # there is nothing that could be brought back
        raise _never_ran(spec, identity, launched, kept, say)
    return Ended(returned, _end(spec, identity, workspace, say))


def attach(remote: Remote, begun: JobRecord, say: Say, on_log: Callable[[bytes], None]) -> Returned:
    """Bring a run back that was left on its machine, which stays until it was idle for its minutes.

    Raises RunLostError where the machine does not run any more; else like ``run_on_sky``.
    """
    try:
        returned = bring_back(workspace_of(remote), begun, say, on_log)
    except ClusterLostError as error:
        raise _lost(begun, remote.start, error) from error
    say(
        f"{remote.name} is taken down when it was idle for some minutes; sooner: {Cluster(remote.name).end_command}"
    )
    return returned


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
        status = cluster.status(at)
    except LabError:
        # A launch that came to its end has shown all that the machine said.
        return launched.exit_code < 0
    if status is None:
        return False
    # SkyPilot sets the limit directly before it gives the machine the task. So one without it has not run, and nothing
    # would end it; one with it ends by itself.
    return status.idle_minutes is None or status.idle_minutes >= 0


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
