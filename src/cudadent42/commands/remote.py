"""``remote``: other machines, and the runs that were started on them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.base.errors import ExitCode
from cudadent42.commands.common import fail, print_json, say
from cudadent42.commands.grouped import grouped
from cudadent42.commands.help import App
from cudadent42.commands.options import JsonOption, YesOption

if TYPE_CHECKING:
    from cudadent42.remote.core.record import JobRecord

remote_app = App(help="Run on other machines, and end what was started there.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name the machine.")]
JobArgument = Annotated[
    str | None, typer.Argument(metavar="JOB", help="Name the run. Default: the last run that is not back.")
]


@dataclass(frozen=True)
class Kept:
    """What is kept of a machine beside its name and address."""

    after: Annotated[
        str | None,
        typer.Option(
            "--after",
            metavar="POLICY",
            help="Say what becomes of a cloud machine after a run: stop, keep or keep:MINUTES. One "
            "made for the run is deleted in place of stopped. Default: stop.",
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate", metavar="NAME", help="Name the price of a gce:// machine; `cost rates` lists them."
        ),
    ] = None
    reach: Annotated[
        str | None,
        typer.Option(
            "--reach", metavar="WAY", help="Reach a gce:// machine in this way: auto, iap or internal."
        ),
    ] = None
    results: Annotated[
        str | None,
        typer.Option(
            "--results",
            metavar="gs://BUCKET",
            help="Also copy the run folders of a gce:// machine to this bucket.",
        ),
    ] = None
    unguarded_start: Annotated[
        bool,
        typer.Option(
            "--unguarded-start",
            help="Agree that until a gce:// machine answers, nothing but this computer would end it.",
        ),
    ] = False
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="Run in this folder there. Default: cudadent42-remote in the home folder.",
        ),
    ] = None
    python: Annotated[
        str,
        typer.Option(
            "--python",
            metavar="FILE",
            help="Use a Python there that has torch, as it is. Default: a .venv of our own.",
        ),
    ] = ""


@remote_app.command()
@grouped
def add(
    *,
    name: NameArgument,
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS",
            help="Give ssh://[user@]host[:port], or gce://PROJECT/ZONE/INSTANCE of Google Cloud.",
        ),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            "--spec",
            metavar="FILE",
            help="In place of an address: make a machine for each run, by this TOML file.",
        ),
    ] = None,
    kept: Kept,
) -> None:
    """Name a machine."""
    from cudadent42.cost import rates
    from cudadent42.remote.core.address import parse
    from cudadent42.remote.core.hosts import config_file, make, save
    from cudadent42.remote.core.record import moved_from
    from cudadent42.remote.providers import specified

    if (address is None) == (spec is None):
        wrong = "neither an address nor a specification is given" if spec is None else "both are given"
        fail(f"{wrong}; expected an address, or a specification with --spec FILE", ExitCode.USAGE)
    workspace = specified(spec) if spec is not None else parse(address or "")
    remote = make(name, workspace, **vars(kept))
    if remote.rate:
        rates.load().get(remote.rate)
    for line in moved_from(remote):
        say(line)
    save(remote)
    print(f"{remote.name} is {remote.address}, kept in {config_file()}")


@remote_app.command("list")
def list_remotes(as_json: JsonOption = False) -> None:
    """Show the machines that have a name."""
    from cudadent42.remote.core.hosts import remotes

    registered = remotes()
    if as_json:
        rows = [
            {
                "name": item.name,
                "address": str(item.address),
                "folder": item.folder,
                "python": item.python,
                "after": str(item.after),
                "rate": item.rate,
                "reach": item.reach.value,
                "results": item.results,
                "unguarded_start": item.unguarded_start,
            }
            for item in registered.values()
        ]
        print_json({"remotes": rows})
        return
    for remote in registered.values():
        print(f"{remote.name:16}{remote.address}")
    if not registered:
        print("no machine has a name yet; give one with: cudadent42 remote add NAME ADDRESS")


@remote_app.command()
def remove(name: NameArgument) -> None:
    """Forget a machine. Nothing there is changed."""
    from cudadent42.remote.core import hosts

    hosts.remove(name)


@remote_app.command()
def jobs(as_json: JsonOption = False) -> None:
    """Show the runs that were started elsewhere from here."""
    from cudadent42.remote.core.record import records

    all_records = records()
    if as_json:
        print_json({"jobs": all_records})
        return
    for record in all_records:
        print(f"{record.job}  {record.remote:16}{_word(record):24}{record.output}")
    if not all_records:
        print("no run was started elsewhere from here")


@remote_app.command()
def status(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name a machine. Default: all that were started."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what runs on a machine.

    Without a name, show every machine that was started from here, whether it is on, and what it has cost.
    """
    from cudadent42.commands.machines import show_machines
    from cudadent42.remote.core import job as far
    from cudadent42.remote.core import watchdog
    from cudadent42.remote.core.hosts import get
    from cudadent42.remote.providers import provider_of

    if name is None:
        show_machines(as_json)
        return
    remote = get(name)
    workspace = provider_of(remote).reach(remote)
    states, watch = far.jobs(workspace), watchdog.report(workspace)
    if as_json:
        print_json({"remote": name, "jobs": states, "watchdog": watch})
        return
    print("\n".join(f"{job}  {state.state.value}" for job, state in states.items()) or "nothing runs there")
    if watch is not None:
        print(watch.line())


