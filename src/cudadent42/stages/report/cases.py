"""One case of a run: its problem, its comparisons, its verification, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cudadent42.model import text
from cudadent42.model.cases import Case
from cudadent42.model.records import Comparison, ErrorNorms, VerifiedCase
from cudadent42.operations import definition

RANDOM = "random"
AFTER_TIMING = "after timing"
"""``VerifiedCase.input`` of a case's own inputs, before it was timed and of its last timed call; all others are
adversarial."""


@dataclass(frozen=True)
class CaseRow:
    """All that is known of one case of the plan."""

    case: Case
    comparison: Comparison | None
    """Of the candidate; None where it was not timed."""
    control: Comparison | None
    others: Mapping[str, Comparison]
    """Of the remaining implementations, by name."""
    reason: str
    """Why it was not timed."""
    verified: VerifiedCase | None
    """The candidate on this case's own inputs."""

    @property
    def name(self) -> str:
        return text.clean(self.case.name)

    @property
    def shape(self) -> str:
        """The sizes, as the operation writes them."""
        shape: str = definition(self.case.operation).shape(self.case)
        return shape

    @property
    def speedup(self) -> float:
        """Of the candidate; NaN where it was not timed."""
        return self.comparison.speedup if self.comparison else math.nan

    @property
    def measured(self) -> bool:
        """Whether the candidate's ratio is one: it was timed, and nothing forbids a verdict."""
        return self.comparison is not None and self.comparison.refused is None

    @property
    def gflops(self) -> float:
        """Achieved by the candidate, 1e9 floating-point operations per second."""
        return _rate(self.case, self.comparison.latency_ms) if self.comparison else math.nan

    @property
    def baseline_gflops(self) -> float:
        return _rate(self.case, self.comparison.baseline_latency_ms) if self.comparison else math.nan

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte of compulsory traffic."""
        return self.case.flops / self.case.bytes_min if self.case.bytes_min else math.nan

    @property
    def error_over_reference(self) -> float:
        """Worst element's error as a multiple of PyTorch's on the same input."""
        verified = self.verified
        if verified is None or verified.error is None or verified.reference_error is None:
            return math.nan
        return _divide(verified.error.max, verified.reference_error.max)


def shares_of_bound(entry: VerifiedCase) -> tuple[float, float, float]:
    """Error over bound for (max, RMS, worst row); NaN where the check has no bound."""
    if entry.error is None or entry.bound is None:
        return (math.nan, math.nan, math.nan)
    error, bound = _norms(entry.error), _norms(entry.bound)
    return (_share(error[0], bound[0]), _share(error[1], bound[1]), _share(error[2], bound[2]))


def _norms(norms: ErrorNorms) -> tuple[float, float, float]:
    return (norms.max, norms.rms, norms.worst_row)


def _share(error: float, bound: float) -> float:
    return 0.0 if error == 0 and bound == 0 else _divide(error, bound)


def _divide(over: float, under: float) -> float:
    if math.isnan(over) or math.isnan(under):
        return math.nan
    return over / under if under else math.inf


def _rate(case: Case, latency_ms: float) -> float:
    return case.flops / latency_ms / 1e6 if latency_ms > 0 else math.nan
