"""A run on a machine that answers: sent and started (``begin``), followed and fetched (``bring_back``).

What is lost on the way (a connection, this process, this machine) does not end the run: it is picked up again from the
job's record, here by itself for a while, later with ``cudadent42 remote attach``.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from cudadent42 import ledger
from cudadent42.base import durable
from cudadent42.base.errors import ExitCode, LabError, UsageError
from cudadent42.remote.core import host_keys, record
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.address import SshAddress
from cudadent42.remote.core.copies import COPY_EVERY_S, copying
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import JobState, Workspace
from cudadent42.remote.core.record import CloudRecord, JobRecord
from cudadent42.remote.core.ssh import ConnectionLostError, connect
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.core.tree import Tree, project_root, read_tree
from cudadent42.runs import run_folder

RETRY_S = 600.0
"""How long a machine that does not answer is tried again before the run is left to itself."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 20.0
_OUTPUT = "out"
_LOG = "log"
_PLACED_LOG = "remote.log"
"""What it is called in a run folder here."""
_RUN = "run"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run, as a machine is given it."""

    device: str
    arguments: tuple[str, ...]
    """Of ``cudadent42 run`` there."""
    output: Path
    """Folder here that the run folder goes to."""


@dataclass(frozen=True)
class Returned:
    """A run that came back."""

    record: JobRecord
    exit_code: int
    """Of ``cudadent42 run`` there."""
    folder: Path
    """The run folder; not there where the run did not get that far."""
    output: str
    """What it printed on standard output."""


class RunLostError(LabError):
    """A run whose machine does not run any more."""

    exit_code = ExitCode.NOT_READY


@dataclass(frozen=True)
class Ended:
    """A run that came back from a machine that was started for it."""

    returned: Returned
    trouble: LabError | None
    """Where the machine should have been ended and was not."""


def workspace_of(remote: Remote) -> Workspace:
    """The project's folder on ``remote``, whose host key is checked also where an alias for ssh switches that off.

    Raises UsageError for a machine that is reached in another way.
    """
    if not isinstance(remote.address, SshAddress):
        raise UsageError(f"{remote.name} is {remote.address}; expected a machine that ssh reaches by itself")
    return Workspace(connect(remote.address, host_keys.options(remote.address)), remote)


def working_tree() -> Tree:
    """What is sent. Raises LabError where it cannot be."""
    return read_tree(project_root())


def begin(workspace: Workspace, request: RunRequest, say: Say, cloud: CloudRecord | None = None) -> JobRecord:
    """Send the working tree to ``workspace`` and start the run there. Follow it with ``bring_back``.

    Raises:
        ConnectionLostError: the machine did not answer for ``RETRY_S``; the run may go on there, and is on record.
        LabError: it could not be started.
    """
    name = workspace.remote.name
    tree = working_tree()
    begun = JobRecord(
        record.new_job(),
        name,
        str(request.output.absolute()),
        request.arguments,
        datetime.now(timezone.utc).isoformat(),
        cloud=cloud,
        folder=workspace.remote.folder,
        address=str(workspace.remote.address) if cloud is None else "",
        start=workspace.remote.start,
    )
    try:
        if persistently(lambda: jobs.send(workspace, tree), say, workspace.on_lost):
            say(f"sent {len(tree.files)} files to {name}")
        record.save(begun)  # before the start: what was started is always on record
        rate = cloud.rate if cloud else ""
        persistently(
            lambda: jobs.start(workspace, begun.job, request.device, request.arguments, rate),
            say,
            workspace.on_lost,
        )
    except ConnectionLostError:
        raise
    except LabError:
        with suppress(
            LabError, OSError
        ):  # what cannot be asked stays on record; a folder that holds something stays
            if jobs.state(workspace, begun.job).state is JobState.NONE:
                record.forget(begun.job)
                request.output.rmdir()  # if the caller made it
        raise
    say(f"started {begun.job} on {name}")
    return begun


def bring_back(workspace: Workspace, begun: JobRecord, say: Say, on_log: Callable[[bytes], None]) -> Returned:
    """Follow a run that was started to its end and bring its folder back.

    Raises:
        ConnectionLostError: the machine did not answer for ``RETRY_S``; the run goes on there, and is on record.
        LabError: it was lost.
    """
    target = Path(begun.output)
    every_s = COPY_EVERY_S if begun.cloud and begun.cloud.spot else None
    log = _Log(begun, on_log)
    with copying(workspace, begun.job, copies_of(begun), every_s):
        state = _followed(workspace, begun, say, log)
    if state.state is JobState.NONE:
        raise LabError(
            f"{begun.remote} knows no run {begun.job}: it was not started, its folder was removed, or that is another "
            f"machine's name now; to wait for it no longer: cudadent42 remote stop {begun.job}"
        )
    work = target.parent / f".{begun.job}"
    persistently(lambda: jobs.fetch(workspace, begun.job, work), say, workspace.on_lost)
    with jobs.keeping(work):
        log.add((work / _LOG).read_bytes()[log.seen :])  # what came after the following ended
        printed = (work / _OUTPUT).read_text(errors="replace")
    shutil.rmtree(copies_of(begun), ignore_errors=True)
    if state.state is JobState.LOST or state.exit_code is None:
        _place_run(work, target)
        _finish(workspace, begun, None, say)
        raise LabError(
            f"{begun.job} was lost on {begun.remote}: its process is gone without an exit code, as after a restart, "
            f"a lack of memory or with a full disk; what it had measured is in {target}"
        )
    _place_run(work, target)
    done = _finish(workspace, begun, state.exit_code, say)
    return Returned(done, state.exit_code, target, printed)


def give_up(begun: JobRecord) -> Path | None:
    """A run whose machine is gone for good: what was copied of it goes to its output, if anything was."""
    copied, target = copies_of(begun), Path(begun.output)
    if copied.is_dir():
        _place_run(copied, target)
    record.save(replace(begun, fetched=True, exit_code=None))
    return target if (target / _PLACED_LOG).exists() else None


def copies_of(begun: JobRecord) -> Path:
    """Where what was copied of a run that goes on is kept."""
    return Path(begun.output).parent / f".{begun.job}-copy"


class _Log:
    """A run's log on its way to who watches, and how much of it has passed."""

    def __init__(self, begun: JobRecord, on_log: Callable[[bytes], None]) -> None:
        self.seen = 0
        self._there, self._here = _run_folder(begun).encode(), os.fsencode(begun.output)
        self._on_log = on_log

    def add(self, chunk: bytes) -> None:
        self.seen += len(chunk)
        self._on_log(chunk.replace(self._there, self._here))


