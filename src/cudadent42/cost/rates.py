"""The table of rates: what an hour of each machine, and of the engineer, costs.

Shipped prices (``rates.toml`` beside this file) are public list prices with the day they were looked up; the user's
``rates.toml`` in the configuration folder replaces entries of the same name and adds others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.folders import config_folder
from cudadent42.base.reading import read_text
from cudadent42.base.toml import Table, did_you_mean, parse_toml

SCHEMA_VERSION = 1

RATE_VARIABLE = "CUDADENT42_RATE"
"""Names the rate of the machine that a run is on; the manifest keeps it. Unset: ``LOCAL``."""

LOCAL = "local"
"""The rate of a machine that is not said to be rented."""

STALE_DAYS = 90
"""Cloud prices move a few times a year: an older figure is shown, with a word about its age."""

FILE = "rates.toml"

_TOP_KEYS = frozenset(("schema_version", "engineer", "restart", "rate"))
_ENGINEER_KEYS = frozenset(("usd_per_hour", "date", "source"))
_RESTART_KEYS = frozenset(("minutes", "failure_rate", "failure_minutes", "source"))
_RATE_KEYS = frozenset(("name", "description", "usd_per_hour", "stopped_usd_per_hour", "date", "source"))
_MOST_USD_PER_HOUR = 10_000.0
"""A dearer hour is a slip of the pen."""
_MOST_MINUTES = 1440.0


@dataclass(frozen=True)
class Rate:
    """What an hour of something costs, in US dollars."""

    name: str
    usd_per_hour: float
    looked_up: date
    source: str
    description: str = ""
    stopped_usd_per_hour: float = 0.0
    """While a machine is stopped: for its disk."""
    own: bool = False
    """From the user's own table, not the shipped one."""

    def is_stale(self, today: date) -> bool:
        """Own hardware has no list price to go out of date."""
        return self.usd_per_hour > 0 and (today - self.looked_up).days > STALE_DAYS


@dataclass(frozen=True)
class Restart:
    """What starting the machine again takes."""

    minutes: float
    """Of an attempt that succeeds, until work can go on: boot, and whatever the stop lost."""
    failure_rate: float
    """Share of the attempts that fail, from 0 to below 1."""
    failure_minutes: float
    """Of an attempt that fails, until the next one begins."""
    basis: str = ""
    """Where these figures are from."""

    @property
    def expected_minutes(self) -> float:
        """Until the machine is back, failed attempts included."""
        return self.minutes + self.failure_rate / (1 - self.failure_rate) * self.failure_minutes


@dataclass(frozen=True)
class Rates:
    """All rates, by name."""

    machines: Mapping[str, Rate]
    engineer: Rate
    restart: Restart
    """Of a machine whose starts are not on record."""

    def __iter__(self) -> Iterator[Rate]:
        return iter(self.machines.values())

    def get(self, name: str) -> Rate:
        """The rate of a machine; UsageError, with the near name, where there is none."""
        if name not in self.machines:
            raise UsageError(
                f"unknown rate {name!r}; expected one of {', '.join(self.machines)}"
                f"{did_you_mean(name, self.machines)}. Add your own in {user_file()}"
            )
        return self.machines[name]

    def find(self, name: str | None) -> Rate | None:
        """The rate of a machine, ``LOCAL`` for None or an empty name; None where the table has no such name."""
        return self.machines.get(name or LOCAL)


def load(path: Path | None = None) -> Rates:
    """The shipped rates with the user's over them; ``path`` is the user's file, by default `user_file`.

    Raises UsageError, with the place, for a file that cannot be read or means something else than it says.
    """
    defaults = shipped()
    path = user_file() if path is None else path
    try:
        text = read_text(path)
    except FileNotFoundError:
        own = _Parsed({}, None, None)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the rates {path}: {reason}; expected a TOML file") from error
    else:
        own = _parse(text, str(path), own=True)
    return Rates(
        {**defaults.machines, **own.machines},
        own.engineer or defaults.engineer,
        own.restart or defaults.restart,
    )


