"""Session folders in the ledger, and the bill that follows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import select

from cudadent42 import ledger
from cudadent42.base.errors import UsageError
from cudadent42.cost.rates import Rate, Rates, Restart
from cudadent42.ledger import queries
from cudadent42.ledger.account import MACHINES, OUTSIDE, bill, restart_on_record
from cudadent42.ledger.database import connect
from cudadent42.ledger.queries import RunCost, SessionLine, StartLine
from cudadent42.ledger.schema import checkpoints
from cudadent42.ledger.sessions import read_session
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

MakeRun = Callable[..., Path]
DAY = date(2026, 1, 1)
NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
RATES = Rates(
    {"local": Rate("local", 0.0, DAY, ""), "gpu": Rate("gpu", 6.0, DAY, "")},
    Rate("engineer", 60.0, DAY, ""),
    Restart(5.0, 0.1, 10.0, "assumed"),
)


def make_session(folder: Path, *, passed: int = 2, ended: bool = True, rate: str = "gpu") -> Path:
    """A session of three checkpoints; 600 s each, a restart of the machine after the second event."""
    folder.mkdir(parents=True)
    checkpoints = [{"name": name, "minutes": 15.0} for name in ("baseline", "profile", "fix")]
    started = {"schema_version": 1, "protocol": {"checkpoints": checkpoints}, "settings": {"rate": rate}}
    events: list[tuple[str, object]] = [("Started", started), ("WorkStarted", {})]
    events += [("Passed", {"checkpoint": "x"})] * passed
    if ended:
        events.append(("Ended", {"end": "finished", "reason": ""}))
    lines = []
    for number, (event, data) in enumerate(events):
        lines.append(
            {
                "number": number,
                "time": (NOON + timedelta(hours=number)).isoformat(timespec="milliseconds"),
                "uptime_s": 600.0 * number,
                "boot": "one" if number < 2 else "two",
                "host": "h",
                "event": event,
                "data": data,
            }
        )
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"number": 9')
    return folder


def test_a_session_with_its_runs(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_session(tmp_path / "sessions" / "s1")
    make_run(folder / "runs" / "01-baseline", seed=1)
    make_run(folder / "runs" / "02-fix", seed=2)
    make_run(tmp_path / "runs" / "a", seed=3)
    file = str(tmp_path / "ledger.sqlite")
    done = ledger.rebuild(file, [tmp_path / "sessions", tmp_path / "runs"])
    assert (done.runs, done.sessions) == (3, 1)
    opened = connect(tmp_path / "ledger.sqlite")
    (session,) = opened.read(queries.session_lines)
    # From Started to WorkStarted, then from the first Passed on: the restart in between is not counted.
    assert (session.seconds, session.rate, session.status) == (600.0 + 2 * 600.0, "gpu", "finished")
    assert (session.runs, session.results, session.decided, session.undecided) == (2, 2, 2, 2)
    query = select(checkpoints).where(checkpoints.c.session == session.id).order_by(checkpoints.c.position)
    rows = opened.read(lambda connection: list(connection.execute(query).mappings()))
    assert [(row["name"], row["minutes"], row["outcome"]) for row in rows] == [
        ("baseline", 10.0, "passed"),
        ("profile", 10.0, "passed"),
        ("fix", 10.0, "open"),
    ]
    (outside,) = opened.read(queries.runs_outside_sessions)
    statement = bill([session], [outside], [], RATES, NOON)
    assert [account.name for account in statement.accounts] == ["s1", OUTSIDE]
    assert statement.accounts[0].usd == pytest.approx(1800 / 3600 * 6.0)
    assert statement.accounts[0].usd_per_verdict == pytest.approx(1.5)
    assert statement.accounts[1].usd == 0.0
    assert (statement.total.attempts, statement.total.verdicts, statement.total.usd) == (
        3,
        3,
        pytest.approx(3.0),
    )


def test_recording_a_run_records_its_session(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_session(tmp_path / "sessions" / "s1", ended=False)
    run = make_run(folder / "runs" / "01-baseline")
    assert ledger.record(run, str(tmp_path / "ledger.sqlite")) is None
    (session,) = connect(tmp_path / "ledger.sqlite").read(queries.session_lines)
    assert (session.name, session.status, session.runs) == ("s1", "open", 1)


def test_a_note_long_after_the_end_costs_nothing(tmp_path: Path) -> None:
    folder = make_session(tmp_path / "s1")
    before = read_session(folder)
    log = folder / "events.jsonl"
    *whole, last = log.read_text().splitlines()[:-1]  # without the torn line
    ended = json.loads(last)
    noted = {**ended, "number": ended["number"] + 1, "uptime_s": ended["uptime_s"] + 86400.0}
    noted |= {"time": "2026-02-01T12:00:00.000+00:00", "event": "Noted", "data": {"text": "learnt later"}}
    log.write_text("".join(line + "\n" for line in (*whole, last, json.dumps(noted))))
    assert read_session(folder) == before


def test_a_copied_session_is_the_same(tmp_path: Path) -> None:
    folder = make_session(tmp_path / "s1")
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert read_session(folder).session["id"] == read_session(copy).session["id"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no event"),
        ("[1]\n", "holds no event"),
        ("{\n", "is damaged"),
        ('{"data": {"schema_version": 99}}\n', "newer cudadent42"),
        ('{"data": {}}\n', "not the log of a session"),
    ],
)
def test_what_is_no_session(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "events.jsonl").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_session(tmp_path)


# ---------------------------------------------------------------- machine starts


@pytest.fixture
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.usefixtures("_state")
def test_the_journal_of_starts(tmp_path: Path) -> None:
    assert starts.load() == ()
    first = starts.request("vm-1", "gpu", session="s")
    second = starts.request("vm-2", "gpu")
    starts.mark(first, StartOutcome.READY)
    starts.mark(first, StartOutcome.STOPPED)
    starts.mark(second, StartOutcome.FAILED, "no capacity")
    one, two = starts.load()
    assert (one.machine, one.session, one.outcome) == ("vm-1", "s", StartOutcome.STOPPED)
    assert one.requested <= str(one.ready) <= str(one.ended)
    assert (two.outcome, two.reason, two.ready) == (StartOutcome.FAILED, "no capacity", None)
    assert starts.journal().stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("_state")
def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    starts.request("vm-1", "gpu")
    with starts.journal().open("a") as file:
        file.write('{"id": "cut')
    starts.request("vm-2", "gpu")
    assert [start.machine for start in starts.load()] == ["vm-1", "vm-2"]


@pytest.mark.usefixtures("_state")
def test_a_newer_journal_is_refused() -> None:
    starts.request("vm-1", "gpu")
    path = starts.journal()
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(UsageError, match="newer cudadent42"):
        starts.load()


@pytest.mark.usefixtures("_state")
def test_what_is_not_on_record_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in the way")
    with pytest.raises(UsageError, match="cannot make"):
        starts.request("vm-1", "gpu")


@pytest.mark.usefixtures("_state")
def test_starts_outlive_the_database(make_run: MakeRun, tmp_path: Path) -> None:
    starts.request("vm-1", "gpu")
    file = tmp_path / "ledger.sqlite"
    ledger.record(make_run(tmp_path / "runs" / "a"), str(file))
    file.write_bytes(b"no ledger" * 1000)
    ledger.rebuild(str(file), [tmp_path / "runs"])
    (start,) = connect(file).read(queries.start_lines)
    assert (start.machine, start.outcome) == ("vm-1", "requested")


# ---------------------------------------------------------------- the bill


def line(**changes: object) -> SessionLine:
    values: dict[str, object] = {
        **{"id": "i", "name": "s", "status": "finished", "started": NOON.isoformat(), "seconds": 3600.0},
        **{"rate": "gpu", "runs": 1, "results": 1, "decided": 2, "undecided": 0},
    }
    return SessionLine(**(values | changes))  # type: ignore[arg-type]


def start(
    begin: float, end: float | None, *, session: str | None = None, ready: float | None = None
) -> StartLine:
    """Hours after noon."""

    def at(hours: float | None) -> str | None:
        return None if hours is None else (NOON + timedelta(hours=hours)).isoformat()

    outcome = "requested" if end is None else "stopped" if ready is not None else "failed"
    return StartLine("vm", "gpu", session, str(at(begin)), at(ready), at(end), outcome)


def test_a_session_costs_its_machines_where_they_are_on_record() -> None:
    statement = bill(
        [line()], [], [start(0, 2, session="i", ready=0.1), start(3, 4, session="i")], RATES, NOON
    )
    (account,) = statement.accounts
    assert (account.minutes, account.usd) == (180.0, pytest.approx(18.0))


def test_a_run_on_a_machine_on_record_is_not_paid_twice() -> None:
    runs = [
        RunCost((NOON + timedelta(hours=hours)).isoformat(), 360.0, "gpu", 1, 1, 0) for hours in (0.5, 5.0)
    ]
    statement = bill([], runs, [start(0, 1, ready=0.1)], RATES, NOON)
    outside, machines = statement.accounts
    assert (outside.name, machines.name) == (OUTSIDE, MACHINES)
    assert outside.usd == pytest.approx(0.6)  # the second run only
    assert machines.usd == pytest.approx(6.0)
    assert (outside.minutes, machines.minutes, statement.total.minutes) == (6.0, 60.0, 66.0)
    assert (outside.attempts, statement.total.attempts) == (2, 2)


def test_a_machine_that_still_runs_goes_on_costing_money_and_is_named() -> None:
    statement = bill([], [], [start(0, None, ready=0.1)], RATES, NOON + timedelta(hours=10))
    assert statement.total.usd == pytest.approx(60.0)
    assert "vm has been running since" in statement.notes[0]


def test_an_unknown_rate_is_no_zero() -> None:
    statement = bill([line(rate="mars"), line(id="j")], [], [], RATES, NOON)
    assert statement.accounts[0].usd is None
    assert statement.total.usd is None
    assert "no rate 'mars'" in statement.notes[0]


def test_restarts_on_record_come_before_the_assumption() -> None:
    assumed = RATES.restart
    few = [start(0, 1, ready=0.1)] * 2
    assert restart_on_record(few, "gpu", assumed) is assumed
    restart = restart_on_record([*few, start(0, 0.5)], "gpu", assumed)
    assert (restart.minutes, restart.failure_minutes) == (pytest.approx(6.0), pytest.approx(30.0))
    assert restart.failure_rate == pytest.approx(2 / 5)  # Laplace's
    assert restart.basis == "3 starts of gpu on record, 1 failed"
    assert restart_on_record([start(0, 1, ready=0.1)] * 5, "other", assumed) is assumed
