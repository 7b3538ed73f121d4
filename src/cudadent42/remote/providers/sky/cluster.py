"""A machine of SkyPilot's: how it is, and its end. The one place that calls ``sky`` for anything but a run.

What is said here of SkyPilot is from the source of 0.14.1: its command line in ``sky/client/cli/command.py``, its words
for how a machine is in ``sky/utils/status_lib.py``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cudadent42.base.errors import LabError, MachineNotReadyError
from cudadent42.base.shown import plain
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.states import MachineOffError, MachineState
from cudadent42.remote.core.status import ENDED, NOT_ANSWERED, Status, correct, is_under_way
from cudadent42.remote.providers.sky.spec import SCHEME
from cudadent42.runs.starts import MachineStart, StartOutcome
from flashmoe_science.jit.requirements import install_command

TIMEOUT_S = 300
"""For an answer of SkyPilot's, which asks the cloud, and may start its own server first."""
_END_TIMEOUT_S = 900
"""For an end: SkyPilot waits until the cloud has taken the machine down."""
START_IDLE_MINUTES = 10
"""Of a stopped machine that a user starts to bring something back: nothing else would end it."""
RUNS_AGAIN = "it runs, although it had ended"
"""Why a start that is over on record is not: somebody started the machine again, by its own disk and key."""
IS_STOPPED = "SkyPilot says that it is stopped"
IS_GONE = "SkyPilot has no such machine any more"
_LOOK = "look with `sky status --refresh`"

# INIT is also one whose launch failed, and one that does not answer; all but STOPPED may cost what it costs to run.
_STATES = {
    "INIT": MachineState.STARTING,
    "PENDING": MachineState.STARTING,
    "UP": MachineState.RUNNING,
    "AUTOSTOPPING": MachineState.STOPPING,
    "STOPPED": MachineState.STOPPED,
}


class ClusterError(LabError):
    """SkyPilot did not say, or did not do, what it was asked."""


class ClusterLostError(MachineOffError):
    """It does not run any more, as SkyPilot says."""


@dataclass(frozen=True)
class Reported:
    """What SkyPilot says of a machine."""

    word: str
    idle_minutes: int | None
    """After which it ends the machine by itself; below 0 for never, None where it does not say. It is set once the
    files are there, directly before the task is given to the machine (``_execute_dag`` in ``sky/execution.py``)."""


