"""Timing in randomised paired blocks, and what follows from the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudadent42.model.events import Event
    from cudadent42.model.records import BenchReport, Plan, VerifyReport


def measure(plan: Plan, verified: VerifyReport, *, emit: Callable[[Event], None]) -> BenchReport:
    """Times the plan in this process. Imports torch, which ``decisions.compare`` does not need."""
    from cudadent42.stages.bench.measurement import measure as measure_here

    return measure_here(plan, verified, emit=emit)
