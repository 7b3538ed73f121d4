"""A script whose calls were recorded, as far as a suite and its results keep it, and what the results say of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CallTimes:
    """All calls of a script that are one case of a suite."""

    case: str
    """``Case.id``."""
    calls: int
    """In one run of the script."""
    seconds: tuple[float, ...]
    """Of all these calls together, in each recorded run of the script."""
    spread: float = 0.0
    """Standard deviation of single calls' times, as a share of their mean."""
    ours: bool = False
    """The script calls this project's kernels already: nothing changes."""


@dataclass(frozen=True)
class Unchanged:
    """Calls that stay what they are, because the kernels do not take them or a suite cannot have them."""

    what: str
    """The operation and its sizes, in words."""
    reason: str
    calls: int
    seconds: tuple[float, ...]
    """As in ``CallTimes``."""


@dataclass(frozen=True)
class OtherSuite:
    """Calls of the same script that another suite has, since a suite is of one operation and one baseline."""

    suite: str
    """Name of the file."""
    calls: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Script:
    """A recorded script."""

    recording: str
    """Told from others by this: all suites of one recording have the same."""
    command: tuple[str, ...]
    """The script and its arguments; empty for a block that was recorded by ``with cudadent42.capture():``."""
    device: str
    """``cpu`` or ``cuda``: where the calls of these cases ran."""
    seconds: tuple[float, ...]
    """That the whole script, or what of it was recorded, took in each recorded run."""
    calls: tuple[CallTimes, ...]
    unchanged: tuple[Unchanged, ...] = ()
    elsewhere: tuple[OtherSuite, ...] = ()
    notes: tuple[str, ...] = ()
    """What the recording could not see, or saw with less than full truth."""


@dataclass(frozen=True)
class Prediction:
    """What a script would gain from the kernels, by Amdahl's law."""

    seconds: float
    """Of the script as it was recorded; the mean of its runs."""
    predicted_seconds: float
    """With the kernels in it."""
    speedup: float
    """The first over the second."""
    ci_low: float
    ci_high: float
    """Of ``speedup``, 95 %, from the cases' paired ratios and the spread of calls and of the script's runs."""
    share: float
    """Of the script's time, that is in the calls which change."""
    share_low: float
    share_high: float
    calls_speedup: float
    """Of these calls together, each case weighted by its time: ``sum(t) / sum(t / speedup)``. NaN without any."""
    unchanged_share: float
    """Of the script's time, that is in recorded calls which stay as they are."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Cases without a ratio, by ``Case.id``, with the reason: they count as unchanged."""


LEAST_PAIRS = 3
"""Of a replay that is given an interval."""


@dataclass(frozen=True)
class Replay:
    """A script that was run both ways, and how far its prediction was off."""

    seconds: tuple[float, ...]
    """Of the script as it is, in each pair of runs."""
    seconds_with_kernels: tuple[float, ...]
    """Of the other run of each pair."""
    speedup: float
    ci_low: float
    ci_high: float
    """Of the pairs' ratios, 95 %."""
    prediction: Prediction

    @property
    def error(self) -> float:
        """Predicted time with the kernels less the measured one, as a share of the script's time: above 0 the script
        got faster than predicted."""
        return 1.0 / self.prediction.speedup - 1.0 / self.speedup

    @property
    def has_interval(self) -> bool:
        """Whether there are pairs enough for one: that of a single pair would be a point."""
        return len(self.seconds) >= LEAST_PAIRS

    @property
    def inside(self) -> bool:
        """Whether what was measured and what was predicted agree: their intervals overlap."""
        return self.ci_low <= self.prediction.ci_high and self.prediction.ci_low <= self.ci_high
