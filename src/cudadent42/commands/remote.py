"""``remote``: other machines, and the runs that were started on them. ``run --on`` is here too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from cudadent42.base.errors import ExitCode
from cudadent42.commands.common import fail, print_json, say
from cudadent42.commands.elsewhere import Asked, check, conclude, finish, folder_of, watched
from cudadent42.commands.help import App
from cudadent42.commands.options import JsonOption, YesOption

if TYPE_CHECKING:
    from cudadent42.base.errors import LabError
    from cudadent42.remote.core.hosts import Remote
    from cudadent42.remote.core.job import Workspace
    from cudadent42.remote.core.protection import Terms
    from cudadent42.remote.core.record import JobRecord
    from cudadent42.remote.core.run import Returned
    from cudadent42.remote.providers.gce.checks import Prepared

Agreed = Callable[["Prepared | None", bool], "Terms"]
"""On what terms a run is on a machine that is checked and not started (None for one at hand), with a GPU or without."""

remote_app = App(help="Run on other machines, and end what was started there.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the machine.")]
JobArgument = Annotated[
    str | None, typer.Argument(metavar="JOB", help="The run's name. Default: the last run that is not back.")
]


@remote_app.command()
def add(
    name: NameArgument,
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS",
            help="ssh://[user@]host[:port], or gce://PROJECT/ZONE/INSTANCE of Google Cloud.",
        ),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            "--spec",
            metavar="FILE",
            help="In place of an address: a TOML file of the machine that is made for each run.",
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(
            "--after",
            metavar="POLICY",
            help="What becomes of a cloud machine after a run: stop, keep or keep:MINUTES. One made for the "
            "run is deleted in place of stopped. Default: stop.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate", metavar="NAME", help="The price of a gce:// machine, by name; `cost rates` lists them."
        ),
    ] = None,
    reach: Annotated[
        str | None,
        typer.Option(
            "--reach", metavar="WAY", help="How a gce:// machine is reached: auto, iap or internal."
        ),
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(
            "--results", metavar="gs://BUCKET", help="Where a gce:// machine copies its run folders."
        ),
    ] = None,
    unguarded_start: Annotated[
        bool,
        typer.Option(
            "--unguarded-start",
            help="Agree that until a gce:// machine answers, nothing but this computer would end it.",
        ),
    ] = False,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="The folder there that runs happen in. Default: cudadent42-remote in the home folder.",
        ),
    ] = None,
    python: Annotated[
        str,
        typer.Option(
            "--python",
            metavar="FILE",
            help="A Python there that has torch, which is used as it is. Default: a .venv of our own.",
        ),
    ] = "",
) -> None:
    """Name a machine."""
    from cudadent42.cost import rates
    from cudadent42.remote.core.address import parse
    from cudadent42.remote.core.hosts import config_file, make, save
    from cudadent42.remote.providers.gce.specification import of_file

    if (address is None) == (spec is None):
        fail("expected an address, or a specification with --spec FILE", ExitCode.USAGE)
    target = of_file(spec) if spec is not None else parse(address or "")
    remote = make(
        name,
        target,
        folder=folder,
        python=python,
        after=after,
        rate=rate,
        reach=reach,
        results=results,
        unguarded_start=unguarded_start,
    )
    if remote.rate:
        rates.load().get(remote.rate)
    _warn_of_waiting(remote)
    save(remote)
    print(f"{remote.name} is {remote.address}, kept in {config_file()}")


def _warn_of_waiting(remote: Remote) -> None:
    """Runs that wait to be brought back are looked for at the machine's present address (``record.remote_of``)."""
    from cudadent42.remote.core.hosts import remotes
    from cudadent42.remote.core.record import readable

    before = remotes().get(remote.name)
    if before is None or before.address == remote.address:
        return
    for record in readable()[0]:
        if record.remote == remote.name and record.cloud is None and not record.fetched:
            say(
                f"{record.job} is not back yet; it was started when {remote.name} was {before.address}, and is looked "
                f"for at {remote.address} now"
            )


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
        typer.Argument(metavar="NAME", help="The name of a machine. Default: all that were started."),
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

    if name is None:
        show_machines(as_json)
        return
    workspace = _workspace(get(name))
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

    watchdog.remove(_workspace(get(name)))
    print(f"nothing but you ends the costs of {name} now")


