"""From ratios to words: the one decision tree, described in docs/deciding.md."""

from __future__ import annotations

from collections.abc import Sequence

from cudadent42.decisions.margin import lower, upper
from cudadent42.decisions.statistics import RatioEstimate
from cudadent42.model.records import Refusal, Verdict

MIN_BLOCKS = 8
"""With fewer, the bootstrap covers less than 93 % of the time, so no verdict is given."""

REFUSALS = {
    Refusal.TOO_FEW_BLOCKS: f"fewer than {MIN_BLOCKS} blocks that count allow no verdict; measure more with --repeats",
    Refusal.DISTURBED: "other work took the processors away in more than half of the blocks; repeat on a quiet "
    "machine, or measure processor time with --timer cpu",
    Refusal.UNLIKE_WINDOWS: "the processors were taken away while it was measured how many calls fill a window, so "
    "the sides are not timed alike; repeat on a quiet machine, or measure processor time with --timer cpu",
    Refusal.IMPOSSIBLE: "a latency is below what this machine can do, so the call does not do its work while it is "
    "timed; look for a result that is kept from an earlier call, or for work that goes on after the call returned",
}
"""Why there is no verdict, and what to do."""

FALSE_DISCOVERY_RATE = 0.05
"""Expected share of wrong words among those that are given, over the cases of a run."""

EQUALITY_LEVEL = 0.05
"""Of each of the two one-sided tests."""


def decide(estimate: RatioEstimate, margin: float, control_offset: float = 0.0) -> Verdict:
    """One of four words.

    ``margin`` is the difference that matters in practice. ``control_offset`` is how far from 1 the A/A
    control of the same case lies: what this run shows between two runs of the same code is not called a
    difference.
    """
    if estimate.blocks < MIN_BLOCKS:
        return Verdict.UNDECIDED
    low, high = estimate.interval()
    threshold = max(margin, control_offset)
    if low > upper(threshold):
        return Verdict.FASTER
    if high < lower(threshold):
        return Verdict.SLOWER
    if _equality_p_value(estimate, margin, control_offset) <= EQUALITY_LEVEL:
        return Verdict.EQUAL
    return Verdict.UNDECIDED


def _equality_p_value(estimate: RatioEstimate, margin: float, control_offset: float) -> float:
    """Where the control is off by more than the margin, a difference of that excess may hide; "equal" then asks for a
    ratio that stays inside the margin with it, which none does from twice the margin on."""
    inside = margin - max(0.0, control_offset - margin)
    return estimate.equality_p_value(inside) if inside > 0 else 1.0


def decide_many(
    estimates: Sequence[RatioEstimate], margin: float, control_offsets: Sequence[float]
) -> list[Verdict]:
    """``decide`` for each, with false discoveries held to 5 % over all (Benjamini and Hochberg, 1995).

    Differences are counted among the differences, equalities among the equalities. A word that does not survive
    becomes undecided.
    """
    pairs = list(zip(estimates, control_offsets, strict=True))
    verdicts = [decide(estimate, margin, offset) for estimate, offset in pairs]
    different = discoveries(
        [estimate.p_value(max(margin, offset)) for estimate, offset in pairs], FALSE_DISCOVERY_RATE
    )
    equal = discoveries(
        [_equality_p_value(estimate, margin, offset) for estimate, offset in pairs], FALSE_DISCOVERY_RATE
    )
    survives = {
        Verdict.FASTER: different,
        Verdict.SLOWER: different,
        Verdict.EQUAL: equal,
    }
    return [
        verdict if verdict in survives and survives[verdict][index] else Verdict.UNDECIDED
        for index, verdict in enumerate(verdicts)
    ]


def discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which hypotheses the Benjamini-Hochberg procedure rejects."""
    ordered = sorted(p_values)
    passing = [p for rank, p in enumerate(ordered, start=1) if p <= rate * rank / len(ordered)]
    limit = max(passing, default=-1.0)
    return [p <= limit for p in p_values]
