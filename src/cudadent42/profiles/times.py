"""The times of one call by the clocks that a profile has, and how far they are apart."""

from __future__ import annotations

import math

from cudadent42.profiles.quantities import call_seconds
from cudadent42.profiles.records import Clock, MeasuredTime, Profile, Source

APART = 0.05
"""From this difference on, relative to the shortest, it is said."""


def times(profile: Profile) -> tuple[MeasuredTime, ...]:
    """Every time of the call that is known."""
    counted = profile.source is Source.COUNTERS and len(profile.launches) <= 1
    ablated = profile.ablations[0].baseline_ms if profile.ablations else math.nan
    traced = sum(launch.duration_s for launch in profile.launches) * 1e3
    measured = {
        Clock.COUNTED: profile.metrics.get("time_s", math.nan) * 1e3 if counted else math.nan,
        Clock.TRACED: traced,
        Clock.CALLED: profile.latency_ms,
        Clock.ABLATED: ablated,
        Clock.RUN: math.nan if profile.run_latency_ms is None else profile.run_latency_ms,
    }
    by_clock = {clock: value for clock, value in measured.items() if math.isfinite(value) and value > 0}
    judged_ms = call_seconds(profile) * 1e3
    judged = next((clock for clock, value in by_clock.items() if math.isclose(value, judged_ms)), None)
    return tuple(MeasuredTime(clock, value, clock is judged) for clock, value in by_clock.items())


def apart(measured: tuple[MeasuredTime, ...]) -> float:
    """How much longer the longest is than the shortest, as a share of the shortest; 0 for one."""
    values = [one.latency_ms for one in measured]
    return max(values) / min(values) - 1 if values else 0.0
