"""The script that a suite was recorded from: the table ``[script]``, and what each case says of its calls.

[script]
recording = "..."                 # the same in all suites of one recording
command = ["train.py", "--steps", "20"]
device = "cpu"
seconds = [12.4, 12.6]            # of each recorded run of the script

[[script.unchanged]]              # calls that stay what they are
what = "attention, 8 × 4 × 128 × 32"
reason = "dropout"
calls = 12
seconds = [0.31, 0.30]

[[case]]
calls = 400                       # beside the case's sizes
seconds = [3.2, 3.3]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.toml import Table
from cudadent42.model.script import CallTimes, OtherSuite, Script, Unchanged

CALL_KEYS = frozenset(("calls", "seconds", "spread", "ours"))
"""Of a case, what its calls were in the script."""

_SCRIPT_KEYS = frozenset(("recording", "command", "device", "seconds", "unchanged", "elsewhere", "notes"))
_MOST_CALLS = 1 << 50
_MOST_SECONDS = 1e9
_MOST_SPREAD = 1e6


def script_of(suite: Table, cases: Sequence[Any], dtype: str) -> Script:
    """The script of a suite, whose cases are these tables; ``dtype`` is that of a case which names none. Raises
    UsageError."""
    table = Table(suite.value("script", dict, "a table"), f"{suite.where}, script")
    table.check_keys(_SCRIPT_KEYS)
    seconds = _seconds(table, None)
    if not seconds or min(seconds) <= 0:
        raise UsageError(
            f"{table.where}: seconds = {list(seconds)}; expected at least one number, all above 0"
        )
    runs = len(seconds)
    return Script(
        recording=table.name("recording"),
        command=tuple(table.strings("command", [])),
        device=table.word("device", ("cpu", "cuda"), ""),
        seconds=seconds,
        calls=tuple(
            _call_times(Table(case, f"{suite.where}, case {number}"), dtype, runs)
            for number, case in enumerate(cases, 1)
            if isinstance(case, dict) and CALL_KEYS & case.keys()
        ),
        unchanged=tuple(_unchanged(each, runs) for each in _tables(table, "unchanged")),
        elsewhere=tuple(_other_suite(each, runs) for each in _tables(table, "elsewhere")),
        notes=tuple(table.strings("notes", [])),
    )


def _call_times(table: Table, dtype: str, runs: int) -> CallTimes:
    return CallTimes(
        case=f"{table.name('name')}/{table.value('dtype', str, 'a dtype', dtype)}",
        calls=table.integer("calls", 0, _MOST_CALLS, None),
        seconds=_seconds(table, runs),
        spread=table.number("spread", _MOST_SPREAD, "a number from 0", 0.0),
        ours=table.value("ours", bool, "true or false", False),
    )


def _unchanged(table: Table, runs: int) -> Unchanged:
    table.check_keys({"what", "reason", "calls", "seconds"})
    return Unchanged(
        what=table.value("what", str, "text"),
        reason=table.value("reason", str, "text"),
        calls=table.integer("calls", 0, _MOST_CALLS, None),
        seconds=_seconds(table, runs),
    )


def _other_suite(table: Table, runs: int) -> OtherSuite:
    table.check_keys({"suite", "calls", "seconds"})
    return OtherSuite(
        suite=table.value("suite", str, "the name of a file"),
        calls=table.integer("calls", 0, _MOST_CALLS, None),
        seconds=_seconds(table, runs),
    )


def _tables(table: Table, key: str) -> list[Table]:
    values: list[Mapping[str, Any]] = table.value(key, list, "a list of tables", [])
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise UsageError(f"{table.where}: {key}, entry {number}: expected a table")
    return [Table(value, f"{table.where}.{key} {number}") for number, value in enumerate(values, 1)]


def _seconds(table: Table, runs: int | None) -> tuple[float, ...]:
    """One number for each recorded run."""
    values = table.value("seconds", list, "a list of numbers, one for each recorded run")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST_SECONDS:
            raise UsageError(f"{table.where}: seconds = {values!r}; expected numbers from 0")
    if runs is not None and len(values) != runs:
        raise UsageError(
            f"{table.where}: seconds has {len(values)} numbers; expected {runs}, as many as the script's"
        )
    return tuple(float(value) for value in values)
