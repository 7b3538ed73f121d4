"""``remote status`` and ``remote stop --all`` of all machines, and how a user agrees to what costs money."""

from __future__ import annotations

import select
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.commands.common import console_for, print_json, print_line, say

if TYPE_CHECKING:
    from cudadent42.remote.core.consent import Consent
    from cudadent42.remote.flows.survey import Started, Survey


def show_machines(as_json: bool) -> None:
    """Every machine that was started from here and may still cost something, and the runs elsewhere that wait."""
    from cudadent42.remote.core.record import readable

    survey = _survey()
    with_machine = {begun.job for each in survey.started for begun in each.jobs}
    others = [record for record in readable()[0] if not record.fetched and record.job not in with_machine]
    if as_json:
        print_json(
            {
                "machines": [_plain(each) for each in survey.started],
                "usd": survey.usd,
                "corrected": [
                    {"machine": line.start.machine, "outcome": line.outcome, "reason": line.reason}
                    for line in survey.corrected
                ],
                "other_jobs": [{"job": begun.job, "remote": begun.remote} for begun in others],
            }
        )
        return
    console = console_for()
    for line in survey.corrected:
        print_line(console, f"{line.start.machine}: {line.outcome.value}, {line.reason}")
    for each in survey.started:
        for text in _lines(each):
            print_line(console, text)
    if survey.started:
        print_line(console, "end all of it with: cudadent42 remote stop --all")
    else:
        print_line(console, "no machine that was started from here is on")
    for begun in others:
        print_line(
            console,
            f"not brought back: {begun.job} on {begun.remote}; "
            f"bring it back with: cudadent42 remote attach {begun.job}",
        )


def stop_everything(as_json: bool) -> NoReturn:
    """End all that was started from here; exit code 4 where something could not be."""
    from cudadent42.remote.flows.stopping import stop_all

    done = stop_all(_survey().started, say)
    left = [each for each in done if not each.ended]
    if as_json:
        print_json({"ended": [each for each in done if each.ended], "not_ended": left})
    else:
        for each in done:
            print(f"{each.name}: {each.what}" if each.ended else f"{each.name}: NOT ENDED: {each.what}")
        if not done:
            print("nothing that was started from here is on")
    if left:
        say(f"error: {len(left)} of {len(done)} could not be ended: {', '.join(each.name for each in left)}")
    raise typer.Exit(ExitCode.NOT_READY if left else ExitCode.PASS)


def consent_of(yes: bool, as_json: bool = False) -> Consent:
    """How the user of this command agrees to what costs money."""
    from cudadent42.remote.core.consent import Consent

    return Consent(yes, _answered if _can_answer(as_json) else None)


def _can_answer(as_json: bool) -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty() and not as_json


def _confirm(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as error:  # Ctrl-C, or the end of the input
        raise KeyboardInterrupt from error


def _answered(question: str, within_s: float | None) -> bool:
    """As ``_confirm``, no after ``within_s`` seconds without an answer."""
    if within_s is None:
        return _confirm(question)
    typer.echo(f"{question} [y/N, within {within_s:.0f} s]: ", err=True, nl=False)
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return bool(ready) and sys.stdin.readline().strip().lower() in ("y", "yes")


def _survey() -> Survey:
    from cudadent42.cost import rates
    from cudadent42.remote.flows.survey import survey

    try:
        table = rates.load()
    except UsageError as error:
        say(f"{error}; your own prices are not counted")  # what is on is shown and ended all the same
        table = rates.shipped()
    return survey(table, datetime.now(timezone.utc))


def _plain(each: Started) -> dict[str, Any]:
    return {
        "machine": each.start.machine,
        "state": each.word,
        "on_record": each.start.outcome,
        "since": each.start.requested,
        "minutes": each.minutes,
        "rate": each.start.rate,
        "usd": each.usd,
        "after": each.after,
        "jobs": [{"job": begun.job, "remote": begun.remote} for begun in each.jobs],
        "problem": each.problem,
    }


def _lines(each: Started) -> list[str]:
    """One machine, for a reader."""
    cost = "its rate is not known" if each.usd is None else f"${each.usd:.2f}"
    after = f"; after the run: {each.after}" if each.after else ""
    since = each.start.requested[:16].replace("T", " ")
    lines = [
        each.start.machine,
        f"{each.word}, started {since} UTC: {each.minutes:.0f} min, {cost} at {each.start.rate}{after}",
    ]
    lines += [f"not brought back: {begun.job}; {each.attach_command(begun.job)}" for begun in each.jobs]
    lines += [each.problem] if each.problem else []
    return [lines[0], *(f"    {line}" for line in lines[1:])]