def _run_folder(begun: JobRecord) -> str:
    """The run's folder as the run itself names it: relative to the working tree there."""
    return f"../jobs/{begun.job}/{_RUN}"


def _followed(workspace: Workspace, begun: JobRecord, say: Say, log: _Log) -> jobs.State:
    def until_the_end() -> jobs.State:
        """Following ends with the job, or with whoever follows; the state tells which."""
        while True:
            jobs.follow(workspace, begun.job, log.seen, log.add)
            state = jobs.state(workspace, begun.job)
            if state.state is not JobState.RUNNING:
                return state
            time.sleep(_FIRST_PAUSE_S)  # where it cannot be followed, it is not asked without end either

    return persistently(until_the_end, say, workspace.on_lost)


def _place_run(work: Path, target: Path) -> None:
    """The run folder goes where it was asked for; the log goes with it. Raises LabError where it cannot."""
    with jobs.keeping(target):
        if _is_there(work, target):
            shutil.rmtree(work)
        else:
            _move_run(work, target)
        # Before anything of it is removed there, or the machine that it is on.
        durable.flush(target)
        durable.flush(target.parent)


def _is_there(work: Path, target: Path) -> bool:
    """Whether it was put there before, by a process that was killed before it could write that down."""
    log = target / _PLACED_LOG
    packed = next(filter(Path.is_file, (work / _LOG, work / _RUN / _PLACED_LOG)), None)
    return log.is_file() and (packed is None or log.read_bytes() == packed.read_bytes())


def _move_run(work: Path, target: Path) -> None:
    """Also of a copy that is half moved: what is given up is nowhere else."""
    run = work / _RUN
    if not run.is_dir():
        run.mkdir()
    if (work / _LOG).is_file():
        (work / _LOG).replace(run / _PLACED_LOG)
    if target.is_dir():
        target.rmdir()  # made by the caller, and empty; anything else is not ours to replace
    run.replace(target)
    (work / _OUTPUT).unlink()
    for leftover in work.iterdir():
        leftover.unlink()
    work.rmdir()


def _finish(workspace: Workspace, begun: JobRecord, exit_code: int | None, say: Say) -> JobRecord:
    done = replace(begun, fetched=True, exit_code=exit_code)
    record.save(done)
    with suppress(LabError):  # it is here; that it is also there costs only space
        jobs.forget(workspace, begun.job)
    _enter(Path(begun.output), say)
    return done


def _enter(folder: Path, say: Say) -> None:
    """Put a run into the ledger here; there it is only in that machine's own."""
    if (folder / run_folder.MANIFEST).is_file() and (trouble := ledger.record(folder)):
        say(trouble)


def persistently(
    action: Callable[[], T],
    say: Say,
    on_lost: Callable[[], None] = lambda: None,
    patience_s: float | None = None,
) -> T:
    """``action``, again after every lost connection, for ``RETRY_S`` from the last time that it got anywhere.

    ``on_lost`` is called in between, and may raise.
    """
    patience = RETRY_S if patience_s is None else patience_s
    pause = _FIRST_PAUSE_S
    lost_since: float | None = None
    while True:
        begun = time.monotonic()
        try:
            return action()
        except ConnectionLostError as error:
            now = time.monotonic()
            if lost_since is None or now - begun > _LONGEST_PAUSE_S:
                lost_since, pause = now, _FIRST_PAUSE_S  # it held for a while
                say(f"{error}; trying again for up to {patience:.0f} s")
            on_lost()
            if now - lost_since + pause > patience:
                raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