@remote_app.command()
def attach(
    job: JobArgument = None,
    start: Annotated[
        bool, typer.Option("--start", help="Start its cloud machine again where that was stopped meanwhile.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Watch a run elsewhere again, and bring it back."""
    from cudadent42.remote.core.protection import release
    from cudadent42.remote.core.record import find, remote_of
    from cudadent42.remote.core.run import bring_back, workspace_of

    record = find(job)
    if record.fetched:
        print(f"{record.job} is back already, in {record.output}")
        return
    if start and record.cloud is None:
        fail(f"{record.remote} is no machine that --start could start; leave it out", ExitCode.USAGE)
    if record.cloud is not None:
        from cudadent42.commands.machines import consent_of
        from cudadent42.remote.core.protection import Terms
        from cudadent42.remote.providers.gce import runs

        ended = runs.attach(record, start, say, _log(), Terms(consent=consent_of(yes)))
        finish(ended.returned, trouble=ended.trouble)
    remote = remote_of(record)
    if remote.start:
        from cudadent42.remote.providers.sky import run as in_sky

        finish(watched(record.output, lambda: in_sky.attach(remote, record, say, _log())))
    workspace = workspace_of(remote)
    returned = watched(record.output, lambda: bring_back(workspace, record, say, _log()))
    release(workspace, None, say)
    finish(returned)


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
    from cudadent42.remote.core import job as far
    from cudadent42.remote.core.record import find, remote_of, save

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
    workspace = _workspace(remote_of(record), record)
    far.stop(workspace, record.job)
    is_there = far.state(workspace, record.job).state is not far.JobState.NONE
    if not is_there:
        save(replace(record, fetched=True))
    if as_json:
        print_json({"ended": [record.job]})
        return
    if not is_there:
        print(f"{record.remote} knows no run {record.job}; it is not waited for any more")
        return
    print(f"{record.job} is ended; bring back what it measured with: cudadent42 remote attach {record.job}")


def run_there(asked: Asked) -> NoReturn:
    """``run --on NAME``. All that can be checked without the machine is checked first: one that is paid for is started
    only after that."""
    from cudadent42.commands.machines import agreed_terms
    from cudadent42.remote.core.address import SshAddress
    from cudadent42.remote.core.hosts import get

    remote = get(asked.on)
    arguments = check(asked)
    at_hand = isinstance(remote.address, SshAddress)
    begin = _on_machine_at_hand if at_hand else _on_cloud_machine

    def agreed(prepared: Prepared | None, has_gpu: bool) -> Terms:
        on = "cuda:0" if has_gpu and asked.run.device != "cpu" else "cpu"
        return agreed_terms(remote, asked.run.choices, on, prepared, asked.max_cost, asked.yes, asked.as_json)

    returned, trouble = begin(remote, asked, arguments, agreed)
    conclude(asked, returned, trouble)


def _on_machine_at_hand(
    remote: Remote, asked: Asked, arguments: tuple[str, ...], agreed: Agreed
) -> tuple[Returned, None]:
    from cudadent42.remote.core import job as far
    from cudadent42.remote.core.checks import check_kernels
    from cudadent42.remote.core.protection import protect, release
    from cudadent42.remote.core.run import persistently, run_on, workspace_of

    workspace = workspace_of(remote)
    architectures = persistently(lambda: far.architectures(workspace), say)
    terms = agreed(None, bool(architectures))
    if asked.run.device != "cpu":
        check_kernels(asked.run.choices, architectures, say)
    protect(workspace, None, terms, say)
    output = folder_of(asked)
    returned = watched(
        str(output.absolute()), lambda: run_on(workspace, asked.run.device, arguments, output, say, _log())
    )
    release(workspace, None, say)
    return returned, None


def _on_cloud_machine(
    remote: Remote, asked: Asked, arguments: tuple[str, ...], agreed: Agreed
) -> tuple[Returned, LabError | None]:
    from cudadent42.remote.core.checks import check_kernels
    from cudadent42.remote.core.tree import project_root, read_tree
    from cudadent42.remote.providers.gce import runs
    from cudadent42.remote.providers.gce.checks import prepare

    read_tree(project_root())  # that it can be sent
    prepared = prepare(remote, asked.run.device)
    if asked.run.device != "cpu":
        check_kernels(asked.run.choices, prepared.architectures, say)
    terms = agreed(prepared, bool(prepared.accelerator))
    ended = runs.run(prepared, asked.run.device, arguments, folder_of(asked), say, _log(), terms)
    return ended.returned, ended.trouble


def _workspace(remote: Remote, record: JobRecord | None = None) -> Workspace:
    """Where runs happen on a remote; of a cloud machine, the one that ``record``, or the last run there, is on."""
    from cudadent42.remote.core.address import GceAddress, SshAddress
    from cudadent42.remote.core.record import records
    from cudadent42.remote.core.run import workspace_of
    from cudadent42.remote.providers.gce.lease import resume

    if isinstance(remote.address, SshAddress) and (record is None or record.cloud is None):
        return workspace_of(remote)
    on_record = [record] if record else [each for each in records() if each.remote == remote.name]
    clouds = [each.cloud for each in on_record if each.cloud is not None]
    if record is None and isinstance(remote.address, GceAddress):
        # Before, the name may have been another machine's.
        clouds = [cloud for cloud in clouds if cloud.machine == str(remote.address)]
    if not clouds:
        fail(f"no run was started on {remote.name} yet", ExitCode.USAGE)
    return resume(clouds[-1], remote).workspace


def _word(record: JobRecord) -> str:
    if not record.fetched:
        return "not brought back"
    return "lost" if record.exit_code is None else f"exit code {record.exit_code}"


def _log() -> Callable[[bytes], None]:
    from cudadent42.remote.core.terminal import showing

    return showing(sys.stderr)
