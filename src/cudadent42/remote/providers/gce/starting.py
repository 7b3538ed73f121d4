"""An instance from the request for it until it answers and has its limits. Whatever fails on the way ends it again.

request on record -> start or create -> answers -> has its limits -> ready on record -> (`lease`)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from cudadent42.base.errors import LabError, MachineNotReadyError
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import Workspace
from cudadent42.remote.core.policy import Reach
from cudadent42.remote.core.protection import release_when_off
from cudadent42.remote.core.record import CloudRecord
from cudadent42.remote.core.ssh import ConnectionLostError, call
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.gce import checks, creation, gcloud, machine, reach
from cudadent42.remote.providers.gce.checks import Candidate, Prepared
from cudadent42.remote.providers.gce.failures import OTHER_ZONE_MAY_DO, CloudError, Failure
from cudadent42.remote.providers.gce.fate import MachineLostError
from cudadent42.remote.providers.gce.identity import provider_start
from cudadent42.remote.providers.gce.lease import (
    Lease,
    StillRunningError,
    end_machine,
    put_on_record,
    what_runs,
)
from cudadent42.remote.providers.gce.machine import Machine
from cudadent42.remote.providers.gce.unguarded import agree_to_start
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

DRIVER_S = 300.0
"""How long after its sshd a machine with a GPU may take until the driver answers: some images install it first."""
_DRIVER_PAUSE_S = 5.0
_CANCEL_SHUTDOWN = "sudo -n shutdown -c 2>/dev/null || :"

Protect = Callable[[Lease], None]
"""Gives a machine that answers its limits, before anything else happens on it. What it raises ends the machine."""


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
    way = _Way(instance, replace(cloud, since=_now()), remote, say, protect)
    if state in (MachineState.RUNNING, MachineState.STARTING):
        return way.already(checks.open_start(instance, description))
    if state is not MachineState.STOPPED:
        raise MachineNotReadyError(f"{instance.name} is {state.value} by now; try again")
    checks.settle(instance, description)
    # What the run measured is on its disk, so no failure of the start deletes it.
    return way.started(instance.start, take_back=Machine.stop)


def workspace_of(cloud: CloudRecord, remote: Remote) -> Workspace:
    """Where runs happen on a machine that runs. Raises CloudError; MachineLostError where it does not."""
    reach.raise_if_ended(Machine(cloud.machine, cloud.rate), cloud.since)
    return _workspace(cloud, remote)


def _workspace(cloud: CloudRecord, remote: Remote) -> Workspace:
    instance = Machine(cloud.machine, cloud.rate)

    def raise_if_ended() -> None:
        try:
            reach.raise_if_ended(instance, cloud.since)
        except CloudError:
            return  # it cannot be told just now; whoever waits goes on waiting

    return Workspace(reach.connection(instance, Reach(cloud.reach)), remote, raise_if_ended)


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
    way = _Way(instance, cloud, prepared.remote, say, protect)
    needs_driver = bool(prepared.accelerator)
    if candidate.state is MachineState.GONE:
        wanted = prepared.specification
        assert wanted is not None
        checks.settle(instance, None)
        return way.started(lambda: creation.create(instance, wanted), needs_driver)
    # Since it was looked at, kernels were compiled and a question was answered: somebody else may have started it.
    description = instance.find()
    state = machine.state_in(description)
    if description is not None and state in (MachineState.RUNNING, MachineState.STARTING):
        return way.already(checks.open_start(instance, description))
    # To its start, which was not expected where it ran.
    agreed = prepared.guarded or not candidate.state.costs
    if not (state is MachineState.STOPPED and agreed):
        raise MachineNotReadyError(f"{instance.name} is {state.value} by now; try again")
    checks.settle(instance, description)
    return way.started(instance.start, needs_driver)


@dataclass(frozen=True)
class _Way:
    """Of a machine, until it answers to a run."""

    machine: Machine
    cloud: CloudRecord
    remote: Remote
    say: Say
    protect: Protect

    def already(self, ours: str | None) -> Lease:
        """One that runs: from our start, or from nobody's of ours."""
        try:
            lease = self._answering(ours)
            self.protect(lease)
            if ours is not None:
                # Of keep:MINUTES, after the run before; not before other limits hold, or an error leaves it with none.
                call(lease.workspace.connection, _CANCEL_SHUTDOWN)
        except BaseException:
            self.say(what_runs(self.machine))
            raise
        return lease

    def started(
        self,
        start: Callable[[], None],
        needs_driver: bool = False,
        take_back: Callable[[Machine], None] = Machine.end,
    ) -> Lease:
        """One that does not run; an error or an interrupt on the way ends it again, with ``take_back``."""
        # The last moment at which a refusal costs nothing.
        identity = starts.request(self.machine.name, self.machine.rate)
        answered = False
        lease: Lease | None = None
        try:
            self.say(f"starting {self.machine.name}")
            start()
            answered = True
            lease = self._answering(identity)
            # From here on the machine can be told to end itself.
            self.protect(lease)
            if needs_driver:
                self._await_driver(lease.workspace)
            self._put_ready_on_record(identity)
        except BaseException as error:
            try:
                if lease is not None and not isinstance(error, MachineLostError):
                    # Somebody else may be the next to start it.
                    release_when_off(lease.workspace, self.say)
            finally:
                self._took_back(identity, error, answered, take_back)
            raise
        self.say(f"{self.machine.name} answers")
        return lease

    def _answering(self, identity: str | None) -> Lease:
        cloud = replace(self.cloud, start=identity)
        reach.wait(self.machine, Reach(cloud.reach), cloud.since, self.say)
        return Lease(cloud, self.machine, _workspace(cloud, self.remote), self.say)

    def _await_driver(self, workspace: Workspace) -> None:
        """Raises MachineNotReadyError where no NVIDIA driver answers in time."""
        begun = time.monotonic()
        while not _has_driver(workspace):
            if time.monotonic() - begun > DRIVER_S:
                raise MachineNotReadyError(
                    f"no NVIDIA driver answers on {self.machine.name} after {DRIVER_S:.0f} s; take an image that has "
                    "one, such as a family of the project deeplearning-platform-release"
                )
            if time.monotonic() - begun < _DRIVER_PAUSE_S:
                self.say("waiting for the NVIDIA driver")
            time.sleep(_DRIVER_PAUSE_S)

    def _put_ready_on_record(self, identity: str) -> None:
        """With what the provider calls the start that the machine runs from, where it can be asked."""
        called = ""
        with suppress(CloudError):
            called = provider_start(self.machine.describe())
        put_on_record(identity, StartOutcome.READY, "", self.say, called=called)

    def _took_back(
        self, identity: str, error: BaseException, answered: bool, how: Callable[[Machine], None]
    ) -> None:
        """After a start that came to nothing: end what runs, and put on record what became of it.

        ``answered``: the request itself had succeeded before.
        """
        instance, say = self.machine, self.say
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, MachineLostError):
            put_on_record(identity, StartOutcome.LOST, str(error.ending), say)
            return
        try:
            now = instance.state()
        except BaseException as unknown:
            say(
                f"{unknown}\nwhether {instance.name} runs is not known; "
                f"if it does, end it with: {instance.end_command}"
            )
            if isinstance(unknown, LabError):
                return
            raise
        if now.costs or (now is MachineState.STOPPED and instance.fresh and how is Machine.end):
            try:
                end_machine(instance, identity, StartOutcome.FAILED, reason, say, how)
            except StillRunningError as failed:
                say(str(failed))
        elif not answered and _may_come_to_be(error):
            # Its line stays open: what is not there now may be in a minute, and `remote status` will tell.
            say(
                f"{instance.name} is {now.value}, but the request for it was cut off, so it may still come to be; "
                "look with: cudadent42 remote status"
            )
        else:
            put_on_record(identity, StartOutcome.FAILED, reason, say)


def _may_come_to_be(error: BaseException) -> bool:
    """Whether the provider may go on with what was asked of it, after this error of the call."""
    timed_out = isinstance(error, CloudError) and error.failure is Failure.TIMED_OUT
    return timed_out or isinstance(error, gcloud.CutOffError)


def _has_driver(workspace: Workspace) -> bool:
    try:
        return bool(jobs.architectures(workspace))
    except ConnectionLostError:
        return False  # an image may restart itself once its driver is in


def _region(instance: Machine) -> str:
    return instance.address.zone.rpartition("-")[0]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()