@remote_app.command()
def unwatch(name: NameArgument) -> None:
    """Remove the watchdog from a machine."""
    from cudadent42.remote.core import watchdog
    from cudadent42.remote.core.hosts import get
    from cudadent42.remote.providers import provider_of

    remote = get(name)
    watchdog.remove(provider_of(remote).reach(remote))
    print(f"nothing but you ends the costs of {name} now")


@remote_app.command()
def attach(
    job: JobArgument = None,
    start: Annotated[
        bool, typer.Option("--start", help="Start its cloud machine again if that was stopped meanwhile.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Watch a run elsewhere again, and bring it back."""
    from cudadent42.commands.elsewhere import finish
    from cudadent42.commands.machines import consent_of
    from cudadent42.remote.core.protection import Terms
    from cudadent42.remote.core.record import find
    from cudadent42.remote.core.terminal import showing
    from cudadent42.remote.flows import pipeline

    record = find(job)
    if record.fetched:
        print(f"{record.job} is back already, in {record.output}")
        return
    terms = Terms(consent=consent_of(yes))
    finish(pipeline.attach(record, terms, say, showing(sys.stderr), start=start))


@remote_app.command()
def stop(
    job: JobArgument = None,
    everything: Annotated[
        bool, typer.Option("--all", help="End every run and every cloud machine that was started from here.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """End a run elsewhere. What it measured can still be brought back with attach."""
    from cudadent42.commands.machines import stop_everything
    from cudadent42.remote.core.record import find
    from cudadent42.remote.flows.stopping import stop_run

    if everything:
        if job is not None:
            fail("expected a run or --all, not both", ExitCode.USAGE)
        stop_everything(as_json)
    record = find(job)
    if record.fetched:
        if as_json:
            print_json({"ended": []})
        else:
            print(
                f"{record.job} has ended and is not waited for any more; {_word(record)}, in {record.output}"
            )
        return
    is_there = stop_run(record)
    if as_json:
        print_json({"ended": [record.job]})
        return
    if not is_there:
        print(f"{record.remote} knows no run {record.job}; it is not waited for any more")
        return
    print(f"{record.job} is ended; bring back what it measured with: cudadent42 remote attach {record.job}")


def _word(record: JobRecord) -> str:
    if not record.fetched:
        return "not brought back"
    return "lost" if record.exit_code is None else f"exit code {record.exit_code}"
