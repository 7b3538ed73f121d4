"""``session``: a protocol of checkpoints with minutes, gates and a log that survives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cudadent42.base.errors import ExitCode
from cudadent42.commands import trace
from cudadent42.commands.common import command_line, print_json, split, watching
from cudadent42.commands.grouped import grouped
from cudadent42.commands.help import WHAT, App
from cudadent42.commands.options import (
    CaseOption,
    DeviceOption,
    DTypeOption,
    IgnoreOption,
    JsonOption,
    RepeatsOption,
    Shown,
    SuiteOption,
)

if TYPE_CHECKING:
    from cudadent42.runs.run_folder import RunWriter
    from cudadent42.session.desk import Desk
    from cudadent42.session.events import Settings
    from cudadent42.session.folder import Session
    from cudadent42.session.steps import Step

session_app = App(
    help="Follow a protocol: baseline, profile, fix one thing at a time, validate, document.",
)

SessionOption = Annotated[
    str | None,
    typer.Option(
        "--session", metavar="NAME|FOLDER", help="Take this session. Default: the open one, else the last."
    ),
]
BesideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--beside",
        "--implementations",
        metavar="NAME|FILE",
        rich_help_panel=WHAT,
        help="Race further implementations beside the baseline. Repeat the option or separate by "
        "commas. Default: the suite's.",
    ),
]
RaceSuiteOption = Annotated[
    str, typer.Option("--race-suite", metavar="NAME|FILE", help="Race changes on this suite.")
]
ChangedOption = Annotated[
    str,
    typer.Option(
        "--implementation",
        metavar="FILE",
        help="Choose what is changed: path/to/file.py:callable or kernel.toml in the project. "
        "Default: flashmoe_science.",
    ),
]
RateOption = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="NAME",
        help="Say by name what an hour of the machine costs; `cudadent42 cost rates` lists them.",
    ),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        "--budget-minutes",
        metavar="MINUTES",
        help="End the session after this time. Default: the protocol's.",
        min=0.01,
    ),
]
MoneyOption = Annotated[
    float | None,
    typer.Option("--budget-money", metavar="USD", help="End the session at this cost.", min=0.01),
]
OverrideOption = Annotated[
    str,
    typer.Option("--override", metavar="REASON", help="Go on against a rule. The reason is put on record."),
]


@dataclass(frozen=True)
class Subject:
    """What a session is about: what it measures, what is changed, and what it may cost."""

    suite: SuiteOption = "default"
    dtype: DTypeOption = None
    case: CaseOption = None
    beside: BesideOption = None
    repeats: RepeatsOption = None
    device: DeviceOption = "auto"
    race_suite: RaceSuiteOption = "race"
    implementation: ChangedOption = ""
    rate: RateOption = None
    budget_minutes: MinutesOption = None
    budget_money: MoneyOption = None
    ignore_preflight: IgnoreOption = False

    def settings(self) -> Settings:
        """With files named from the project's folder. Raises UsageError."""
        from cudadent42.session.events import Settings

        return Settings(
            suite=_from_project(self.suite),
            race_suite=_from_project(self.race_suite),
            dtypes=split(self.dtype),
            cases=split(self.case),
            implementations=tuple(_from_project(name) for name in split(self.beside)),
            repeats=self.repeats,
            device=self.device,
            entry=_from_project(self.implementation),
            ignore_preflight=self.ignore_preflight,
            rate=self.rate or _default_rate(),
            budget_minutes=self.budget_minutes or 0.0,
            budget_usd=self.budget_money,
        )


@session_app.command()
@grouped
def start(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name the session and its folder.")] = "session",
    protocol: Annotated[
        str,
        typer.Option(
            "--protocol",
            metavar="NAME|FILE",
            help="Follow this protocol: default, or the path of a TOML file.",
        ),
    ] = "default",
    subject: Subject,
    as_json: JsonOption = False,
) -> None:
    """Begin a session in this project."""
    from cudadent42.session import clock, folder, steps

    settings = subject.settings()
    if "/" in protocol or protocol.endswith(".toml"):
        protocol = os.path.abspath(protocol)
    os.chdir(folder.project(Path.cwd()))  # what the settings name lies there, wherever the command was given
    session = steps.start(Path.cwd(), name, protocol, settings, _lab(), clock.now)
    _enter_in_ledger(session)
    if as_json:
        print_json(_document(session))
        return
    print(session.path)
    current = session.state.current
    if current:
        print(f"first: {current.plan.name}. {current.plan.goal} `cudadent42 session run` does it")


@session_app.command()
def status(session: SessionOption = None, as_json: JsonOption = False) -> None:
    """Show where the session stands."""
    chosen = _find(session)
    if as_json:
        print_json(_document(chosen))
        return
    from cudadent42.session.words import status_lines

    for line in status_lines(chosen):
        print(line)


