from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.cost import rates

ONE = """
schema_version = 1
[[rate]]
name = "gcp-l4"
usd_per_hour = 0.5
date = 2026-02-03
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "cudadent42").mkdir()
    return rates.user_file()


def test_shipped_rates_are_dated_and_say_where_they_are_from(own: Path) -> None:
    table = rates.load()
    assert {"local", "gcp-l4"} <= set(table.machines)
    assert table.get("local").usd_per_hour == 0
    for rate in (*table, table.engineer):
        assert rate.looked_up.year >= 2026
        assert rate.source
        assert not rate.own


def test_the_users_rates_replace_and_add(own: Path) -> None:
    own.write_text(ONE + '[[rate]]\nname = "cellar"\nusd_per_hour = 1\ndate = 2026-01-01\n')
    table = rates.load()
    assert (table.get("gcp-l4").usd_per_hour, table.get("gcp-l4").own) == (0.5, True)
    assert table.get("cellar").usd_per_hour == 1.0
    assert table.get("h100").own is False
    assert table.engineer.own is False


def test_the_users_engineer(own: Path) -> None:
    own.write_text("schema_version = 1\n[engineer]\nusd_per_hour = 90\ndate = 2026-01-01\n")
    assert rates.load().engineer.usd_per_hour == 90


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate = 3", "schema_version"),
        ("schema_version = 1\nrat = 3", r"unknown key 'rat'.*did you mean 'rate'"),
        ("schema_version = 2", "of a newer cudadent42"),
        ("schema_version = 1\n[[rate]", "not valid TOML"),
        ("schema_version = 1\nrate = [3]", "rate 1: expected a table"),
        (ONE.replace("0.5", "-1"), r"gcp-l4.*usd_per_hour = -1"),
        (ONE.replace("0.5", "nan"), r"usd_per_hour = nan"),
        (ONE.replace("0.5", "true"), r"usd_per_hour = True"),
        (ONE.replace("2026-02-03", '"soon"'), r"date = 'soon'; expected the day"),
        (ONE.replace("usd_per_hour", "usd_per_hours"), r"did you mean 'usd_per_hour'"),
        (ONE + ONE.replace("schema_version = 1", ""), "given twice"),
    ],
)
def test_bad_tables_say_where_and_what(own: Path, text: str, message: str) -> None:
    own.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        rates.load()
    assert str(own) in str(caught.value)


def test_a_table_that_is_not_text(own: Path) -> None:
    own.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        rates.load()


def test_unknown_rate_names_the_near_one(own: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean 'gcp-l4'"):
        rates.load().get("gcp-14")
    assert rates.load().find("no-such") is None
    assert rates.load().find(None) == rates.load().get("local")


def test_a_rate_goes_out_of_date_unless_it_is_free(own: Path) -> None:
    own.write_text(ONE)
    table = rates.load()
    rate = table.get("gcp-l4")
    day = date(2026, 2, 3)
    assert not rate.is_stale(day + timedelta(days=rates.STALE_DAYS))
    assert rate.is_stale(day + timedelta(days=rates.STALE_DAYS + 1))
    assert not table.get("local").is_stale(date(2099, 1, 1))
    (line,) = rates.stale_lines((rate, table.get("local")), day + timedelta(days=200))
    assert "200 days ago" in line
    assert str(own) in line
