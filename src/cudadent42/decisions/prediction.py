"""What a whole script would gain, from the share of each of its calls and how much faster they are (Amdahl, 1967).

A script takes T seconds, its calls of case i take t_i of them and are r_i times as fast with the kernels. With them it
takes T - sum(t_i) + sum(t_i / r_i). Whatever is not raced keeps its time.

The interval is that of one more run of the script. It comes from resampling all that is uncertain: a recorded run of
the script as a whole, the noise of single calls in each case's sum, and the paired blocks behind each ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import numpy as np

from cudadent42.decisions.statistics import CONFIDENCE, RESAMPLES, Floats, RatioEstimate
from cudadent42.model.script import CallTimes, Prediction, Script

NO_RATIO = "it was not raced"
OURS = "the script calls these kernels already"


def predict(
    script: Script,
    ratios: Mapping[str, RatioEstimate],
    *,
    left_out: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Prediction:
    """Of a script, whose cases are so many times as fast.

    Args:
        script: with at least one recorded run.
        ratios: by ``Case.id``; a case without one counts as unchanged.
        left_out: why cases have no ratio, where that is known.
    """
    reasons = {
        times.case: OURS if times.ours else (left_out or {}).get(times.case, NO_RATIO)
        for times in script.calls
        if times.ours or not _usable(ratios, times.case)
    }
    changed = [times for times in script.calls if times.case not in reasons]
    total = fmean(script.seconds)
    own = [fmean(times.seconds) for times in changed]
    if sum(own) > total:  # calls on several streams of a GPU
        own = [time * total / sum(own) for time in own]
    faster = [time / ratios[times.case].ratio for time, times in zip(own, changed, strict=True)]
    predicted = total - sum(own) + sum(faster)
    totals, shares, after = _resampled(script, changed, ratios, seed)
    low, high = _interval(totals / after)
    share_low, share_high = _interval(shares)
    unchanged = sum(fmean(each.seconds) for each in script.unchanged)
    unchanged += sum(fmean(times.seconds) for times in script.calls if times.case in reasons)
    return Prediction(
        seconds=total,
        predicted_seconds=predicted,
        speedup=total / predicted,
        ci_low=low,
        ci_high=high,
        share=sum(own) / total,
        share_low=share_low,
        share_high=share_high,
        calls_speedup=sum(own) / sum(faster) if own and sum(faster) else float("nan"),
        unchanged_share=unchanged / total,
        left_out=reasons,
    )


def _usable(ratios: Mapping[str, RatioEstimate], case: str) -> bool:
    return case in ratios and bool(np.isfinite(ratios[case].ratio)) and ratios[case].ratio > 0


def _resampled(
    script: Script, changed: list[CallTimes], ratios: Mapping[str, RatioEstimate], seed: int
) -> tuple[Floats, Floats, Floats]:
    """(resamples,) each: seconds of the script, the share of the calls that change, and seconds with the kernels."""
    random = np.random.default_rng(seed)
    runs = random.integers(0, len(script.seconds), size=RESAMPLES)
    totals = np.asarray(script.seconds, dtype=np.float64)[runs]
    before, after = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for times in changed:
        noise = times.spread / np.sqrt(max(1, times.calls)) * random.standard_normal(RESAMPLES)
        own = np.asarray(times.seconds, dtype=np.float64)[runs] * np.maximum(0.0, 1.0 + noise)
        resampled = ratios[times.case].resampled
        before += own
        after += own / resampled[random.integers(0, len(resampled), size=RESAMPLES)]
    # Noise must not make the calls longer than the script that they are a part of.
    within = np.ones(RESAMPLES)
    np.divide(totals, before, out=within, where=before > totals)
    before, after = before * within, after * within
    return totals, before / totals, totals - before + after


def _interval(values: Floats) -> tuple[float, float]:
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)