@session_app.command()
@grouped
def run(
    *,
    session: SessionOption = None,
    override: OverrideOption = "",
    revert: Annotated[
        bool, typer.Option("--revert", help="Take back a change that does not pass, without asking.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep a change that does not pass, without asking.")
    ] = False,
    shown: Shown,
) -> None:
    """Do the work of the current checkpoint.

    A checkpoint measures the suite, looks for what limits it, races the source's change against its parent, or
    writes the report.
    """
    from cudadent42.base.errors import UsageError
    from cudadent42.session import steps

    if revert and keep:
        raise UsageError("--revert and --keep exclude each other; give one of them")
    choice = steps.Choice(override, revert, keep)
    _step(session, lambda desk: steps.work(desk, choice, _ask), shown)


@session_app.command("next")
@grouped
def next_(*, session: SessionOption = None, override: OverrideOption = "", shown: Shown) -> None:
    """Check the gate of the current checkpoint and go on to the next.

    The exit code is 1 if a gate fails, and 6 if one cannot be decided from the measurement. The
    output says which, and by how much.
    """
    from cudadent42.session import steps

    _step(session, lambda desk: steps.advance(desk, steps.Choice(override)), shown)


@session_app.command()
def note(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Say what was seen or learnt.")],
    session: SessionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a remark for the report."""
    from cudadent42.session import steps

    _step(session, lambda desk: steps.note(desk, text), Shown(as_json=as_json))


@session_app.command()
def abort(
    session: SessionOption = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="REASON", help="Say why it ends, for the report.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """End the session here. What was measured stays, and so does the source."""
    from cudadent42.session import steps

    _step(session, lambda desk: steps.abort(desk, reason), Shown(as_json=as_json))


@session_app.command()
def unpack(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Name a copy of the session's folder.")],
    into: Annotated[Path, typer.Argument(metavar="NEW", help="Name the folder to make.")],
    as_json: JsonOption = False,
) -> None:
    """Make a repository from a session's folder, to go on elsewhere.

    It has the source as the session last recorded it, and the session.
    """
    from cudadent42.session.unpack import unpack as make

    made = make(_load(folder), into)
    if as_json:
        print_json(_document(made))
    else:
        print(made.path)


@session_app.command()
def report(session: SessionOption = None, as_json: JsonOption = False) -> None:
    """Write the session's report. The session need not have ended."""
    from cudadent42.session import report as reports

    paths = reports.write(_find(session).path)
    if as_json:
        print_json({"html": paths.html, "markdown": paths.markdown})
    else:
        print(paths.html)


def _step(wanted: str | None, step: Callable[[Desk], Step], shown: Shown) -> None:
    """One step of a session, from the lock to the exit code."""
    session = _find(wanted)
    trace.current().sessions.append(session.path)
    with _entered_in_ledger(session), _desk(session, shown.verbose) as desk:
        done = step(desk)
    if shown.as_json:
        print_json(
            {
                "exit_code": done.exit_code,
                "lines": done.lines,
                "run": done.run,
                **_document(_load(session.path)),
            }
        )
    else:
        for line in done.lines:
            print(line)
    if done.exit_code is not ExitCode.PASS:
        raise typer.Exit(done.exit_code)


def _enter_in_ledger(session: Session) -> None:
    from cudadent42 import ledger

    trouble = ledger.record_session(session.path)
    if trouble is not None:
        print(f"warning: {trouble}", file=sys.stderr)


@contextmanager
def _entered_in_ledger(session: Session) -> Iterator[None]:
    """Puts the session into the ledger however the step ends: what was refused cost time too."""
    try:
        yield
    finally:
        _enter_in_ledger(session)


@contextmanager
def _desk(session: Session, verbose: bool) -> Iterator[Desk]:
    from cudadent42.session.clock import now
    from cudadent42.session.desk import at_work
    from cudadent42.session.folder import project
    from cudadent42.session.watch import Watched

    os.chdir(project(session.path))  # what the settings name lies there, wherever the command was given
    with watching(verbose) as watcher:
        watched = Watched(watcher)
        with at_work(session, _lab(), watched, now) as desk:
            watched.check = desk.check_budget
            yield desk


def _lab() -> Any:
    from cudadent42.session.workshop import Lab

    return Lab(command_line(), _opened)


def _opened(folder: RunWriter) -> None:
    trace.current().folders.append(folder.path)


def _ask(question: str) -> bool | None:
    """On a terminal; None where nobody can be asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return bool(typer.confirm(question, default=True, err=True))


def _from_project(name: str) -> str:
    """A file that is named from the current folder, named from the project's; other names as they are."""
    from cudadent42.session.folder import project

    path, colon, function = name.partition(".py:")
    if colon:
        return f"{os.path.relpath(path, project(Path.cwd()))}{colon}{function}"
    if "/" in name or name.endswith(".toml"):
        return os.path.relpath(name, project(Path.cwd()))
    return name


def _default_rate() -> str:
    from cudadent42.cost import rates

    return rates.of_this_machine()


def _find(wanted: str | None) -> Session:
    from cudadent42.session.folder import find, sessions_folder

    return find(sessions_folder(Path.cwd()), wanted)


def _load(path: Path) -> Session:
    from cudadent42.session.folder import load

    return load(path)


def _document(session: Session) -> dict[str, Any]:
    """For agents: what is to be done, what it has cost, what stands in the way."""
    from cudadent42.session.words import status_document

    return status_document(session)
