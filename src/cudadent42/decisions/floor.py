"""The least latency that this machine allows: what is shorter was not measured, whatever the clock said."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cudadent42.model.cases import Case
from cudadent42.model.limits import BANDWIDTH_LIMIT, CACHE, RATE_LIMIT

TOLERANCE = 2.0
"""How far the limits may be exceeded. They are measured, with products and copies that are good and not perfect:
reading alone can be nearly twice as fast as a copy, which on a CPU also reads what it writes over. What passes unseen
by them, such as a call that hands back an earlier result, exceeds them by far more."""


def floor_ms(case: Case, peaks: Mapping[str, float]) -> float:
    """Milliseconds that the operations of a case take at ``TOLERANCE`` times the machine's rate, or its bytes beyond
    what the cache holds, whichever take longer. 0 where no limit was measured."""
    rate, bandwidth = peaks.get(RATE_LIMIT, math.inf), peaks.get(BANDWIDTH_LIMIT, math.inf)
    from_memory = max(0.0, case.bytes_min - peaks.get(CACHE, math.inf))
    return max(case.flops / rate, from_memory / bandwidth) / TOLERANCE / 1e6
