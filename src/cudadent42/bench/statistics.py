"""Ratios of medians with bootstrap intervals over blocks, and the decisions that are taken on them.

The block is the unit of analysis. Its samples share the machine's state, so blocks are resampled whole and
the baseline and the candidate stay paired (percentile bootstrap: Efron and Tibshirani, 1993, chapter 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cudadent42.bench.margin import lower, upper
from cudadent42.records import Verdict

Floats = NDArray[np.float64]

RESAMPLES = 4000
"""The ends of a 95 % interval then rest on 100 resamples each, and move by about 2 % of its width between
seeds."""

CONFIDENCE = 0.95

EQUIVALENCE_CONFIDENCE = 0.90
"""Two one-sided tests at 5 % each are an interval of 90 % inside the margin (Schuirmann, 1987)."""

MIN_BLOCKS = 8
"""With fewer, a bootstrap of medians covers less than 90 % of the time, so no verdict is given."""

FALSE_DISCOVERY_RATE = 0.05


@dataclass(frozen=True)
class RatioEstimate:
    """Baseline's median over the candidate's: above 1 the candidate is faster."""

    ratio: float
    resampled: Floats
    """(resamples,) the ratio in each bootstrap resample."""
    blocks: int

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        tail = (1.0 - confidence) / 2.0
        low, high = np.quantile(self.resampled, [tail, 1.0 - tail])
        return float(low), float(high)

    def p_value(self, margin: float) -> float:
        """Two-sided, of the hypothesis that the ratio is within ``margin`` of 1."""
        inside_from_above = float(np.sum(self.resampled <= upper(margin)))
        inside_from_below = float(np.sum(self.resampled >= lower(margin)))
        return min(1.0, 2.0 * (1.0 + min(inside_from_above, inside_from_below)) / (len(self.resampled) + 1.0))


def estimate_ratio(
    baseline: Floats, candidate: Floats, seed: int, resamples: int = RESAMPLES
) -> RatioEstimate:
    """From latencies (blocks,) of both sides, entry i of each from block i. Raises ValueError on unequal
    lengths."""
    if baseline.shape != candidate.shape or baseline.ndim != 1 or baseline.size == 0:
        raise ValueError(
            f"expected two equally long rows of latencies, got {baseline.shape}, {candidate.shape}"
        )
    blocks = baseline.size
    chosen = np.random.default_rng(seed).integers(0, blocks, size=(resamples, blocks))
    resampled = np.median(baseline[chosen], axis=1) / np.median(candidate[chosen], axis=1)
    return RatioEstimate(float(np.median(baseline) / np.median(candidate)), resampled, blocks)


def geometric_mean(estimates: Sequence[RatioEstimate]) -> RatioEstimate:
    """Of the ratios of several cases, whose blocks are resampled independently."""
    if not estimates:
        return RatioEstimate(float("nan"), np.full(1, np.nan), 0)
    logs = np.log([estimate.ratio for estimate in estimates])
    resampled = np.exp(np.mean([np.log(estimate.resampled) for estimate in estimates], axis=0))
    return RatioEstimate(float(np.exp(logs.mean())), resampled, min(e.blocks for e in estimates))


def decide(estimate: RatioEstimate, margin: float, control_offset: float = 0.0) -> Verdict:
    """One of four words; see the decision tree in docs/measuring.md.

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
    equal_low, equal_high = estimate.interval(EQUIVALENCE_CONFIDENCE)
    if lower(margin) <= equal_low and equal_high <= upper(margin):
        return Verdict.EQUAL
    return Verdict.UNDECIDED


def decide_many(
    estimates: Sequence[RatioEstimate], margin: float, control_offsets: Sequence[float]
) -> list[Verdict]:
    """``decide`` for each, with false discoveries held to 5 % over all (Benjamini and Hochberg, 1995): a
    call of faster or slower that does not survive becomes undecided."""
    pairs = list(zip(estimates, control_offsets, strict=True))
    verdicts = [decide(estimate, margin, offset) for estimate, offset in pairs]
    p_values = [estimate.p_value(max(margin, offset)) for estimate, offset in pairs]
    called = (Verdict.FASTER, Verdict.SLOWER)
    return [
        Verdict.UNDECIDED if verdict in called and not survives else verdict
        for verdict, survives in zip(verdicts, discoveries(p_values, FALSE_DISCOVERY_RATE), strict=True)
    ]


def discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which hypotheses the Benjamini-Hochberg procedure rejects."""
    ordered = sorted(p_values)
    passing = [p for rank, p in enumerate(ordered, start=1) if p <= rate * rank / len(ordered)]
    limit = max(passing, default=-1.0)
    return [p <= limit for p in p_values]


def noise_floor(control_ratios: Sequence[float]) -> float:
    """95th percentile of how far the A/A control's ratios lie from 1; NaN without a control."""
    if not control_ratios:
        return float("nan")
    return float(np.quantile(np.abs(np.array(control_ratios) - 1.0), 0.95))


def minimum_detectable_effect(baseline: Floats, candidate: Floats) -> float:
    """Smallest relative difference found four times out of five at 95 %: 2.8 s / sqrt(blocks), with s the
    robust spread of the blocks' log ratios and 1.25 for the lower efficiency of the median."""
    log_ratios = np.log(baseline / candidate)
    spread = 1.4826 * np.median(np.abs(log_ratios - np.median(log_ratios)))
    return float(2.8 * 1.2533 * spread / np.sqrt(log_ratios.size))
