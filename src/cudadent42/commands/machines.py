"""What ``remote status`` and ``remote stop --all`` do for all machines, and what a run elsewhere may cost."""

from __future__ import annotations

import select
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.commands.common import console_for, print_json, print_line, say

if TYPE_CHECKING:
    from cudadent42.cost.rates import Rates
    from cudadent42.model.records import Plan
    from cudadent42.plan import Choices
    from cudadent42.remote.core.consent import Consent
    from cudadent42.remote.core.hosts import Remote
    from cudadent42.remote.core.machines import Started, Survey
    from cudadent42.remote.core.money import Estimate
    from cudadent42.remote.core.protection import Limit, Terms
    from cudadent42.remote.providers.gce.checks import Prepared


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
    from cudadent42.remote.core.stopping import stop_all

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


def agreed_terms(
    remote: Remote,
    choices: Choices,
    device: str,
    prepared: Prepared | None,
    max_cost: float | None,
    yes: bool,
    as_json: bool,
) -> Terms:
    """What the run may cost and what else it needs, said and agreed on before anything is started.

    ``device`` is ``cpu`` or ``cuda:0``; ``prepared`` is None for a machine at hand. Raises UsageError where a limit
    cannot be held, or something is not agreed on.
    """
    from cudadent42.cost import rates
    from cudadent42.plan import make_plan
    from cudadent42.registry import registry
    from cudadent42.remote.core.consent import agree_to_start
    from cudadent42.remote.core.protection import Terms

    plan = make_plan(choices, device, registry)
    limit = _agreed_limit(remote, plan, rates.load(), prepared, max_cost, yes, as_json)
    consent = consent_of(yes, as_json)
    if prepared is None:
        return Terms(limit, consent=consent)
    from cudadent42.flows.duration import (
        estimate_s,  # PyTorch, for which a run on a machine at hand does not wait
    )

    if not prepared.guarded and not prepared.candidates[0].state.costs:
        agree_to_start(remote, prepared.candidates[0].machine, consent)
    return Terms(limit, estimate_s(plan), consent)


def consent_of(yes: bool, as_json: bool = False) -> Consent:
    """How the user of this command agrees to what costs money."""
    from cudadent42.remote.core.consent import Consent

    return Consent(yes, _answered if _can_answer(as_json) else None)


def _agreed_limit(
    remote: Remote,
    plan: Plan,
    table: Rates,
    prepared: Prepared | None,
    max_cost: float | None,
    yes: bool,
    as_json: bool,
) -> Limit | None:
    """What the run may cost; None for no limit. Raises UsageError."""
    from cudadent42.remote.core import money
    from cudadent42.remote.core.protection import Limit

    name = prepared.candidates[0].machine.rate if prepared else ""
    rate = money.rate_of(name, remote.name, table)
    if rate is None:
        missing = (
            f"no rate {name or remote.name!r} is known, so the cost of {remote.name} cannot be estimated"
        )
        if max_cost is not None:
            raise UsageError(f"--max-cost: {missing}; {money.how_to_add(name or remote.name)}")
        if prepared:
            say(f"{missing}; {money.how_to_add(name)}")
        return None
    estimate = money.estimate(
        plan,
        rate,
        table,
        starting=prepared is not None and not prepared.candidates[0].state.costs,
        own_environment=not remote.python,
    )
    usd = agreed_usd(remote.name, estimate, max_cost, yes, as_json)
    return None if usd is None else Limit(usd, rate)


def agreed_usd(
    name: str, estimate: Estimate, max_cost: float | None, yes: bool, as_json: bool
) -> float | None:
    """Say what a run on ``name`` will cost; what it may, None for anything. Raises UsageError where nobody agrees."""
    from cudadent42.remote.core import money

    say(f"{name}: {estimate.line()}")
    if max_cost is None:
        return None
    return money.allowed_usd(estimate, max_cost, yes, _confirm if _can_answer(as_json) else None)


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
    from cudadent42.remote.core.machines import survey

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
    from cudadent42.remote.providers.sky.cluster import Cluster

    cost = "its rate is not known" if each.usd is None else f"${each.usd:.2f}"
    after = f"; after the run: {each.after}" if each.after else ""
    since = each.start.requested[:16].replace("T", " ")
    lines = [
        each.start.machine,
        f"{each.word}, started {since} UTC: {each.minutes:.0f} min, {cost} at {each.start.rate}{after}",
    ]
    before = how = ""
    if each.state is not None and not each.state.costs:  # one that is off is started for it
        if isinstance(each.machine, Cluster):
            before = f"{each.machine.start_command}; then: "
        else:
            how = " --start"
    lines += [
        f"not brought back: {begun.job}; {before}cudadent42 remote attach {begun.job}{how}"
        for begun in each.jobs
    ]
    lines += [each.problem] if each.problem else []
    return [lines[0], *(f"    {line}" for line in lines[1:])]
