"""Estimates, agreement, and the time that a sum lets a machine be on."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.cost import rates
from cudadent42.cost.rates import Rate
from cudadent42.flows.duration import estimate_s
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.remote.core import money
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.money import Paid
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

DAY = date(2026, 1, 1)
PLAN = make_plan(Choices("small"), "cpu", registry)


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def rate(usd: float) -> Rate:
    return Rate("x", usd, DAY, "")


def an_estimate(usd: float) -> money.Estimate:
    """Of that sum: an hour at that rate."""
    return money.Estimate(rate(usd), (money.Part("run", 60.0, ""),))


def test_the_parts_of_an_estimate() -> None:
    table = rates.load()
    l4 = table.get("gcp-l4")
    whole = money.estimate(PLAN, l4, table, Paid(rented=True, starting=True, own_environment=True))
    assert [part.name for part in whole.parts] == ["start", "environment", "run", "end"]
    assert whole.parts[0].minutes == table.restart.expected_minutes
    assert whole.parts[2].minutes * 60 == pytest.approx(estimate_s(PLAN))
    assert whole.usd == pytest.approx(whole.minutes / 60 * 0.71)
    assert f"${whole.usd:.2f}" in whole.line()
    running = money.estimate(PLAN, l4, table, Paid(rented=True, starting=False, own_environment=False))
    assert [part.name for part in running.parts] == ["run"]


def test_the_start_is_as_on_record() -> None:
    for _ in range(3):
        begun = starts.request("gce://p/us-central1-a/i", "gcp-l4")
        starts.mark(begun, StartOutcome.READY)
    table = rates.load()
    estimate = money.estimate(
        PLAN, table.get("gcp-l4"), table, Paid(rented=True, starting=True, own_environment=False)
    )
    assert "3 starts of gcp-l4 on record" in estimate.parts[0].basis


def test_a_rate_that_nobody_said_is_not_guessed(tmp_path: Path) -> None:
    table = rates.load()
    assert money.rate_of("", "my-box", table) is None
    assert money.rate_of("no-such", "gcp-l4", table) is None
    assert money.rate_of("gcp-l4", "my-box", table) == table.get("gcp-l4")
    assert "cudadent42/rates.toml" in money.how_to_add("my-box")
    own = tmp_path / "cudadent42/rates.toml"
    own.parent.mkdir()
    own.write_text(
        'schema_version = 1\n[[rate]]\nname = "my-box"\nusd_per_hour = 2.0\ndate = 2026-01-01\nsource = "me"\n'
    )
    rate = money.rate_of("", "my-box", rates.load())
    assert rate is not None
    assert rate.usd_per_hour == 2.0


def refuse(_: str, within_s: float | None) -> bool:
    return False


def test_within_the_limit_nobody_is_asked() -> None:
    def ask(_: str, within_s: float | None) -> bool:
        raise AssertionError

    assert money.allowed_usd(an_estimate(4.9), 5.0, Consent(ask=ask)) == 5.0
    assert money.allowed_usd(an_estimate(4.9), 5.0, Consent(given=True)) == 5.0


def test_above_the_limit_somebody_has_to_agree() -> None:
    asked: list[str] = []

    def agree(question: str, within_s: float | None) -> bool:
        assert within_s is None
        asked.append(question)
        return True

    assert money.allowed_usd(an_estimate(6.0), 5.0, Consent(ask=agree)) == 6.0
    assert "above --max-cost 5.00; run for up to $6.00?" in asked[0]
    assert money.allowed_usd(an_estimate(6.0), 5.0, Consent(given=True)) == 6.0
    for ask in (None, refuse):
        with pytest.raises(UsageError, match=r"nothing was started.*--yes"):
            money.allowed_usd(an_estimate(6.0), 5.0, Consent(ask=ask))


@pytest.mark.parametrize("sum_", [math.inf, math.nan])
@pytest.mark.parametrize("agreed", [False, True])
def test_what_is_no_sum_is_no_limit(sum_: float, agreed: bool) -> None:
    with pytest.raises(UsageError, match="expected a sum"):
        money.allowed_usd(an_estimate(4.9), sum_, Consent(given=agreed))


def test_the_time_that_a_sum_buys_by_hand() -> None:
    """$2 at $4/h are 30 min; 5 were spent, and 3 are the machine's end."""
    assert money.seconds_for(2.0, rate(4.0), 300.0, ending=True) == 1320
    assert money.seconds_for(2.0, rate(4.0), 300.0, ending=False) == 1500
    assert money.seconds_for(2.0, rate(0.0), 300.0, ending=True) == 0
    with pytest.raises(UsageError, match="too little for a run; raise --max-cost"):
        money.seconds_for(2.0, rate(4.0), 1700.0, ending=True)


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(0, 1e6))
def test_the_limit_holds(usd: float, by_hour: float, spent: float) -> None:
    """Whatever was spent before, the machine's whole time, its end included, costs no more than the sum."""
    try:
        left = money.seconds_for(usd, rate(by_hour), spent, ending=True)
    except UsageError:
        return
    assert left >= money.LEAST_S
    assert (spent + left + money.END_S) / 3600 * by_hour <= usd * (1 + 1e-9)
