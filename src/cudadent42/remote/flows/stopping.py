"""The end of everything that was started from here. What one machine refuses keeps no other from being ended."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from cudadent42.base.errors import LabError
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import record
from cudadent42.remote.core.job import JobState
from cudadent42.remote.core.protection import release_when_off
from cudadent42.remote.core.provider import Machine
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import bring_back, give_up
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.core.states import MachineOffError, MachineState
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.flows.survey import AT_ONCE, Started
from cudadent42.remote.providers import provider_of_run
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
    runs_on_record, damaged = record.readable()
    with_machines = {begun.job for each in started for begun in each.jobs}
    at_hand = [
        run
        for run in runs_on_record
        if run.cloud is None and not run.fetched and run.job not in with_machines
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        machines = pool.map(lambda each: _end_machine(each, damaged, say), started)
        runs = pool.map(_end_run, at_hand)
        return (*machines, *runs)


def stop_run(begun: JobRecord) -> bool:
    """End one run; False where its machine knows nothing of it, so that it is not waited for any more."""
    workspace = provider_of_run(begun).reach(record.remote_of(begun), begun)
    jobs.stop(workspace, begun.job)
    is_there = jobs.state(workspace, begun.job).state is not JobState.NONE
    if not is_there:
        record.save(replace(begun, fetched=True))
    return is_there


def _end_machine(started: Started, damaged: Sequence[str], say: Say) -> Stopped:
    name, machine = started.start.machine, started.machine
    if machine is None:
        return Stopped(name, False, started.problem)
    if started.word == "asked for":
        return Stopped(name, False, f"{started.problem}; try again in some minutes")
    stopped = started.state is MachineState.STOPPED
    unknown = damaged if machine.fresh else ()
    kept = "; ".join(
        filter(None, [*(_save(begun, machine, stopped, say) for begun in started.jobs), *unknown])
    )
    try:
        if not kept:
            say(f"{machine.ending} {machine.name}")
            machine.end()
        elif not stopped:
            say(f"stopping {machine.name}")
            machine.stop()
    except LabError as error:
        why = "; ".join(filter(None, [str(error), kept]))
        return Stopped(name, False, f"{why}; it goes on costing money: {machine.end_command}")
    gone = machine.fresh and not kept
    outcome = StartOutcome.DELETED if gone else StartOutcome.STOPPED
    what = machine.ended if gone else outcome.value
    if kept:
        how = f"to bring it back: {machine.attach_command(started.jobs[-1].job)}; " if started.jobs else ""
        what = f"stopped, and not {machine.ended}: {kept}; {how}to {machine.to_end}: {machine.end_command}"
    return Stopped(name, True, what + _mark(started, outcome))


def _mark(started: Started, outcome: StartOutcome) -> str:
    """What is to be added about the journal, if anything."""
    if started.start.outcome is not outcome:
        try:
            starts.mark(started.start.id, outcome, "remote stop --all")
        except LabError as error:
            return f"; {error}"  # the next survey corrects the journal
    return ""


def _why_kept(begun: JobRecord, error: LabError) -> str | None:
    """A run that was lost is an error and has been brought back all the same."""
    if record.find(begun.job).fetched:
        return None
    return f"its disk has what {begun.job} measured, which could not be brought back ({error})"


def _save(begun: JobRecord, machine: Machine, stopped: bool, say: Say) -> str | None:
    """End a run, and bring it back from a machine that is to be deleted; why its disk is to be kept, or None."""
    if stopped and machine.fresh:
        return f"its disk has what {begun.job} measured"  # nothing comes from there before it is started
    try:
        workspace = provider_of_run(begun).reach(record.remote_of(begun), begun)
        say(f"ending {begun.job} on {begun.cloud.machine if begun.cloud else begun.remote}")
        jobs.stop(workspace, begun.job)
        if machine.fresh and jobs.state(workspace, begun.job).state is not JobState.NONE:
            bring_back(workspace, begun, say, lambda chunk: None)
            say(f"{begun.job} is back, in {begun.output}")
        elif machine.fresh:
            record.save(replace(begun, fetched=True))  # there is nothing that could be brought back
        release_when_off(workspace, say)
        workspace.connection.close()
    except LabError as error:
        # Any other machine keeps its disk; being stopped ends its runs too.
        if machine.fresh:
            return _why_kept(begun, error)
    return None


def _end_run(begun: JobRecord) -> Stopped:
    name = f"{begun.job} on {begun.remote}"
    try:
        workspace = provider_of_run(begun).reach(record.remote_of(begun), begun)
        try:
            jobs.stop(workspace, begun.job)
        except ConnectionLostError:
            workspace.on_lost()
            raise
    except MachineOffError as error:
        if error.state is MachineState.GONE:
            give_up(begun)
        return Stopped(name, True, f"ended with its machine: {error}")
    except LabError as error:
        return Stopped(name, False, str(error))
    return Stopped(name, True, f"ended; bring it back with: cudadent42 remote attach {begun.job}")
