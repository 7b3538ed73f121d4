"""How long work that an agent asks for may take, and what it may cost: one rule for every start."""

from __future__ import annotations

from dataclasses import dataclass

from cudadent42.base.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """What the person who started the server allows."""

    minutes: float
    """Of one start."""
    usd: float
    """Of all starts together."""
    ask_above_usd: float
    """A start that may cost more is the person's to agree to."""


@dataclass(frozen=True)
class Allowance:
    """Work that may begin."""

    minutes: float
    """After which it is ended."""
    usd: float
    """The most that it can cost."""
    must_be_agreed: bool
    """By the person, before it begins."""


def allow(
    minutes: float, usd: float, limits: Limits, *, usd_per_hour: float, committed_usd: float
) -> Allowance:
    """Whether work may begin that is to take ``minutes`` at most and to cost ``usd`` at most.

    ``committed_usd`` is what earlier starts cost, and what those that still go on may cost.

    Raises:
        UsageError: the agent's limits are no limits, are above the person's, or contradict each other.
    """
    if not 0.0 < minutes <= limits.minutes:
        raise UsageError(
            f"max_minutes {minutes:g}: expected a number above 0 and up to {limits.minutes:g}, which the person who "
            "started this server allows"
        )
    left_usd = max(0.0, limits.usd - committed_usd)
    if not 0.0 <= usd <= left_usd:
        raise UsageError(
            f"max_money {usd:g}: expected US dollars from 0 to {left_usd:g}, which is left of the {limits.usd:g} that "
            "the person who started this server allows"
        )
    cost_usd = minutes / 60.0 * usd_per_hour
    if cost_usd > usd:
        raise UsageError(
            f"{minutes:g} minutes at {usd_per_hour:g} US dollars an hour may cost {cost_usd:.4g}, above max_money "
            f"{usd:g}; ask for {60.0 * usd / usd_per_hour:.3g} minutes or for more money"
        )
    return Allowance(minutes, cost_usd, must_be_agreed=cost_usd > limits.ask_above_usd)
