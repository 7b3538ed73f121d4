"""A run on the far side: started once, followed over any number of connections, fetched whole."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO

from cudadent42.base import archives
from cudadent42.base.errors import LabError
from cudadent42.cost.rates import RATE_VARIABLE
from cudadent42.remote.core import arrival
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.scripts import script
from cudadent42.remote.core.ssh import Connection, Done, call, stream
from cudadent42.remote.core.tree import Tree, archive

_SCRIPT = "job.sh"
# Its exit codes.
BUSY = 75
_REASONS = {
    70: "a program that runs need is missing there; install it (setsid and flock are of util-linux)",
    71: "its folder cannot be made there; name one that you may write to with `remote add … --folder`",
    72: "there is no such job or tree",
    73: "its process did not start there",
    74: "the files did not arrive whole or could not be unpacked there",
    76: "another call is changing its folder there; try again in a minute",
    77: "there is no such Python there; name one by its whole path with `remote add … --python`, or none",
}
_FULL = ("No space left on device", "Disk quota exceeded")
_FULL_REASON = (
    "its disk has no room there; free some, or name a folder on another with `remote add … --folder`"
)
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")
_JOB = re.compile(r"[a-z0-9-]{1,80}")


class JobState(Enum):
    NONE = "none"
    RUNNING = "running"
    LOST = "lost"
    """Its process is gone and left no exit code: killed, or the machine was restarted."""
    DONE = "done"


@dataclass(frozen=True)
class State:
    state: JobState
    exit_code: int | None = None


class BusyError(LabError):
    """Another run goes on there."""


@dataclass(frozen=True)
class Workspace:
    """The project's folder on one machine."""

    connection: Connection
    remote: Remote
    on_lost: Callable[[], None] = lambda: None
    """Asked when the connection is lost; raises LabError where trying again is of no use."""

    def call(self, command: str, *arguments: str, data: IO[bytes] | None = None, rate: str = "") -> Done:
        text = (f"export {RATE_VARIABLE}={shlex.quote(rate)}\n" if rate else "") + script(_SCRIPT)
        done = call(self.connection, text, command, self.remote.folder, *arguments, data=data)
        if done.exit_code == BUSY:
            raise self.busy(done)
        return done

    def busy(self, done: Done) -> BusyError:
        """The error of a script that named the run which goes on there."""
        said = done.output.decode(errors="replace").strip()
        other = said if _JOB.fullmatch(said) else ""  # it stands in commands to copy
        return BusyError(
            f"{self.remote.name} is busy with {other or 'another run'}; wait for it with "
            f"`cudadent42 remote attach {other or 'JOB'}`, or end it with `cudadent42 remote stop {other or 'JOB'}`"
        )


def send(workspace: Workspace, tree: Tree) -> bool:
    """Make the working tree there the one here; False where it already was. Raises LabError."""
    if require(workspace, workspace.call("tree")).output.decode(errors="replace").strip() == tree.digest:
        return False
    with archive(tree) as file:
        require(workspace, workspace.call("receive", tree.digest, data=file))
    return True


def start(workspace: Workspace, job: str, device: str, arguments: Sequence[str], rate: str = "") -> None:
    """Start ``cudadent42 run`` there, once however often it is asked for. ``rate``: the machine's, for the run's
    manifest. Raises BusyError, LabError."""
    require(workspace, workspace.call("start", job, workspace.remote.python, device, *arguments, rate=rate))


def state(workspace: Workspace, job: str) -> State:
    return parse_state(require(workspace, workspace.call("state", job)).output.decode(errors="replace"))


def parse_state(text: str) -> State:
    """What the script prints of a job. Raises LabError."""
    words = text.split()
    try:
        return State(JobState(words[0]), int(words[1]) if len(words) > 1 else None)
    except (IndexError, ValueError) as error:
        raise LabError(
            f"the far side says {text[:80]!r} of a job; expected none, running, lost or done"
        ) from error


def jobs(workspace: Workspace) -> dict[str, State]:
    """Every job there."""
    lines = require(workspace, workspace.call("list")).output.decode(errors="replace").splitlines()
    entries = (line.partition(" ") for line in lines)
    return {name: parse_state(rest) for name, _, rest in entries if _JOB.fullmatch(name)}


def follow(workspace: Workspace, job: str, seen: int, on_bytes: Callable[[bytes], object]) -> None:
    """Hand on the job's log from byte ``seen`` on, until the job has ended or the connection has."""
    stream(
        workspace.connection, script(_SCRIPT), ("follow", workspace.remote.folder, job, str(seen)), on_bytes
    )


def architectures(workspace: Workspace) -> tuple[str, ...]:
    """CUDA architectures of the GPUs there, ``sm_90``; none where there is no driver that answers."""
    lines = require(workspace, workspace.call("gpus")).output.decode(errors="replace").splitlines()
    numbers = (_CAPABILITY.fullmatch(line.strip()) for line in lines)
    return tuple(dict.fromkeys(f"sm_{match[1]}{match[2]}" for match in numbers if match))


def stop(workspace: Workspace, job: str) -> None:
    require(workspace, workspace.call("stop", job))


def forget(workspace: Workspace, job: str) -> None:
    require(workspace, workspace.call("forget", job))


def fetch(workspace: Workspace, job: str, target: Path) -> None:
    """Bring the job's folder (log, out, run) back as ``target``: whole and on the disk, or not. Raises LabError."""
    _bring("fetch", workspace, job, target)


def copy(workspace: Workspace, job: str, target: Path) -> None:
    """As ``fetch``, of a job that goes on: its files as they are now, which may be in the middle of a line."""
    _bring("copy", workspace, job, target)


@contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """A disk that does not take what came back is no reason to lose it there. Raises LabError for OSError."""
    try:
        yield
    except OSError as error:
        raise LabError(
            f"what came back cannot be kept in {folder}: {error.strerror or error}; mend that, then attach again"
        ) from error


def _bring(verb: str, workspace: Workspace, job: str, target: Path) -> None:
    with keeping(target.parent):
        _unpack(verb, workspace, job, target)


def _unpack(verb: str, workspace: Workspace, job: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        packed = Path(folder) / "job.tar"
        try:
            with packed.open("wb") as file:
                code = stream(
                    workspace.connection,
                    script(_SCRIPT),
                    (verb, workspace.remote.folder, job),
                    arrival.Limited(file).write,
                )
            if code != 0:
                raise LabError(f"{workspace.remote.name}: {job} could not be packed there (exit code {code})")
            unpacked = arrival.unpack(packed, job, Path(folder) / "unpacked")
        except archives.DamagedError as error:
            raise LabError(f"what came back of {job} is damaged: {error}; attach to it again") from error
        except archives.TooMuchError as error:
            raise LabError(
                f"{job} holds {error} on {workspace.remote.name}, more than is brought back; all of it is still there: "
                f"remove from {workspace.remote.folder}/jobs/{job} there what is not needed, then: "
                f"cudadent42 remote attach {job}"
            ) from error
        arrival.place(unpacked, target)


def require(workspace: Workspace, done: Done) -> Done:
    """``done`` if the script there succeeded. Raises LabError."""
    if done.exit_code != 0:
        reason = _FULL_REASON if any(word in done.errors for word in _FULL) else _REASONS.get(done.exit_code)
        said = " ".join(done.errors.split())[-300:]
        raise LabError(
            f"{workspace.remote.name}: {reason or 'the far side failed'} (exit code {done.exit_code}): {said}"
        )
    return done