@dataclass(frozen=True)
class Cluster:
    """A machine of SkyPilot's, by its name there."""

    name: str

    fresh = True
    ending = "taking down"
    ended = "taken down"
    to_end = "take it down"

    @property
    def end_command(self) -> str:
        return f"sky down {self.name}"

    @property
    def how_to_start(self) -> str:
        """What starts a stopped one again, with an idle limit that takes it down; for a user to type."""
        return f"sky start {self.name} --idle-minutes-to-autostop={START_IDLE_MINUTES} --down"

    def attach_command(self, job: str) -> str:
        return f"{self.how_to_start}; then: cudadent42 remote attach {job}"

    def ran(self, begun: JobRecord, start: MachineStart) -> bool:
        """Under that machine's name there may have been another before it."""
        if begun.cloud is not None or begun.remote != self.name:
            return False
        if begun.start == start.id:
            return True
        try:
            return datetime.fromisoformat(begun.started) >= datetime.fromisoformat(start.requested)
        except (ValueError, TypeError):
            return True  # a record that was damaged: in doubt it was

    def reported(self, refresh: bool = True) -> Reported | None:
        """What SkyPilot says of it, asked of the cloud unless ``refresh`` is off; None where it has no such machine.

        Raises LabError where that cannot be told: it may cost money.
        """
        # All are asked for: of one that it does not know, SkyPilot speaks in another way.
        done = _sky("status", *(("--refresh",) if refresh else ()), "--output=json")
        if done.returncode != 0:
            raise ClusterError(f"SkyPilot does not say how {self.name} is ({_last_words(done)}); {_LOOK}")
        clusters = clusters_in(done.stdout)
        if clusters is None:
            raise ClusterError(f"what SkyPilot says of its machines cannot be read here; {_LOOK}")
        return clusters.get(self.name)

    def state(self, refresh: bool = True) -> MachineState:
        """How it is now; raises as ``reported``."""
        reported = self.reported(refresh)
        if reported is None:
            return MachineState.GONE
        if reported.word not in _STATES:
            raise ClusterError(
                f"SkyPilot says {reported.word!r} of {self.name}, which is not known here; {_LOOK}"
            )
        return _STATES[reported.word]

    def status(self, start: MachineStart, now: datetime) -> Status:
        """SkyPilot forgets machines that are gone, and when they went."""
        try:
            state = self.state()
        except LabError as error:
            return Status(None, f"{error}; end it with: {self.end_command}")
        had_ended = start.outcome in ENDED
        if state.costs:
            return Status(state, "", correct(start, StartOutcome.READY, RUNS_AGAIN) if had_ended else None)
        if is_under_way(start, now):
            return Status(state, NOT_ANSWERED)
        if state is MachineState.STOPPED:
            left = f"its disk costs until it is taken down: {self.end_command}"
            return Status(
                state, left, None if had_ended else correct(start, StartOutcome.STOPPED, IS_STOPPED)
            )
        never = start.outcome is StartOutcome.REQUESTED
        outcome = StartOutcome.FAILED if never else StartOutcome.DELETED
        return Status(state, "", correct(start, outcome, IS_GONE))

    def raise_if_lost(self) -> None:
        """Raises ClusterLostError where it does not run any more; where SkyPilot does not say, it may."""
        try:
            current = self.state()
        except LabError:
            return
        if current is MachineState.GONE:
            raise ClusterLostError(f"SkyPilot has no {self.name} any more", current)
        if current is MachineState.STOPPED:
            raise ClusterLostError(f"{self.name} is stopped; {self.how_to_bring_back}", current)

    @property
    def how_to_bring_back(self) -> str:
        """What brings back what is on the disk of a stopped one."""
        return f"start it with: {self.how_to_start}; then: cudadent42 remote attach"

    def end(self) -> None:
        """Take it down, disk and all; nothing happens to one that is gone. Raises LabError."""
        self._change("down", "take it down", MachineState.GONE)

    def stop(self) -> None:
        """Stop it, and keep its disk; not every cloud can. Raises LabError."""
        self._change("stop", "stop it", MachineState.STOPPED)

    def _change(self, verb: str, doing: str, wanted: MachineState) -> None:
        """Have it done, and see that it was: ``sky down`` and ``sky stop`` say on standard output that they failed, and
        end with exit code 0. SkyPilot's own list is asked then, which a failure leaves as it was."""
        done = _sky(verb, "--yes", self.name, timeout_s=_END_TIMEOUT_S)
        if done.returncode != 0 or self.state(refresh=False) not in (wanted, MachineState.GONE):
            raise ClusterError(f"SkyPilot could not {doing} ({_last_words(done)})")


def of_start(start: MachineStart) -> Cluster | None:
    """The machine of a line of the journal; None where it is none of SkyPilot's."""
    return Cluster(start.machine.removeprefix(SCHEME)) if start.machine.startswith(SCHEME) else None


def find_sky() -> str:
    """The user's ``sky``. Raises MachineNotReadyError."""
    path = shutil.which("sky")
    if path is None:
        raise MachineNotReadyError(
            f"SkyPilot's command `sky` is not on PATH; install it with: {install_command('skypilot')}"
        )
    return path


def clusters_in(text: str) -> dict[str, Reported] | None:
    """Each cluster by its name, in what ``sky status --output=json`` prints; None where there is no such list.

    There may be other lines around the list: of a server that is started, of a version that is old.
    """
    decoder = json.JSONDecoder()
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not line.startswith("["):
            continue
        try:
            document, _ = decoder.raw_decode("".join(lines[number:]))
        except ValueError:
            continue
        if isinstance(document, list) and all(_is_cluster(each) for each in document):
            return {each["name"]: Reported(each["status"], _minutes(each)) for each in document}
    return None


def _is_cluster(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "status"))


def _minutes(entry: dict[str, Any]) -> int | None:
    minutes = entry.get("autostop")
    return minutes if type(minutes) is int else None


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(plain(done.stderr.strip() or done.stdout).split())[-200:]


def _sky(*words: str, timeout_s: int = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [find_sky(), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"SkyPilot did not answer within {timeout_s} s: sky {' '.join(words)}") from error
