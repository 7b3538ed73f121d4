"""How long an agent's work may take and what it may cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.decisions.allowance import Allowance, Limits, allow

LIMITS = Limits(minutes=60.0, usd=5.0, ask_above_usd=1.0)


def test_what_is_within_the_persons_limits_may_begin() -> None:
    assert allow(30, 0.0, LIMITS, usd_per_hour=0.0, committed_usd=0.0) == Allowance(30, 0.0, False)
    assert allow(60, 1.0, LIMITS, usd_per_hour=1.0, committed_usd=4.0) == Allowance(60, 1.0, False)


def test_what_costs_more_than_the_threshold_is_the_persons_to_agree_to() -> None:
    assert allow(60, 4.0, LIMITS, usd_per_hour=3.0, committed_usd=0.0).must_be_agreed
    assert not allow(60, 4.0, LIMITS, usd_per_hour=1.0, committed_usd=0.0).must_be_agreed


@pytest.mark.parametrize(
    ("minutes", "usd", "rate", "committed", "says"),
    [
        (61, 0, 0, 0, "max_minutes 61: expected a number above 0 and up to 60"),
        (0, 0, 0, 0, "max_minutes 0"),
        (-1, 0, 0, 0, "max_minutes -1"),
        (math.nan, 0, 0, 0, "max_minutes nan"),
        (math.inf, 0, 0, 0, "max_minutes inf"),
        (1, 5.5, 0, 0, "max_money 5.5: expected US dollars from 0 to 5,"),
        (1, 1, 0, 4.5, "from 0 to 0.5, which is left of the 5"),
        (1, 1, 0, 9, "from 0 to 0, which"),
        (1, -1, 0, 0, "max_money -1"),
        (1, math.nan, 0, 0, "max_money nan"),
        (60, 2, 3, 0, "may cost 3, above max_money 2; ask for 40 minutes"),
    ],
)
def test_what_is_not_is_refused(minutes: float, usd: float, rate: float, committed: float, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        allow(minutes, usd, LIMITS, usd_per_hour=rate, committed_usd=committed)


anything = st.floats(allow_nan=True, allow_infinity=True)
money = st.floats(0, 1e6)


@given(anything, anything, money, money)
def test_nothing_that_begins_can_cost_more_than_anybody_allowed(
    minutes: float, usd: float, rate: float, committed: float
) -> None:
    try:
        allowance = allow(minutes, usd, LIMITS, usd_per_hour=rate, committed_usd=committed)
    except UsageError:
        return
    assert 0 < allowance.minutes <= LIMITS.minutes
    assert allowance.usd <= usd
    assert committed + allowance.usd <= max(LIMITS.usd, committed)
    assert allowance.must_be_agreed == (allowance.usd > LIMITS.ask_above_usd)
