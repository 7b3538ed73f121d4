"""A run on a cloud machine, in order: lease, run, copy, end. The one place here that knows the order.

A run that goes on there when this process ends is left its machine; whoever brings it back ends the machine, by the
policy that was asked for when it was started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cudadent42.base.errors import LabError
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import record
from cudadent42.remote.core.job import JobState
from cudadent42.remote.core.protection import ANY_TERMS, Terms, protect
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Ended, Returned, RunLostError, bring_back, give_up, run_on
from cudadent42.remote.core.ssh import ConnectionLostError
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.providers.gce import lease as leases
from cudadent42.remote.providers.gce import machine, results
from cudadent42.remote.providers.gce.checks import Prepared
from cudadent42.remote.providers.gce.fate import MachineLostError
from cudadent42.remote.providers.gce.lease import Lease, StillRunningError
from cudadent42.remote.providers.gce.machine import MachineState

_STOPPING_S = 120.0
"""How long a machine that is being taken away is watched; 30 s are usual."""
_STOPPING_PAUSE_S = 3.0


def run(
    prepared: Prepared,
    device: str,
    arguments: Sequence[str],
    output: Path,
    say: Say,
    on_log: Callable[[bytes], None],
    terms: Terms = ANY_TERMS,
) -> Ended:
    """Run ``cudadent42 run ARGUMENTS`` on the machine that ``prepared`` describes, on ``terms``.

    Raises:
        CloudError: no machine could be had.
        RunLostError: it was taken away during the run.
        LabError, KeyboardInterrupt: as ``run_on``. What then runs on has been said.
    """
    lease = leases.begin(prepared, say, lambda lease: protect(lease.workspace, lease.cloud, terms, say))
    return _to_the_end(
        lease, lambda: run_on(lease.workspace, device, arguments, output, say, on_log, lease.cloud), say
    )


def attach(
    begun: JobRecord,
    start: bool,
    say: Say,
    on_log: Callable[[bytes], None],
    terms: Terms = ANY_TERMS,
) -> Ended:
    """Bring a run back that was left on its machine. ``start``: start the machine again if it is stopped, on ``terms``.

    Raises like ``run``.
    """
    assert begun.cloud is not None
    remote = record.remote_of(begun)
    try:
        lease = leases.resume(begun.cloud, remote)
    except MachineLostError as error:
        if not (start and error.state is MachineState.STOPPED):
            raise _lost(begun, error, say) from error
        lease = leases.restart(
            begun.cloud,
            remote,
            say,
            lambda lease: protect(lease.workspace, lease.cloud, terms, say),
            terms.consent,
        )
        begun = replace(begun, cloud=lease.cloud)
        try:
            record.save(begun)
        except BaseException:
            say(leases.what_runs(lease.machine))
            raise
    return _to_the_end(lease, lambda: bring_back(lease.workspace, begun, say, on_log), say)


def _to_the_end(lease: Lease, action: Callable[[], Returned], say: Say) -> Ended:
    try:
        returned = action()
        if lease.cloud.results and returned.folder.is_dir():
            results.copy(returned.folder, lease.cloud.results, returned.record.job, say)
    except MachineLostError as error:
        begun = _waiting(lease)
        if begun is None:
            leases.lost(lease.cloud, error, say)
            raise
        raise _lost(begun, error, say) from error
    except (KeyboardInterrupt, ConnectionLostError):
        begun = _waiting(lease)
        if begun is None:
            _finish(lease, say)
        else:
            say(
                f"{begun.job} goes on there. Bring it back, and end the machine as asked, with: "
                f"cudadent42 remote attach {begun.job}\n{leases.what_runs(lease.machine)}"
            )
        raise
    except BaseException:
        begun = _waiting(lease)
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
        raise
    return Ended(returned, _finish(lease, say))


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
            now = machine.state(error.machine)
        except LabError:
            break
    return now
