"""Keep a rented machine running while nothing happens on it, or stop it and start it again?

Stopping saves the rate for as long as the machine is idle, and costs a restart. A restart is minutes that are billed
and waited for, and now and then a start that fails (no capacity, a hang) and is tried again. With a probability p of
failure for each attempt, independent of the others, p / (1 - p) attempts fail on average before one succeeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from cudadent42.base.errors import UsageError
from cudadent42.cost.rates import Rate, Restart

_MINUTES = 60.0
"""In an hour, by which rates are."""


class Decision(str, Enum):
    KEEP = "keep"
    STOP = "stop"


@dataclass(frozen=True)
class Term:
    """One line of the arithmetic."""

    name: str
    formula: str
    """With the numbers in it."""
    usd: float


@dataclass(frozen=True)
class Advice:
    """What to do, and why."""

    decision: Decision
    idle_minutes: float
    keep: tuple[Term, ...]
    stop: tuple[Term, ...]
    keep_usd: float
    stop_usd: float
    break_even_minutes: float
    """Idle time from which on stopping is cheaper; infinite where it never is."""
    restart: Restart

    @property
    def saving_usd(self) -> float:
        """Of the advised option over the other one."""
        return abs(self.keep_usd - self.stop_usd)

    def lines(self) -> tuple[str, ...]:
        """The advice with its arithmetic, for a reader."""
        lines = []
        for option, terms, total in (("keep", self.keep, self.keep_usd), ("stop", self.stop, self.stop_usd)):
            lines.append(f"{option}: ${total:.2f}")
            lines += [f"    {term.name}: {term.formula} = ${term.usd:.2f}" for term in terms]
        lines.append(f"restart: {self.restart.basis}")
        if math.isinf(self.break_even_minutes):
            lines.append("stopping never pays here: a stopped machine costs as much as a running one")
        else:
            lines.append(f"stopping pays from {self.break_even_minutes:.0f} idle minutes on")
        lines.append(
            f"{self.decision.value}: saves ${self.saving_usd:.2f} over {self.idle_minutes:.0f} idle minutes"
        )
        return tuple(lines)


def advise(machine: Rate, engineer: Rate, idle_minutes: float, restart: Restart) -> Advice:
    """Keep ``machine`` for ``idle_minutes``, or stop and start it again.

    The engineer waits while the machine starts, and not otherwise; a failed attempt is taken to be billed like a good
    one, which is the careful assumption. Where both cost the same the advice is to keep, which changes nothing.

    Raises UsageError where a number makes no sense: negative or infinite times, a failure rate of 1 or more.
    """
    for name, minutes in (
        ("the idle time", idle_minutes),
        ("the restart time", restart.minutes),
        ("the time that a failed restart costs", restart.failure_minutes),
    ):
        if not 0 <= minutes < math.inf:
            raise UsageError(f"{name} is {minutes} minutes; expected a number from 0 on")
    if not 0 <= restart.failure_rate < 1:
        raise UsageError(
            f"the failure rate of restarts is {restart.failure_rate}; expected a share from 0 to below 1, such as 0.1"
        )
    waiting = restart.expected_minutes
    keep = (_term("running idle", idle_minutes, machine.usd_per_hour),)
    restarting = (
        _term("machine while it starts", waiting, machine.usd_per_hour),
        _term("engineer who waits", waiting, engineer.usd_per_hour),
    )
    stop = (_term("stopped", idle_minutes, machine.stopped_usd_per_hour), *restarting)
    keep_usd, stop_usd = _sum(keep), _sum(stop)
    saved_per_minute = (machine.usd_per_hour - machine.stopped_usd_per_hour) / _MINUTES
    return Advice(
        decision=Decision.STOP if stop_usd < keep_usd else Decision.KEEP,
        idle_minutes=idle_minutes,
        keep=keep,
        stop=stop,
        keep_usd=keep_usd,
        stop_usd=stop_usd,
        break_even_minutes=_sum(restarting) / saved_per_minute if saved_per_minute > 0 else math.inf,
        restart=restart,
    )


def _term(name: str, minutes: float, usd_per_hour: float) -> Term:
    return Term(name, f"{minutes:.1f} min × ${usd_per_hour:.3g}/h", minutes / _MINUTES * usd_per_hour)


def _sum(terms: tuple[Term, ...]) -> float:
    return math.fsum(term.usd for term in terms)