def shipped() -> Rates:
    """The table that comes with the package."""
    text = resources.files("cudadent42.cost").joinpath(FILE).read_text(encoding="utf-8")
    table = _parse(text, f"the shipped {FILE}", own=False)
    assert table.engineer is not None
    assert table.restart is not None
    return Rates(table.machines, table.engineer, table.restart)


def user_file() -> Path:
    """The user's own table: ``$XDG_CONFIG_HOME/cudadent42/rates.toml``. It may be absent."""
    return config_folder() / FILE


def of_this_machine() -> str:
    """The name of the rate that this machine is said to have."""
    return os.environ.get(RATE_VARIABLE, "") or LOCAL


def stale_lines(rates: Iterator[Rate] | tuple[Rate, ...], today: date) -> list[str]:
    """A sentence about each rate that is out of date."""
    return [
        f"the rate {rate.name} (${rate.usd_per_hour:.2f}/h) was looked up on {rate.looked_up}, "
        f"{(today - rate.looked_up).days} days ago; put the present one into {user_file()}"
        for rate in rates
        if rate.is_stale(today)
    ]


@dataclass(frozen=True)
class _Parsed:
    """One file; what it leaves out is None."""

    machines: dict[str, Rate]
    engineer: Rate | None
    restart: Restart | None


def _parse(text: str, where: str, own: bool) -> _Parsed:
    document = parse_toml(text, where)
    table = Table(document, where)
    version = table.integer("schema_version", 1, 1 << 30, None)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{where} has schema_version {version}, of a newer cudadent42; "
            f"this one reads up to {SCHEMA_VERSION}: upgrade it"
        )
    table.check_keys(_TOP_KEYS)
    machines: dict[str, Rate] = {}
    for number, item in enumerate(
        table.value("rate", list, "a list, each entry beginning with [[rate]]", []), 1
    ):
        entry = _table(item, f"{where}, rate {number}")
        rate = _rate(entry, own)
        if rate.name in machines:
            raise UsageError(f"{where}: the rate {rate.name!r} is given twice")
        machines[rate.name] = rate
    engineer = None
    if table.has("engineer"):
        entry = _table(document["engineer"], f"{where}, engineer")
        entry.check_keys(_ENGINEER_KEYS)
        engineer = Rate("engineer", _usd(entry, "usd_per_hour", None), _date(entry), _source(entry), own=own)
    restart = _restart(_table(document["restart"], f"{where}, restart")) if table.has("restart") else None
    return _Parsed(machines, engineer, restart)


def _restart(table: Table) -> Restart:
    table.check_keys(_RESTART_KEYS)
    expected = f"minutes, from 0 to {_MOST_MINUTES:.0f}"
    failure_rate = table.fraction("failure_rate")
    if failure_rate is None:
        raise UsageError(
            f"{table.where}: the key 'failure_rate' is missing; expected a number from 0 to below 1"
        )
    return Restart(
        minutes=table.number("minutes", _MOST_MINUTES, expected, None),
        failure_rate=failure_rate,
        failure_minutes=table.number("failure_minutes", _MOST_MINUTES, expected, None),
        basis=_source(table),
    )


def _rate(table: Table, own: bool) -> Rate:
    name = table.name("name")
    table.where = f"{table.where} ({name})"
    table.check_keys(_RATE_KEYS)
    return Rate(
        name=name,
        usd_per_hour=_usd(table, "usd_per_hour", None),
        looked_up=_date(table),
        source=_source(table),
        description=table.value("description", str, "text", ""),
        stopped_usd_per_hour=_usd(table, "stopped_usd_per_hour", 0.0),
        own=own,
    )


def _table(item: Any, where: str) -> Table:
    if not isinstance(item, dict):
        raise UsageError(f"{where}: expected a table, found {item!r}")
    return Table(item, where)


def _source(table: Table) -> str:
    source: str = table.value("source", str, "where the price is from", "")
    return source


def _date(table: Table) -> date:
    day: date = table.value("date", date, "the day it was looked up, such as 2026-11-01")
    return day


def _usd(table: Table, key: str, default: float | None) -> float:
    expected = f"US dollars per hour, from 0 to {_MOST_USD_PER_HOUR:,.0f}"
    return table.number(key, _MOST_USD_PER_HOUR, expected, default)
