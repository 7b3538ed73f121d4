"""A machine from its start to its end. Whatever happens in between, what runs and what ends it is said.

    request on record -> start or create -> answers -> ready on record -> (a run) -> stop, delete or keep -> on record

An entry of the journal stays open for as long as the machine may cost something.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from cudadent42.base.errors import ExitCode, LabError, MachineNotReadyError
from cudadent42.cost import rates
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import record
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import JobState, Workspace
from cudadent42.remote.core.policy import After, Ending, Reach, parse_after
from cudadent42.remote.core.protection import release, release_when_off
from cudadent42.remote.core.record import CloudRecord
from cudadent42.remote.core.ssh import ConnectionLostError, call
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.gce import checks, creation, gcloud, machine, reach
from cudadent42.remote.providers.gce.checks import Candidate, Prepared
from cudadent42.remote.providers.gce.failures import OTHER_ZONE_MAY_DO, CloudError, Failure
from cudadent42.remote.providers.gce.fate import MachineLostError
from cudadent42.remote.providers.gce.identity import provider_start, taken_over
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.remote.providers.gce.unguarded import agree_to_start
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

DRIVER_S = 300.0
"""How long after its sshd a machine with a GPU may take until the driver answers: some images install it first."""
_DRIVER_PAUSE_S = 5.0

Protect = Callable[["Lease"], None]
"""Gives a machine that answers its limits, before anything else happens on it. What it raises ends the machine."""


class StillRunningError(LabError):
    """A machine that should have been ended runs on."""

    exit_code = ExitCode.NOT_READY


@dataclass(frozen=True)
class Lease:
    """A machine that answers."""

    cloud: CloudRecord
    machine: Machine
    workspace: Workspace

    @property
    def after(self) -> After:
        return parse_after(self.cloud.after)


def begin(prepared: Prepared, say: Say, protect: Protect) -> Lease:
    """Start the first of the candidates that can be had, wait until it answers, and give it its limits.

    Raises:
        CloudError: none can be had, or it did not answer. Nothing is left running, or what is has been said.
        MachineLostError: it was taken away before it answered.
    """
    for note in prepared.notes:
        say(note)
    left = list(prepared.candidates)
    while True:
        candidate = left.pop(0)
        try:
            return _begin(candidate, prepared, say, protect)
        except CloudError as error:
            if error.failure is Failure.QUOTA_REGION:
                here = _region(candidate.machine)
                left = [other for other in left if _region(other.machine) != here]
            if error.failure not in OTHER_ZONE_MAY_DO or not left:
                raise
            say(f"{error.failure.value}: {candidate.machine.name}; trying {left[0].machine.address.zone}")


def resume(cloud: CloudRecord, remote: Remote) -> Lease:
    """The lease of a run that was started before. Raises CloudError; MachineLostError where it does not run."""
    instance = Machine(cloud.machine, cloud.rate)
    reach.raise_if_ended(instance, cloud.since)
    return _lease(cloud, instance, remote)


def restart(cloud: CloudRecord, remote: Remote, say: Say, protect: Protect, consent: Consent) -> Lease:
    """The lease of a run whose machine was stopped under it, started again.

    Raises like ``begin``; UsageError where nobody agrees to its start.
    """
    instance = Machine(cloud.machine, cloud.rate)
    instance.check_made_here()
    description = instance.describe()
    if not machine.has_own_limit(description, datetime.now(timezone.utc)):
        agree_to_start(remote, instance, consent)
        description = instance.describe()  # somebody else may have been faster than the answer
    state = machine.state_in(description)
    cloud = replace(cloud, since=_now())
    if state in (MachineState.RUNNING, MachineState.STARTING):
        ours = checks.open_start(instance, description)
        return _running_already(instance, replace(cloud, start=ours), remote, say, protect)
    if state is not MachineState.STOPPED:
        raise MachineNotReadyError(f"{instance.name} is {state.value} by now; try again")
    checks.settle(instance, description)
    # What the run measured is on its disk, so no failure of the start deletes it.
    return _started(instance, instance.start, cloud, remote, say, protect, Machine.stop)


def finish(lease: Lease, say: Say) -> None:
    """What the policy says, now that the run is back.

    Raises StillRunningError where the machine should have been ended and was not.
    """
    try:
        identity = _start_to_end(lease, say)
    except BaseException:
        say(what_runs(lease.machine))
        raise
    if identity is not None:
        end(replace(lease, cloud=replace(lease.cloud, start=identity)), say)


def _start_to_end(lease: Lease, say: Say) -> str | None:
    """The start that is to end now; None where the machine goes on, which has been said."""
    if lease.cloud.start is None:
        release(lease.workspace, lease.cloud, say)
        say(
            f"{lease.machine.name} was running before this run, so it is left running; "
            f"end it with: {lease.machine.end_command}"
        )
        return None
    identity = _our_start(lease, lease.cloud.start, say)
    if identity is None:
        release(lease.workspace, lease.cloud, say)
        return None
    others = _running(lease.workspace)
    if others:
        release(lease.workspace, lease.cloud, say)
        say(
            f"{lease.machine.name} is left running, for {', '.join(others)} runs there; {what_runs(lease.machine)}"
        )
        return None
    if lease.after.ending is Ending.KEEP:
        release(lease.workspace, lease.cloud, say)
        say(what_runs(lease.machine))
        return None
    if lease.after.minutes is not None and _shuts_down(lease, lease.after.minutes, say):
        release(lease.workspace, lease.cloud, say)
        return None
    release_when_off(lease.workspace, say)
    return identity


def end(lease: Lease, say: Say) -> None:
    """Stop or delete it. Raises StillRunningError where that fails; its entry in the journal stays open then."""
    lease.workspace.connection.close()
    instance, how = lease.machine, Machine.end
    # From another terminal, while this one's run went on.
    others = [
        begun.job
        for begun in record.waiting_on(instance.name)
        if begun.cloud and begun.cloud.since != lease.cloud.since
    ]
    if instance.fresh and others:
        say(
            f"{instance.name} is not deleted, since what {', '.join(others)} measured is only there; bring it back "
            f"with: cudadent42 remote attach {others[-1]} --start"
        )
        how = Machine.stop
    _end(instance, lease.cloud.start, StartOutcome.STOPPED, "", say, how)


def lost(lease: CloudRecord, error: MachineLostError, say: Say) -> None:
    """Put on record that a machine was taken away."""
    if lease.start is not None:
        ending = error.ending
        _put_on_record(lease.start, StartOutcome.LOST, str(ending), say, machine.moment(ending.time))


def what_runs(instance: Machine) -> str:
    """A line about a machine that goes on: what it costs, and what ends it."""
    try:
        rate = rates.load().find(instance.rate)
    except LabError:
        rate = None  # a price that cannot be read hides no machine
    price = f" at ${rate.usd_per_hour:.2f} an hour" if rate else ""
    return f"{instance.name} goes on running{price}; end it with: {instance.end_command}"


def _begin(candidate: Candidate, prepared: Prepared, say: Say, protect: Protect) -> Lease:
    instance = candidate.machine
    cloud = CloudRecord(
        machine=instance.name,
        rate=instance.rate,
        start=None,
        since=_now(),
        after=str(prepared.remote.after),
        reach=prepared.reach.value,
        spot=prepared.spot,
        results=prepared.results,
    )
    made = candidate.state is MachineState.GONE
    # Since it was looked at, kernels were compiled and a question was answered: somebody else may have started it.
    description = None if made else instance.find()
    state = machine.state_in(description)
    if description is not None and state in (MachineState.RUNNING, MachineState.STARTING):
        ours = checks.open_start(instance, description)
        return _running_already(instance, replace(cloud, start=ours), prepared.remote, say, protect)
    agreed = (
        prepared.guarded or not candidate.state.costs
    )  # to its start, which was not expected where it ran
    if not made and not (state is MachineState.STOPPED and agreed):
        raise MachineNotReadyError(f"{instance.name} is {state.value} by now; try again")
    checks.settle(instance, description)

    def start() -> None:
        if made:
            assert prepared.specification is not None
            creation.create(instance, prepared.specification)
        else:
            instance.start()

    def ready(lease: Lease) -> None:
        protect(lease)
        if prepared.accelerator:
            _await_driver(lease.workspace, instance, say)

    return _started(instance, start, cloud, prepared.remote, say, ready)


def _running_already(
    instance: Machine, cloud: CloudRecord, remote: Remote, say: Say, protect: Protect
) -> Lease:
    try:
        reach.wait(instance, Reach(cloud.reach), cloud.since, say)
        lease = _lease(cloud, instance, remote)
        protect(lease)
        if cloud.start is not None:
            # Of keep:MINUTES, after the run before; not before other limits hold, or an error leaves it with none.
            call(lease.workspace.connection, _CANCEL_SHUTDOWN)
    except BaseException:
        say(what_runs(instance))
        raise
    return lease


def _started(
    instance: Machine,
    start: Callable[[], None],
    cloud: CloudRecord,
    remote: Remote,
    say: Say,
    ready: Protect,
    take_back: Callable[[Machine], None] = Machine.end,
) -> Lease:
    """Start a machine that does not run; an error or an interrupt on the way ends it again, with ``take_back``."""
    # The last moment at which a refusal costs nothing.
    identity = starts.request(instance.name, instance.rate)
    answered = False
    lease: Lease | None = None
    try:
        say(f"starting {instance.name}")
        start()
        answered = True
        reach.wait(instance, Reach(cloud.reach), cloud.since, say)
        lease = _lease(replace(cloud, start=identity), instance, remote)
        # From here on the machine can be told to end itself.
        ready(lease)
        _put_ready_on_record(instance, identity, say)
    except BaseException as error:
        try:
            if lease is not None and not isinstance(error, MachineLostError):
                # Somebody else may be the next to start it.
                release_when_off(lease.workspace, say)
        finally:
            _take_back(instance, identity, error, answered, say, take_back)
        raise
    say(f"{instance.name} answers")
    return lease


def _take_back(
    instance: Machine,
    identity: str,
    error: BaseException,
    answered: bool,
    say: Say,
    how: Callable[[Machine], None],
) -> None:
    """After a start that came to nothing: end what runs, and put on record what became of it.

    ``answered``: the request itself had succeeded before.
    """
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, MachineLostError):
        _put_on_record(identity, StartOutcome.LOST, str(error.ending), say)
        return
    try:
        now = instance.state()
    except BaseException as unknown:
        say(
            f"{unknown}\nwhether {instance.name} runs is not known; if it does, end it with: {instance.end_command}"
        )
        if isinstance(unknown, LabError):
            return
        raise
    if now.costs or (now is MachineState.STOPPED and instance.fresh and how is Machine.end):
        try:
            _end(instance, identity, StartOutcome.FAILED, reason, say, how)
        except StillRunningError as failed:
            say(str(failed))
    elif not answered and _may_come_to_be(error):
        # Its line stays open: what is not there now may be in a minute, and `remote status` will tell.
        say(
            f"{instance.name} is {now.value}, but the request for it was cut off, so it may still come to be; "
            "look with: cudadent42 remote status"
        )
    else:
        _put_on_record(identity, StartOutcome.FAILED, reason, say)


def _may_come_to_be(error: BaseException) -> bool:
    """Whether the provider may go on with what was asked of it, after this error of the call."""
    timed_out = isinstance(error, CloudError) and error.failure is Failure.TIMED_OUT
    return timed_out or isinstance(error, gcloud.CutOffError)


def _end(
    instance: Machine,
    identity: str | None,
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
    if identity is not None:
        _put_on_record(identity, outcome, reason, say)
    if failed is not None and not isinstance(failed, LabError):
        raise failed


def _has_ended(instance: Machine, wanted: MachineState) -> bool:
    try:
        return instance.state() in (wanted, MachineState.GONE)
    except LabError:
        return False


# A shutdown that the guest asks for ends the instance's running time; the user of a Google image may ask for it.
_SHUT_DOWN = 'sudo -n shutdown -h "+$1"'
_CANCEL_SHUTDOWN = "sudo -n shutdown -c 2>/dev/null || :"


def _shuts_down(lease: Lease, minutes: int, say: Say) -> bool:
    """Tell it to shut itself down; False where it does not take that."""
    try:
        done = call(lease.workspace.connection, _SHUT_DOWN, str(minutes))
    except LabError as error:
        said: str | None = str(error)
    else:
        said = done.errors.strip() if done.exit_code else None
    if said is not None:
        say(
            f"{lease.machine.name} cannot be told to shut itself down after {minutes} min ({said}); ending it now"
        )
        return False
    rest = "; its disk stays until it is deleted" if lease.machine.fresh else ""
    say(f"{what_runs(lease.machine)}\nit shuts itself down in {minutes} min, unless another run begins{rest}")
    return True


def _await_driver(workspace: Workspace, instance: Machine, say: Say) -> None:
    """Raises MachineNotReadyError where no NVIDIA driver answers in time."""
    begun = time.monotonic()
    while not _has_driver(workspace):
        if time.monotonic() - begun > DRIVER_S:
            raise MachineNotReadyError(
                f"no NVIDIA driver answers on {instance.name} after {DRIVER_S:.0f} s; take an image that has one, "
                "such as a family of the project deeplearning-platform-release"
            )
        if time.monotonic() - begun < _DRIVER_PAUSE_S:
            say("waiting for the NVIDIA driver")
        time.sleep(_DRIVER_PAUSE_S)


def _has_driver(workspace: Workspace) -> bool:
    try:
        return bool(jobs.architectures(workspace))
    except ConnectionLostError:
        return False  # an image may restart itself once its driver is in


def _lease(cloud: CloudRecord, instance: Machine, remote: Remote) -> Lease:
    def raise_if_ended() -> None:
        try:
            reach.raise_if_ended(instance, cloud.since)
        except CloudError:
            return  # it cannot be told just now; whoever waits goes on waiting

    return Lease(
        cloud, instance, Workspace(reach.connection(instance, Reach(cloud.reach)), remote, raise_if_ended)
    )


def _put_ready_on_record(instance: Machine, identity: str, say: Say) -> None:
    """With what the provider calls the start that the machine runs from, where it can be asked."""
    called = ""
    with suppress(CloudError):
        called = provider_start(instance.describe())
    _put_on_record(identity, StartOutcome.READY, "", say, called=called)


def _put_on_record(
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


def _our_start(lease: Lease, identity: str, say: Say) -> str | None:
    """The start of ours that the machine runs from; None where it is somebody else's by now, and ours is closed.

    It is another than the run's, ``identity``, where the machine was started again from here and the run's record could
    not say so any more. Where nothing can be asked it is the run's.
    """
    instance = lease.machine
    try:
        description = instance.find()
        all_starts = starts.load()
        mine = [
            each
            for each in all_starts
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
        _put_on_record(each.id, other.outcome, other.reason, say, other.time)
    say(f"{instance.name} is left running: {other.reason}")
    return None


def _running(workspace: Workspace) -> list[str]:
    """Runs that go on there; none where that cannot be asked."""
    try:
        return [name for name, state in jobs.jobs(workspace).items() if state.state is JobState.RUNNING]
    except LabError:
        return []


def _region(instance: Machine) -> str:
    return instance.address.zone.rpartition("-")[0]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()
