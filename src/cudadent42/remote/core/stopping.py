"""The end of everything that was started from here. What one machine refuses keeps no other from being ended."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from cudadent42.base.errors import LabError
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import record
from cudadent42.remote.core.job import JobState
from cudadent42.remote.core.machines import AT_ONCE, Started
from cudadent42.remote.core.protection import release_when_off
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import bring_back, give_up, workspace_of
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.gce import lease, machine
from cudadent42.remote.providers.gce.machine import Machine, MachineState
from cudadent42.remote.providers.sky import cluster
from cudadent42.remote.providers.sky.cluster import Cluster, ClusterLostError
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome


@dataclass(frozen=True)
class Stopped:
    """What became of one machine, or of one run on a machine of one's own."""

    name: str
    ended: bool
    what: str
    """What was done, or why it could not be."""


def stop_all(started: Sequence[Started], say: Say) -> tuple[Stopped, ...]:
    """End every run that was started elsewhere and is not back, stop every machine, delete every fresh one.

    What a fresh machine has measured is brought back before; where that fails it is stopped and keeps its disk. So
    where a record of a run cannot be read: that run may have been there.
    """
    known_runs, damaged = record.readable()
    with_machines = {begun.job for each in started for begun in each.jobs}
    at_hand = [
        run for run in known_runs if run.cloud is None and not run.fetched and run.job not in with_machines
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        machines = pool.map(lambda each: _end_machine(each, damaged, say), started)
        runs = pool.map(_end_run, at_hand)
        return (*machines, *runs)


def _end_machine(started: Started, damaged: Sequence[str], say: Say) -> Stopped:
    name, target = started.start.machine, started.machine
    if target is None:
        return Stopped(name, False, started.problem)
    if started.word == "asked for":
        return Stopped(name, False, f"{started.problem}; try again in some minutes")
    if isinstance(target, Cluster):
        return _end_cluster(started, target, damaged, say)
    unknown = damaged if target.fresh else ()
    kept = "; ".join(filter(None, [*(_save(begun, say) for begun in started.jobs), *unknown]))
    try:
        if not kept:
            say(f"ending {name}")
            machine.end(target)
        elif started.state is not MachineState.STOPPED:
            say(f"stopping {name}")
            machine.stop(target)
    except LabError as error:
        return Stopped(name, False, f"{error}; it goes on costing money: {target.end_command}")
    gone = target.fresh and not kept
    outcome = StartOutcome.DELETED if gone else StartOutcome.STOPPED
    what = f"stopped, and not deleted: {kept}; to delete it: {target.end_command}" if kept else outcome.value
    return Stopped(name, True, what + _mark(started, outcome))


def _mark(started: Started, outcome: StartOutcome) -> str:
    """What is to be added about the journal, if anything."""
    if started.start.outcome is not outcome:
        try:
            starts.mark(started.start.id, outcome, "remote stop --all")
        except LabError as error:
            return f"; {error}"  # the next survey corrects the journal
    return ""


def _end_cluster(started: Started, target: Cluster, damaged: Sequence[str], say: Say) -> Stopped:
    """Taken down with its disk, so stopped where what is on it could not be brought back."""
    name = started.start.machine
    stopped = started.state is MachineState.STOPPED
    save = _left_on if stopped else _save_from_cluster
    kept = "; ".join(filter(None, [*(save(begun, say) for begun in started.jobs), *damaged]))
    try:
        if not kept:
            say(f"taking down {target.name}")
            cluster.end(target)
        elif not stopped:
            say(f"stopping {target.name}")
            cluster.stop(target)
    except LabError as error:
        why = "; ".join(filter(None, [str(error), kept]))
        return Stopped(name, False, f"{why}; it goes on costing money: {target.end_command}")
    what = "taken down"
    if kept:
        how = f"{cluster.how_to_start(target)}; " if started.jobs else ""
        what = f"stopped, and not taken down: {kept}; {how}to take it down: {target.end_command}"
    return Stopped(name, True, what + _mark(started, StartOutcome.STOPPED if kept else StartOutcome.DELETED))


def _left_on(begun: JobRecord, say: Say) -> str:
    """Why the disk of a stopped machine is kept: nothing comes from there before it is started."""
    return f"its disk has what {begun.job} measured"


def _save_from_cluster(begun: JobRecord, say: Say) -> str | None:
    """As ``_save``, from a machine of SkyPilot's."""
    try:
        workspace = workspace_of(record.remote_of(begun))
        say(f"ending {begun.job} on {begun.remote}")
        jobs.stop(workspace, begun.job)
        if jobs.state(workspace, begun.job).state is not JobState.NONE:
            bring_back(workspace, begun, say, lambda chunk: None)
            say(f"{begun.job} is back, in {begun.output}")
        else:
            record.save(replace(begun, fetched=True))  # there is nothing that could be brought back
        workspace.connection.close()
    except LabError as error:
        return _why_kept(begun, error)
    return None


def _why_kept(begun: JobRecord, error: LabError) -> str | None:
    """A run that was lost is an error and has been brought back all the same."""
    if record.find(begun.job).fetched:
        return None
    return f"its disk has what {begun.job} measured, which could not be brought back ({error})"


def _save(begun: JobRecord, say: Say) -> str | None:
    """End a run, and bring it back from a machine that is to be deleted; why its disk is to be kept, or None."""
    assert begun.cloud is not None
    fresh = Machine(machine.Provider.GCE, begun.cloud.machine, begun.cloud.rate).fresh
    try:
        workspace = lease.resume(begun.cloud, record.remote_of(begun)).workspace
        say(f"ending {begun.job} on {begun.cloud.machine}")
        jobs.stop(workspace, begun.job)
        if fresh and jobs.state(workspace, begun.job).state is not JobState.NONE:
            bring_back(workspace, begun, say, lambda chunk: None)
            say(f"{begun.job} is back, in {begun.output}")
        release_when_off(workspace, say)
        workspace.connection.close()
    except LabError as error:
        # Any other machine keeps its disk; being stopped ends its runs too.
        if fresh:
            return _why_kept(begun, error)
    return None


def _end_run(begun: JobRecord) -> Stopped:
    name = f"{begun.job} on {begun.remote}"
    try:
        workspace = workspace_of(record.remote_of(begun))
        try:
            jobs.stop(workspace, begun.job)
        except ConnectionLostError:
            workspace.on_lost()
            raise
    except ClusterLostError as error:
        if error.state is MachineState.GONE:
            give_up(begun)
        return Stopped(name, True, f"ended with its machine: {error}")
    except LabError as error:
        return Stopped(name, False, str(error))
    return Stopped(name, True, f"ended; bring it back with: cudadent42 remote attach {begun.job}")
