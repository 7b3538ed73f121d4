"""An instance that answers, and what becomes of it however its run ends. What runs on, and what ends it, is said.

    (`starting`) -> a run -> stop, delete or keep -> on record

An entry of the journal stays open for as long as the machine may cost something. A run that goes on there when this
process ends is left its machine; whoever brings it back ends the machine, by the policy that was asked for when it was
started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from cudadent42.base.errors import ExitCode, LabError
from cudadent42.cost import rates
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import record
from cudadent42.remote.core.job import JobState, Workspace
from cudadent42.remote.core.policy import After, Ending, parse_after
from cudadent42.remote.core.protection import release, release_when_off
from cudadent42.remote.core.record import CloudRecord, JobRecord
from cudadent42.remote.core.run import Returned, RunLostError, RunRequest, begin, give_up
from cudadent42.remote.core.ssh import ConnectionLostError, call
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.gce import machine, results
from cudadent42.remote.providers.gce.fate import MachineLostError
from cudadent42.remote.providers.gce.identity import taken_over
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

_STOPPING_S = 120.0
"""How long a machine that is being taken away is watched; 30 s are usual."""
_STOPPING_PAUSE_S = 3.0
_SHUT_DOWN = 'sudo -n shutdown -h "+$1"'
"""One that the guest asks for ends the instance's running time; the user of a Google image may ask for it."""


class StillRunningError(LabError):
    """A machine that should have been ended runs on."""

    exit_code = ExitCode.NOT_READY


@dataclass(frozen=True)
class Lease:
    """An instance that answers."""

    cloud: CloudRecord
    machine: Machine
    workspace: Workspace
    say: Say

    log_is_shown = False

    @property
    def after(self) -> After:
        return parse_after(self.cloud.after)

    def begin(self, request: RunRequest, on_log: Callable[[bytes], None]) -> JobRecord:
        return begin(self.workspace, request, self.say, self.cloud)

    def keep(self, returned: Returned) -> None:
        """Copy the run folder to where the user asked for."""
        if self.cloud.results and returned.folder.is_dir():
            results.copy(returned.folder, self.cloud.results, returned.record.job, self.say)

    def failed(self, error: BaseException) -> None:
        """The machine is ended, unless a run goes on there, or what it measured is only there."""
        name, begun = self.machine.name, self._waiting()
        if isinstance(error, MachineLostError):
            if begun is not None:
                raise lost(begun, error, self.say) from error
            _put_lost_on_record(self.cloud, error, self.say)
            return
        if isinstance(error, KeyboardInterrupt | ConnectionLostError):
            if begun is not None:
                self.say(
                    f"{begun.job} goes on there. Bring it back, and end the machine as asked, with: "
                    f"cudadent42 remote attach {begun.job}\n{what_runs(self.machine)}"
                )
                return
        elif begun is not None and not self._has(begun):
            with suppress(LabError):
                give_up(begun)
                self.say(f"{begun.job} is not waited for any more: {name} has nothing of it")
        elif begun is not None and self.machine.fresh:
            self.say(
                f"{name} is not deleted, since what {begun.job} measured is only there; bring it back "
                f"with: cudadent42 remote attach {begun.job}\n{what_runs(self.machine)}"
            )
            return
        self.end()

    def end(self) -> StillRunningError | None:
        """What the policy says, now that no run of ours is there."""
        try:
            identity = self._start_to_end()
        except BaseException:
            self.say(what_runs(self.machine))
            raise
        if identity is None:
            return None
        try:
            self._end(identity)
        except StillRunningError as error:
            self.say(str(error))
            return error
        return None

    def _waiting(self) -> JobRecord | None:
        """The run on this machine that was not brought back yet."""
        mine = [job for job in record.readable()[0] if job.cloud == self.cloud and not job.fetched]
        return mine[-1] if mine else None

    def _has(self, begun: JobRecord) -> bool:
        """Whether the machine has something of a run; so where that cannot be asked."""
        try:
            return jobs.state(self.workspace, begun.job).state is not JobState.NONE
        except LabError:
            return True

    def _start_to_end(self) -> str | None:
        """The start that is to end now; None where the machine goes on, which has been said."""
        name, goes_on = self.machine.name, what_runs(self.machine)
        if self.cloud.start is None:
            self._left(
                f"{name} was running before this run, so it is left running; "
                f"end it with: {self.machine.end_command}"
            )
        elif (identity := self._our_start(self.cloud.start)) is None:
            self._left()
        elif others := self._running():
            self._left(f"{name} is left running, for {', '.join(others)} runs there; {goes_on}")
        elif self.after.ending is Ending.KEEP:
            self._left(goes_on)
        elif self.after.minutes is not None and self._shuts_down(self.after.minutes):
            self._left()
        else:
            release_when_off(self.workspace, self.say)
            return identity
        return None

    def _left(self, said: str = "") -> None:
        release(self.workspace, self.cloud, self.say)
        if said:
            self.say(said)

    def _our_start(self, identity: str) -> str | None:
        """The start of ours that the machine runs from; None where it is somebody else's by now, and ours is closed.

        It is another than the run's, ``identity``, where the machine was started again from here and the run's record
        could not say so any more. Where nothing can be asked it is the run's.
        """
        instance = self.machine
        try:
            description = instance.find()
            mine = [
                each
                for each in starts.load()
                if each.machine == instance.name and not (each.ended and each.id != identity)
            ]
            if description is None or not machine.state_in(description).costs or not mine:
                return identity
            other = taken_over(instance, description, mine[-1])
        except LabError:
            return identity
        if other is None:
            return mine[-1].id
        for each in mine:
            put_on_record(each.id, other.outcome, other.reason, self.say, other.time)
        self.say(f"{instance.name} is left running: {other.reason}")
        return None

    def _running(self) -> list[str]:
        """Runs that go on there; none where that cannot be asked."""
        try:
            states = jobs.jobs(self.workspace)
        except LabError:
            return []
        return [name for name, state in states.items() if state.state is JobState.RUNNING]

    def _shuts_down(self, minutes: int) -> bool:
        """Tell it to shut itself down; False where it does not take that."""
        try:
            done = call(self.workspace.connection, _SHUT_DOWN, str(minutes))
        except LabError as error:
            said: str | None = str(error)
        else:
            said = done.errors.strip() if done.exit_code else None
        name = self.machine.name
        if said is not None:
            self.say(f"{name} cannot be told to shut itself down after {minutes} min ({said}); ending it now")
            return False
        rest = "; its disk stays until it is deleted" if self.machine.fresh else ""
        self.say(
            f"{what_runs(self.machine)}\nit shuts itself down in {minutes} min, unless another run begins{rest}"
        )
        return True

    def _end(self, identity: str) -> None:
        """Stop or delete it. Raises StillRunningError where that fails; its entry in the journal stays open then."""
        self.workspace.connection.close()
        instance, how = self.machine, Machine.end
        # From another terminal, while this one's run went on.
        others = [
            begun.job
            for begun in record.waiting_on(instance.name)
            if begun.cloud and begun.cloud.since != self.cloud.since
        ]
        if instance.fresh and others:
            self.say(
                f"{instance.name} is not deleted, since what {', '.join(others)} measured is only there; bring it back "
                f"with: cudadent42 remote attach {others[-1]} --start"
            )
            how = Machine.stop
        end_machine(instance, identity, StartOutcome.STOPPED, "", self.say, how)


