"""What a run elsewhere will cost, whether it may, and how long that lets the machine be on.

Money is US dollars, as in the table of rates: the machine's rate for the minutes that it is on because of the run. They
are its start, the environment, the run and its end. What its disk costs when it is off is not counted.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudadent42.base.errors import UsageError
from cudadent42.cost.rates import Rate, Rates, user_file
from cudadent42.ledger.account import restart_on_record
from cudadent42.remote.core.consent import Consent
from cudadent42.runs import starts

if TYPE_CHECKING:
    from cudadent42.model.records import Plan

BOOTSTRAP_MINUTES = 5.0
"""The figure that a bare machine is held to until it has all that a run needs; one that has it is ready in seconds."""

END_S = 180
"""What the end of a machine takes, which is paid for too: up to 40 s until the run is ended and fetched, and up to two
minutes until the provider has stopped it. The watchdog acts by so much earlier."""

LEAST_S = 60
"""A limit that leaves the machine less time than this, lets no run begin."""

ENVIRONMENT = "environment"
RUN = "run"
"""Parts of an estimate; the others are the machine's own, before and after."""


@dataclass(frozen=True, kw_only=True)
class Paid:
    """What of a machine's time a run pays for."""

    rate: str = ""
    """Its entry in the table of rates; empty for the one that is called like the machine, if there is one."""
    rented: bool
    """Started for runs. One that is the user's own costs what it costs."""
    starting: bool = False
    """It does not run yet."""
    own_environment: bool
    """It has been given no Python that has all that a run needs."""
    idle_minutes: float = 0.0
    """It is on for so long after the run, where only its idle limit ends it."""


@dataclass(frozen=True)
class Part:
    """Minutes of an estimate."""

    name: str
    minutes: float
    basis: str
    """Where the figure is from."""


@dataclass(frozen=True)
class Estimate:
    """What a run will cost, rather too high than too low."""

    rate: Rate
    parts: tuple[Part, ...]

    @property
    def minutes(self) -> float:
        return math.fsum(part.minutes for part in self.parts)

    @property
    def usd(self) -> float:
        return self.minutes / 60 * self.rate.usd_per_hour

    def line(self) -> str:
        parts = ", ".join(f"{part.name} {part.minutes:.1f}" for part in self.parts)
        return (
            f"at most about {self.minutes:.0f} min ({parts}) at ${self.rate.usd_per_hour:.2f}/h "
            f"of {self.rate.name}: ${self.usd:.2f}"
        )


def rate_of(name: str, remote: str, table: Rates) -> Rate | None:
    """What an hour of a remote costs; None where nobody said.

    ``name`` is the rate that the remote names. A machine of one's own names none: it has the entry of the table that
    is called like ``remote``, if there is one.
    """
    return table.machines.get(name or remote)


def how_to_add(name: str) -> str:
    """What to do where a rate is missing."""
    return (
        f"add it to {shlex.quote(str(user_file()))} as a table [[rate]] with name = {name!r}, usd_per_hour and "
        "date; `cudadent42 cost rates` shows all"
    )


def estimate(plan: Plan, rate: Rate, table: Rates, paid: Paid) -> Estimate:
    """What a run of ``plan`` costs on a machine of which so much is ``paid`` for."""
    from cudadent42.flows.duration import estimate_s  # PyTorch, which nothing else here needs

    parts = []
    if paid.starting:
        restart = restart_on_record(starts.load(), rate.name, table.restart)
        parts.append(Part("start", restart.expected_minutes, restart.basis))
    if paid.own_environment:
        parts.append(Part(ENVIRONMENT, BOOTSTRAP_MINUTES, "of a machine that has nothing yet"))
    parts.append(Part(RUN, estimate_s(plan) / 60, "of the plan, on a slow machine"))
    if paid.starting or paid.idle_minutes:
        parts.append(Part("end", END_S / 60, "until the run is ended and the provider has stopped it"))
    if paid.idle_minutes:
        parts.append(
            Part("idle", paid.idle_minutes, "until its idle limit ends it, where nothing here does before")
        )
    return Estimate(rate, tuple(parts))


def allowed_usd(estimate: Estimate, max_cost: float, consent: Consent) -> float:
    """The sum that the run may cost: ``max_cost``, or the estimate where that is more and the user agrees to it.

    Raises UsageError where nobody agrees, or for what is no sum.
    """
    if not math.isfinite(max_cost):
        raise UsageError(f"--max-cost {max_cost}: expected a sum of US dollars; leave it out for no limit")
    if estimate.usd <= max_cost:
        return max_cost
    above = f"{estimate.line()}, above --max-cost {max_cost:.2f}"
    if consent.to(f"{above}; run for up to ${estimate.usd:.2f}?"):
        return estimate.usd
    raise UsageError(
        f"{above}; nothing was started. Choose fewer cases or a --budget, raise --max-cost, or agree to it with --yes"
    )


def run_minutes(usd: float, estimate: Estimate) -> int | None:
    """How long environment and run may take for ``usd``, on a machine whose start and end take what the estimate says;
    None for no limit. Raises UsageError where too little is left."""
    if estimate.rate.usd_per_hour <= 0:
        return None
    around = math.fsum(part.minutes for part in estimate.parts if part.name not in (ENVIRONMENT, RUN))
    left = usd / estimate.rate.usd_per_hour * 60 - around
    if left * 60 < LEAST_S:
        raise UsageError(
            f"${usd:.2f} at ${estimate.rate.usd_per_hour:.2f}/h leave {max(0.0, left):.1f} min beside "
            f"{around:.1f} min of the machine's start and end, which is too little for a run; raise --max-cost"
        )
    return math.floor(left)


def seconds_for(usd: float, rate: Rate, spent_s: float, *, ending: bool) -> int:
    """How long a machine may still be on for ``usd``, of which ``spent_s`` are over; 0 for no limit (it costs nothing).

    ``ending`` leaves room for its end, for a machine that is powered off. Raises UsageError where too little is left.
    """
    if rate.usd_per_hour <= 0:
        return 0
    left = usd / rate.usd_per_hour * 3600 - spent_s - (END_S if ending else 0)
    if left < LEAST_S:
        raise UsageError(
            f"${usd:.2f} at ${rate.usd_per_hour:.2f}/h leave {max(0.0, left) / 60:.1f} min after "
            f"{spent_s / 60:.1f} min that the machine has been on, which is too little for a run; raise --max-cost"
        )
    return math.floor(left)
