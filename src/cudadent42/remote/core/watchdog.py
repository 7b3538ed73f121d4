"""The watchdog on a machine: powers it off when it is idle or its budget is spent, without this machine.

``watchdog.sh`` is what runs there, and says what counts as idle; ``guard.sh`` installs it and asks it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from enum import Enum

from cudadent42.base.errors import LabError, UsageError
from cudadent42.remote.core.job import BUSY, Workspace
from cudadent42.remote.core.scripts import script
from cudadent42.remote.core.ssh import Done, call

TICK_S = 20
"""Between two looks of the watchdog."""
QUIET_S = 7200
"""A terminal that was not used for this long keeps no machine on. TCP takes as long to see that its other side died."""
TERMINALS = "/dev/pts"
"""Where a terminal that somebody is logged in at appears."""

_GUARD = "guard.sh"
_WATCHDOG = "watchdog.sh"
_REASONS = {
    71: "its folder there cannot be written",
    74: "it did not arrive whole there; try again",
    77: "that user can power the machine off neither as root nor by `sudo -n`; allow one of them, or stop the machine "
    "yourself",
    78: "flock is missing there; install util-linux",
    79: "the script does not start there, or does not end",
    80: "the limit of an earlier run is reached, so the machine is powered off; try again after that",
}


class Action(str, Enum):
    """What the watchdog does in the end; any other text is the path of a program there, for tests."""

    POWER_OFF = "poweroff"
    END = "end"
    """Only the run: the machine is somebody's own, and costs the same whether it is on."""


class Keeper(str, Enum):
    """Who starts the watchdog again."""

    AUTO = "auto"
    """The first of the others that works there; only asked for, never found."""
    SYSTEMD = "systemd"
    CRON = "cron"
    PROCESS = "process"
    """Nobody: it survives the connection, but no restart of the machine."""


class Reason(str, Enum):
    IDLE = "idle"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Limits:
    """What a machine may do from now on. Whole seconds that it is on; 0 for no limit."""

    idle_s: int = 0
    budget_s: int = 0
    action: Action | str = Action.POWER_OFF
    quiet_s: int = QUIET_S
    tick_s: int = TICK_S
    terminals: str = TERMINALS

    def __post_init__(self) -> None:
        if min(self.idle_s, self.budget_s, self.quiet_s) < 0 or self.tick_s < 1:
            raise UsageError(
                f"limits of a watchdog: expected seconds from 0 on, and a tick from 1 on; not {self}"
            )
        if not (self.action.isprintable() and self.terminals.isprintable()):
            raise UsageError(f"limits of a watchdog: expected printable paths; not {self}")

    @property
    def hold(self) -> bool:
        """There is something to watch."""
        return bool(self.idle_s or self.budget_s)

    def line(self) -> str:
        """What will be done, and when."""
        what = "ends the run" if self.action == Action.END else "powers the machine off"
        when = [f"when it is idle for {_minutes(self.idle_s)}"] if self.idle_s else []
        when += (
            [f"when it has been on for {_minutes(self.budget_s)} since it was armed"] if self.budget_s else []
        )
        return f"the watchdog {what} {' or '.join(when)}"


@dataclass(frozen=True)
class Watch:
    """A watchdog as it is now."""

    watches: bool
    """It runs."""
    keeper: Keeper
    idle_s: int
    budget_s: int
    spent_s: int | None
    """On record since it was armed, up to a minute ago; None where it has not begun."""
    action: str
    acted: Reason | None
    because: str
    """What it said when it acted."""

    def line(self) -> str:
        """What it did or will do, in words."""
        if self.acted is not None:
            did = "ended the run" if self.action == Action.END else "powered the machine off"
            return f"the watchdog {did}: {self.because}"
        if not self.watches:
            return "the watchdog does not run: nothing but you ends the costs; a new run starts it again"
        limits = Limits(self.idle_s, self.budget_s, self.action)
        if not limits.hold:
            return "the watchdog has no limit to keep"
        over = f"; {_minutes(self.spent_s)} are over" if self.budget_s and self.spent_s else ""
        return f"{limits.line()}{over}"


def arm(workspace: Workspace, limits: Limits, keeper: Keeper = Keeper.AUTO) -> Keeper:
    """Install the watchdog, or give the one that is there new limits, which count from now; who keeps it alive.

    Limits that only end the run take the power-off of another run's from no machine: those go on holding, and the
    budget is the smaller one.

    What an earlier one did is forgotten then: ask `report` before.

    Raises:
        BusyError: a run goes on there, whose limits are not to be changed.
        LabError: it cannot be installed, and the machine is not watched.
    """
    text = script(_WATCHDOG).encode()
    done = call(
        workspace.connection,
        script(_GUARD),
        "arm",
        workspace.remote.folder,
        *(str(number) for number in (limits.idle_s, limits.budget_s, limits.quiet_s, limits.tick_s)),
        limits.terminals,
        str(limits.action.value if isinstance(limits.action, Action) else limits.action),
        keeper.value,
        str(len(text)),
        data=io.BytesIO(text),
    )
    if done.exit_code == BUSY:
        raise workspace.busy(done)
    words = _output(workspace, done).split()
    try:
        return Keeper(words[-1])
    except (IndexError, ValueError) as error:
        raise LabError(
            f"{workspace.remote.name} says {words} of its watchdog; expected systemd, cron or process"
        ) from error


def report(workspace: Workspace) -> Watch | None:
    """The watchdog there; None where there is none. Raises LabError."""
    text = _output(workspace, call(workspace.connection, script(_GUARD), "report"))
    if not text.strip():
        return None
    fields = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    try:
        return Watch(
            watches=fields["watches"] == "yes",
            keeper=Keeper(fields["keeper"]),
            idle_s=int(fields["idle_s"]),
            budget_s=int(fields["budget_s"]),
            spent_s=int(fields["spent_s"]) if "spent_s" in fields else None,
            action=fields["action"],
            acted=Reason(fields["acted"]) if "acted" in fields else None,
            because=fields.get("because", ""),
        )
    except (KeyError, ValueError) as error:
        raise LabError(
            f"{workspace.remote.name} says {text[:200]!r} of its watchdog, which is damaged; "
            "a new run installs it again"
        ) from error


def disarm(workspace: Workspace, only: Action | None = None) -> None:
    """Let no limit hold from now on; with ``only``, none that has this action. Raises LabError.

    While a run goes on there, nothing is changed.
    """
    _output(workspace, call(workspace.connection, script(_GUARD), "disarm", only.value if only else "any"))


def leave(workspace: Workspace) -> None:
    """Let its limits hold until the machine is off, and not after it is started again. Raises LabError."""
    _output(workspace, call(workspace.connection, script(_GUARD), "leave"))


def remove(workspace: Workspace) -> None:
    """End the watchdog; nothing of it stays there. Raises LabError."""
    _output(workspace, call(workspace.connection, script(_GUARD), "remove"))


def _output(workspace: Workspace, done: Done) -> str:
    if done.exit_code != 0:
        reason = _REASONS.get(done.exit_code, f"exit code {done.exit_code}")
        said = " ".join(done.errors.split())[-200:]
        raise LabError(f"the watchdog of {workspace.remote.name}: {reason}{': ' + said if said else ''}")
    return done.output.decode(errors="replace")


def _minutes(seconds: int) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds} s"