def lost(begun: JobRecord, error: MachineLostError, say: Say) -> RunLostError:
    """What became of a run whose machine does not run any more; on record, and in words."""
    assert begun.cloud is not None
    _put_lost_on_record(begun.cloud, error, say)
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


def _put_lost_on_record(cloud: CloudRecord, error: MachineLostError, say: Say) -> None:
    if cloud.start is not None:
        ending = error.ending
        put_on_record(cloud.start, StartOutcome.LOST, str(ending), say, machine.moment(ending.time))


def what_runs(instance: Machine) -> str:
    """A line about a machine that goes on: what it costs, and what ends it."""
    try:
        rate = rates.load().find(instance.rate)
    except LabError:
        rate = None  # a price that cannot be read hides no machine
    price = f" at ${rate.usd_per_hour:.2f} an hour" if rate else ""
    return f"{instance.name} goes on running{price}; end it with: {instance.end_command}"


def end_machine(
    instance: Machine,
    identity: str,
    outcome: StartOutcome,
    reason: str,
    say: Say,
    how: Callable[[Machine], None] = Machine.end,
) -> None:
    """End a machine; what the provider says counts, not whether the call for it went well."""
    deletes = instance.fresh and how is Machine.end
    verb, ended = ("deleting", "deleted") if deletes else ("stopping", "stopped")
    say(f"{verb} {instance.name}")
    failed: BaseException | None = None
    try:
        how(instance)
    except BaseException as error:
        if not _has_ended(instance, MachineState.GONE if deletes else MachineState.STOPPED):
            message = f"NOT {ended.upper()}: {what_runs(instance)}"
            if isinstance(error, LabError):
                raise StillRunningError(f"{error}\n{message}") from error
            say(message)
            raise
        failed = error
    say(f"{instance.name} is {ended}")
    put_on_record(identity, outcome, reason, say)
    if failed is not None and not isinstance(failed, LabError):
        raise failed


def _has_ended(instance: Machine, wanted: MachineState) -> bool:
    try:
        return instance.state() in (wanted, MachineState.GONE)
    except LabError:
        return False


def put_on_record(
    identity: str,
    outcome: StartOutcome,
    reason: str,
    say: Say,
    moment: datetime | None = None,
    called: str = "",
) -> None:
    """How a start went on. Its request is on record, so that a journal which takes no more forgets no machine: what it
    says wrongly then, `remote status` corrects."""
    try:
        starts.mark(identity, outcome, reason, moment, called)
    except LabError as error:
        say(str(error))
