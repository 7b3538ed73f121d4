"""What it cost: ``cost``, ``cost advise`` and ``cost rates``."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cudadent42.base.errors import UsageError
from cudadent42.commands.common import console_for, print_json, print_line
from cudadent42.commands.grouped import grouped
from cudadent42.commands.help import App
from cudadent42.commands.options import JsonOption, LedgerOption

if TYPE_CHECKING:
    from cudadent42.cost.rates import Rate, Rates, Restart

cost_app = App(invoke_without_command=True, help="Show what runs, sessions and machines cost.")

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|)")
_MINUTES = {"s": 1 / 60, "m": 1.0, "min": 1.0, "": 1.0, "h": 60.0, "d": 1440.0}


@cost_app.callback()
def cost(context: typer.Context, ledger: LedgerOption = None, as_json: JsonOption = False) -> None:
    """Show attempts, minutes, money, results and verdicts by session.

    Prices are those of `cudadent42 cost rates`.
    """
    if context.invoked_subcommand is not None:
        return
    from cudadent42.commands.tables import plain_table
    from cudadent42.cost import rates
    from cudadent42.ledger import open_for_reading
    from cudadent42.ledger.account import Account, bill

    table = rates.load()
    opened = open_for_reading(ledger)
    from cudadent42.ledger import queries

    sessions, outside, starts = opened.read(
        lambda connection: (
            queries.session_lines(connection),
            queries.runs_outside_sessions(connection),
            queries.start_lines(connection),
        )
    )
    statement = bill(sessions, outside, starts, table, datetime.now(timezone.utc))
    used = {name for account in statement.accounts for name in account.rate.split(", ")}
    stale = rates.stale_lines(tuple(rate for rate in table if rate.name in used), date.today())
    if as_json:
        accounts = [
            {**_plain(account), "usd_per_verdict": account.usd_per_verdict} for account in statement.accounts
        ]
        total = {**_plain(statement.total), "usd_per_verdict": statement.total.usd_per_verdict}
        print_json({"accounts": accounts, "total": total, "notes": [*statement.notes, *stale]})
        return

    def row(account: Account) -> tuple[str, ...]:
        counts = (account.attempts, account.results, account.verdicts, account.undecided)
        attempts, results, verdicts, undecided = map(str, counts)
        return (
            account.name,
            account.rate,
            attempts,
            f"{account.minutes:.1f}",
            _usd(account.usd),
            results,
            verdicts,
            undecided,
            _usd(account.usd_per_verdict),
        )

    console = console_for()
    numbers = ("attempts", "minutes", "cost", "results", "verdicts", "undecided", "per verdict")
    console.print(plain_table(("session", "rate"), numbers, map(row, (*statement.accounts, statement.total))))
    for line in (*statement.notes, *stale):
        print_line(console, f"note: {line}")


@dataclass(frozen=True)
class RestartGiven:
    """What is said of restarts in place of what is on record."""

    restart: Annotated[
        str | None,
        typer.Option(
            "--restart", metavar="TIME", help="Say how long a restart takes. Default: the mean on record."
        ),
    ] = None
    failure_rate: Annotated[
        float | None,
        typer.Option(
            "--failure-rate",
            metavar="SHARE",
            help="Say what share of starts fails. Default: the share on record.",
        ),
    ] = None
    failure_time: Annotated[
        str | None,
        typer.Option(
            "--failure-time",
            metavar="TIME",
            help="Say how much time a failed start costs. Default: the mean on record.",
        ),
    ] = None

    def over(self, on_record: Restart) -> Restart:
        """``on_record`` with what was given. Raises UsageError."""
        given: dict[str, float] = {}
        if self.restart is not None:
            given["minutes"] = minutes_of(self.restart, "--restart")
        if self.failure_rate is not None:
            given["failure_rate"] = self.failure_rate
        if self.failure_time is not None:
            given["failure_minutes"] = minutes_of(self.failure_time, "--failure-time")
        return replace(on_record, **given, basis="as given") if given else on_record


@cost_app.command()
@grouped
def advise(
    *,
    idle: Annotated[
        str,
        typer.Option(
            "--idle", metavar="TIME", help="Say how long the machine will be idle, such as 45m or 1.5h."
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            metavar="RATE",
            help="Name the machine's rate; `cost rates` lists them. Default: $CUDADENT42_RATE.",
        ),
    ] = None,
    given: RestartGiven,
    engineer: Annotated[
        float | None,
        typer.Option(
            "--engineer",
            metavar="USD",
            help="Say what an hour of an engineer costs. Default: the table of rates.",
        ),
    ] = None,
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether to keep a rented machine or to stop it, and why."""
    from cudadent42.cost import advise as weigh
    from cudadent42.cost import rates
    from cudadent42.ledger.account import restart_by_ledger

    table = rates.load()
    rate = table.get(machine or rates.of_this_machine())
    expected = given.over(restart_by_ledger(rate.name, table.restart, ledger))
    hour = table.engineer if engineer is None else _engineer(table, engineer)
    advice = weigh(rate, hour, minutes_of(idle, "--idle"), expected)
    stale = rates.stale_lines((rate, hour), date.today())
    if as_json:
        print_json({"machine": rate.name, "saving_usd": advice.saving_usd, "advice": advice, "notes": stale})
        return
    for line in (*advice.lines(), *(f"note: {line}" for line in stale)):
        print(line)


def _engineer(table: Rates, usd_per_hour: float) -> Rate:
    """The table's engineer at the price that was given. Raises UsageError."""
    if not usd_per_hour >= 0:
        raise UsageError(f"--engineer {usd_per_hour}: expected US dollars per hour, from 0 on")
    return replace(table.engineer, usd_per_hour=usd_per_hour, looked_up=date.today(), source="--engineer")


@cost_app.command("rates")
def show_rates(as_json: JsonOption = False) -> None:
    """Show what machines and the engineer cost by the hour."""
    from cudadent42.commands.tables import plain_table
    from cudadent42.cost import rates

    table = rates.load()
    everything = (*table, table.engineer)
    stale = rates.stale_lines(everything, date.today())
    if as_json:
        entries = [{**_plain(rate), "looked_up": rate.looked_up.isoformat()} for rate in everything]
        print_json({"file": rates.user_file(), "rates": entries, "notes": stale})
        return
    rows = [
        (
            rate.name,
            rate.description or rate.source,
            "yours" if rate.own else "shipped",
            rate.looked_up.isoformat(),
            _usd(rate.usd_per_hour),
            "–" if rate is table.engineer else _usd(rate.stopped_usd_per_hour),
        )
        for rate in everything
    ]
    console = console_for()
    console.print(plain_table(("rate", "what", "from", "looked up"), ("an hour", "stopped"), rows))
    for line in stale:
        print_line(console, f"note: {line}")
    print_line(console, f"your own rates: {rates.user_file()}")


def minutes_of(text: str, option: str) -> float:
    """Minutes of a time such as 90s, 45m, 1.5h or a plain number of minutes."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r}: expected a time such as 90s, 45m, 1.5h or 2d")
    return float(match[1]) * _MINUTES[match[2]]


def _usd(amount: float | None) -> str:
    return "–" if amount is None else f"${amount:.2f}"


def _plain(record: Any) -> dict[str, object]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
