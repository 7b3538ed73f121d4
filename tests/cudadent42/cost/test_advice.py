from __future__ import annotations

import math
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.cost import advise
from cudadent42.cost.advice import Advice, Decision
from cudadent42.cost.rates import Rate, Restart

DAY = date(2026, 1, 1)


def rate(usd: float, stopped: float = 0.0) -> Rate:
    return Rate("x", usd, DAY, "", stopped_usd_per_hour=stopped)


def advice(
    idle: float,
    usd: float = 1.2,
    engineer: float = 60.0,
    minutes: float = 5.0,
    failures: float = 0.2,
    failed: float = 10.0,
    stopped: float = 0.0,
) -> Advice:
    return advise(rate(usd, stopped), rate(engineer), idle, Restart(minutes, failures, failed))


def test_by_hand() -> None:
    """1.20 $/h idle for 60 min is 1.20; a restart of 5 + 0.25 x 10 = 7.5 min costs 0.15 for the machine and 7.50 for
    the engineer, so stopping pays from 7.65 / 0.02 = 382.5 idle minutes on."""
    answer = advice(60.0)
    assert answer.restart.expected_minutes == pytest.approx(7.5)
    assert answer.keep_usd == pytest.approx(1.2)
    assert answer.stop_usd == pytest.approx(7.65)
    assert answer.break_even_minutes == pytest.approx(382.5)
    assert answer.decision is Decision.KEEP
    assert answer.saving_usd == pytest.approx(6.45)
    assert advice(400.0).decision is Decision.STOP
    text = "\n".join(answer.lines())
    assert "running idle: 60.0 min × $1.2/h = $1.20" in text
    assert "stopping pays from 382 idle minutes on" in text
    assert text.endswith("keep: saves $6.45 over 60 idle minutes")


def test_a_free_machine_is_kept() -> None:
    answer = advice(10_000.0, usd=0.0)
    assert answer.decision is Decision.KEEP
    assert math.isinf(answer.break_even_minutes)
    assert "never pays" in "\n".join(answer.lines())


def test_equal_costs_change_nothing() -> None:
    assert advice(0.0, minutes=0.0, failures=0.0).decision is Decision.KEEP


money = st.floats(0, 1000)
minutes = st.floats(0, 1e5)
share = st.floats(0, 0.99)


@given(minutes, money, money, minutes, share, minutes, money)
def test_the_decision_is_the_cheaper_one_and_agrees_with_the_break_even_time(
    idle: float, usd: float, engineer: float, restart: float, failures: float, failed: float, stopped: float
) -> None:
    answer = advice(idle, usd, engineer, restart, failures, failed, stopped)
    assert answer.keep_usd == pytest.approx(math.fsum(term.usd for term in answer.keep))
    assert answer.stop_usd == pytest.approx(math.fsum(term.usd for term in answer.stop))
    assert (answer.decision is Decision.STOP) == (answer.stop_usd < answer.keep_usd)
    if not math.isclose(answer.stop_usd, answer.keep_usd, rel_tol=1e-9, abs_tol=1e-9):
        assert (answer.decision is Decision.STOP) == (idle > answer.break_even_minutes)


@given(minutes, minutes, money, money, minutes, share)
def test_a_longer_pause_never_turns_stop_into_keep(
    idle: float, more: float, usd: float, engineer: float, restart: float, failures: float
) -> None:
    short = advice(idle, usd, engineer, restart, failures)
    long = advice(idle + more, usd, engineer, restart, failures)
    if short.decision is Decision.STOP and more > 1e-3:
        assert long.decision is Decision.STOP or math.isclose(long.stop_usd, long.keep_usd, abs_tol=1e-9)


@given(share, share)
def test_likelier_failures_never_make_stopping_cheaper(one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert advice(60.0, failures=less).stop_usd <= advice(60.0, failures=more).stop_usd + 1e-9


@given(st.integers(1, 40))
def test_expected_attempts_are_those_of_a_geometric_law(tries: int) -> None:
    """The sum of k p^k (1 - p) over k failures before the first success."""
    p = tries / 50
    expected = math.fsum(k * p**k * (1 - p) for k in range(2000))
    assert Restart(0.0, p, 1.0).expected_minutes == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"idle": -1.0}, "idle time"),
        ({"idle": math.inf}, "idle time"),
        ({"idle": math.nan}, "idle time"),
        ({"idle": 1.0, "minutes": -1.0}, "restart time"),
        ({"idle": 1.0, "failed": math.nan}, "failed restart"),
        ({"idle": 1.0, "failures": 1.0}, "below 1"),
        ({"idle": 1.0, "failures": -0.1}, "below 1"),
    ],
)
def test_numbers_that_make_no_sense(change: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        advice(**change)
