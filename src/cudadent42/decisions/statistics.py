"""Paired ratios with bootstrap intervals over blocks. What is decided on them is in ``decisions.verdicts``.

The block is the unit of analysis. Its samples share the machine's state, so what enters is the ratio within each
block, and blocks are resampled whole (percentile bootstrap: Efron and Tibshirani, 1993, chapter 13). Their centre is
the mean of the middle third of the log ratios, which a quarter of disturbed blocks on either side does not move far.
It was chosen by simulation (tests/cudadent42/decisions): the median needs 20 % more blocks on a steady machine, and the
mean of the middle half loses a sixth of its power where one call in ten is delayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cudadent42.decisions.margin import lower, upper

Floats = NDArray[np.float64]
_Number = TypeVar("_Number", bound=np.generic)

RESAMPLES = 4000
"""The ends of a 95 % interval then rest on 100 resamples each, and move by about 2 % of its width between
seeds."""

QUICK_RESAMPLES = 400
"""For a width that only decides whether to go on measuring."""

_CHUNK = 1 << 22
"""Numbers that are resampled at a time, so that many blocks do not fill the memory."""

CONFIDENCE = 0.95

TRIMMED = 1 / 3
"""Share of the log ratios that is left out at either end."""

INTERVAL_FACTOR = 1.96
"""Standard errors from the middle of a 95 % interval to its end."""

POWER_FACTOR = INTERVAL_FACTOR + 0.84
"""Standard errors between a value and a threshold that its 95 % interval leaves out four times out of five."""

CENTRE_FACTOR = 1.14
"""Standard error of the centre over that of the mean, for normal noise."""


@dataclass(frozen=True)
class RatioEstimate:
    """Baseline's latency over the candidate's: above 1 the candidate is faster."""

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

    def equality_p_value(self, margin: float) -> float:
        """Of two one-sided tests, the larger p-value: of the hypothesis that the ratio is outside ``margin`` of 1
        (Schuirmann, 1987)."""
        above = float(np.sum(self.resampled >= upper(margin)))
        below = float(np.sum(self.resampled <= lower(margin)))
        return min(1.0, (1.0 + max(above, below)) / (len(self.resampled) + 1.0))


def estimate_ratio(
    baseline: Floats, candidate: Floats, seed: int, resamples: int = RESAMPLES
) -> RatioEstimate:
    """From latencies (blocks,) of both sides, entry i of each from block i. Raises ValueError on unequal
    lengths."""
    if baseline.shape != candidate.shape or baseline.ndim != 1 or baseline.size == 0:
        raise ValueError(
            f"expected two equally long rows of latencies, got {baseline.shape}, {candidate.shape}"
        )
    logs = np.log(baseline / candidate)
    blocks = logs.size
    random = np.random.default_rng(seed)
    # A resample is sorted as the ranks of its values: integers of 32 bits take half the time of numbers, and the middle
    # third alone is looked up.
    order = np.argsort(logs)
    ranks = np.empty(blocks, np.uint32)
    ranks[order] = np.arange(blocks, dtype=np.uint32)
    ascending = logs[order]
    resampled = np.empty(resamples)
    for start in range(0, resamples, step := max(1, _CHUNK // blocks)):
        count = min(step, resamples - start)
        drawn = np.sort(ranks[random.integers(0, blocks, size=(count, blocks))], axis=-1)
        resampled[start : start + count] = ascending[_middle(drawn)].mean(axis=-1)
    return RatioEstimate(float(np.exp(centre(logs))), np.exp(resampled), blocks)


def centre(values: Floats) -> Floats:
    """Mean of the middle third along the last axis."""
    mean: Floats = _middle(np.sort(values, axis=-1)).mean(axis=-1)
    return mean


def _middle(ascending: NDArray[_Number]) -> NDArray[_Number]:
    """The middle third along the last axis."""
    count = ascending.shape[-1]
    trimmed = int(TRIMMED * count)
    return ascending[..., trimmed : count - trimmed]


def geometric_mean(estimates: Sequence[RatioEstimate]) -> RatioEstimate:
    """Of the ratios of several cases, whose blocks are resampled independently."""
    if not estimates:
        return RatioEstimate(float("nan"), np.full(1, np.nan), 0)
    logs = np.log([estimate.ratio for estimate in estimates])
    resampled = np.exp(np.mean([np.log(estimate.resampled) for estimate in estimates], axis=0))
    return RatioEstimate(float(np.exp(logs.mean())), resampled, min(e.blocks for e in estimates))


def noise_floor(control_ratios: Sequence[float]) -> float:
    """95th percentile of how far the A/A control's ratios lie from 1; NaN without a control."""
    if not control_ratios:
        return float("nan")
    return float(np.quantile(np.abs(np.array(control_ratios) - 1.0), 0.95))


def spread_of(baseline: Floats, candidate: Floats) -> float:
    """Robust standard deviation of the blocks' log ratios."""
    logs = np.log(baseline / candidate)
    return float(1.4826 * np.median(np.abs(logs - np.median(logs))))


def half_width(baseline: Floats, candidate: Floats) -> float:
    """Half the length of the 95 % interval of the log ratio, by the bootstrap; infinite below two blocks."""
    if baseline.size < 2:
        return float("inf")
    low, high = np.log(estimate_ratio(baseline, candidate, 0, QUICK_RESAMPLES).interval())
    return float(high - low) / 2.0


def minimum_detectable_effect(baseline: Floats, candidate: Floats) -> float:
    """Smallest relative difference that these blocks tell from none four times out of five at 95 %."""
    return detectable_effect(spread_of(baseline, candidate), baseline.size)


def detectable_effect(spread: float, blocks: int) -> float:
    """The same for a spread of the log ratios and a number of blocks."""
    return float(POWER_FACTOR * CENTRE_FACTOR * spread / np.sqrt(blocks))


def blocks_for(effect: float, spread: float) -> int:
    """How many blocks tell a relative difference of ``effect`` from none, or one that lies as far beyond a threshold
    from the threshold, four times out of five."""
    return int(np.ceil((POWER_FACTOR * CENTRE_FACTOR * spread / effect) ** 2))
