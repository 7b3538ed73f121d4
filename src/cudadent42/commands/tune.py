"""``tune``: a kernel's configuration chosen from many, in races with a verdict that holds."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.base.journal import in_use
from cudadent42.base.toml import did_you_mean
from cudadent42.commands.common import (
    choices_of,
    console_for,
    encoded,
    print_json,
    print_line,
    share,
    watching,
)
from cudadent42.commands.fleet import engines
from cudadent42.commands.grouped import grouped
from cudadent42.commands.help import HOW, KEPT, WHERE, App, Group
from cudadent42.commands.options import (
    CaseOption,
    DTypeOption,
    FleetOption,
    How,
    JsonOption,
    SeedOption,
    Shown,
    SuiteOption,
    TimerOption,
    What,
    Where,
)
from cudadent42.tune.wanted import Wanted

if TYPE_CHECKING:
    from cudadent42.base.observer import Observer
    from cudadent42.tune.coordinator import Limits
    from cudadent42.tune.opening import Opened, Outlook, Request
    from cudadent42.tune.state import State


class _Tune(Group):
    """``tune SPACE.toml`` is ``tune run SPACE.toml``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((argument for argument in args if not argument.startswith("-")), None)
        if first is not None and first not in self.commands:
            meant = "" if Path(first).exists() else did_you_mean(first, self.commands)
            if meant:
                raise UsageError(f"there is neither a command `tune {first}` nor a space {first}{meant}")
            args = ["run", *args]
        return super().parse_args(ctx, args)


tune_app = App(
    cls=_Tune,
    help="Choose a kernel's configuration from many: prune, race in rungs, confirm, install. "
    "`cudadent42 tune SPACE.toml` begins or goes on.",
)

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Name the tuning's folder.")]


@dataclass(frozen=True)
class Sought:
    """What is tuned, on what."""

    suite: SuiteOption = "default"
    dtype: DTypeOption = None
    case: CaseOption = None


@dataclass(frozen=True)
class Raced:
    """How it is raced."""

    rungs: Annotated[
        str,
        typer.Option(
            "--rungs",
            metavar="BLOCKS",
            rich_help_panel=HOW,
            help="Give a configuration so many blocks by the end of each rung, separated by commas. "
            "Default: 4,12,24,54.",
        ),
    ] = ""
    margin: Annotated[
        str | None,
        typer.Option(
            "--margin",
            metavar="SHARE",
            rich_help_panel=HOW,
            help='Ask of a winner that it gains more than this, such as "1 %". Default: the suite\'s, '
            "else the device's.",
        ),
    ] = None
    search: Annotated[
        Wanted,
        typer.Option(
            "--search",
            metavar="|".join(Wanted),
            rich_help_panel=HOW,
            help="Race every configuration, or those that Optuna proposes. Default: every one of up to 500, "
            "if the budget allows.",
        ),
    ] = Wanted.AUTO
    timer: TimerOption = None
    seed: SeedOption = 0


@dataclass(frozen=True)
class Spent:
    """What it may take."""

    fleet: FleetOption = None
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            rich_help_panel=WHERE,
            help="Let all of it take at most this long, such as 90s, 30m or 2h. The same command goes on with more.",
        ),
    ] = None
    max_cost: Annotated[
        float | None,
        typer.Option(
            "--max-cost",
            metavar="USD",
            min=0.01,
            rich_help_panel=WHERE,
            help="Let it cost at most this, by the rate of this machine, or of each worker of a fleet "
            "(see --rate).",
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            metavar="NAME",
            rich_help_panel=WHERE,
            help="Say by name what an hour of the machine costs. Default: $CUDADENT42_RATE, else local.",
        ),
    ] = None


@tune_app.command("run")
@grouped
def run(
    *,
    space: Annotated[
        Path, typer.Argument(metavar="SPACE", help="Name the space of configurations, a TOML file.")
    ],
    sought: Sought,
    raced: Raced,
    where: Where,
    spent: Spent,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            metavar="FOLDER",
            rich_help_panel=KEPT,
            help="Keep the tuning in this folder. Where it exists, that tuning goes on. Default: "
            "tunings/<space>-<suite>.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", rich_help_panel=KEPT, help="Compile only, and say what would be raced."),
    ] = False,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            metavar="NAME",
            rich_help_panel=KEPT,
            help="With --dry-run: compile for this GPU, such as H200, which need not be here.",
        ),
    ] = "",
    shown: Shown,
) -> None:
    """Begin a tuning, or go on with it.

    Nothing is installed: `tune install` does that.
    """
    from cudadent42.tune.opening import Request, open_tuning

    choices = choices_of(
        What(suite=sought.suite, dtype=sought.dtype, case=sought.case),
        How(timer=raced.timer, seed=raced.seed),
    )
    request = Request(
        space=space,
        choices=choices,
        device=where.device,
        folder=output_dir,
        margin=None if raced.margin is None else _margin(raced.margin),
        rungs=_rungs(raced.rungs),
        ignore_preflight=where.ignore_preflight,
        wanted=raced.search,
        budget_s=None if spent.budget is None else seconds(spent.budget),
    )
    if gpu and not dry_run:
        raise UsageError("--gpu is for --dry-run; to race on a GPU, give --device")
    if dry_run:
        _dry_run(request, gpu, shown)
        return
    limits = _limits(spent)
    with watching(shown.verbose) as watcher:
        opened = open_tuning(request, watcher)
        state = _go_on(
            opened, spent, limits, watcher, ignore_preflight=where.ignore_preflight, suite=sought.suite
        )
    _print(opened.folder, state, shown)


@tune_app.command("resume")
@grouped
def resume(
    *,
    folder: FolderArgument,
    ignore_preflight: Annotated[
        bool, typer.Option("--ignore-preflight", rich_help_panel=WHERE, help="Go on where preflight fails.")
    ] = False,
    spent: Spent,
    shown: Shown,
) -> None:
    """Go on with a tuning, with the options that it was begun with."""
    from cudadent42.tune.opening import reopen

    limits = _limits(spent)
    with watching(shown.verbose) as watcher:
        opened = reopen(folder, watcher, ignore_preflight=ignore_preflight)
        state = _go_on(opened, spent, limits, watcher, ignore_preflight=ignore_preflight)
    _print(folder, state, shown)


@tune_app.command("status")
def status(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Say how far a tuning has come, also while it goes on."""
    state = _state(folder)
    if not as_json and not state.finished and not in_use(folder):
        print_line(
            console_for(stderr=True),
            f"nobody on this machine works on it; `cudadent42 tune resume {shlex.quote(str(folder))}` goes on",
        )
    _print(folder, state, Shown(as_json=as_json))


@tune_app.command("report")
def report(folder: FolderArgument) -> None:
    """Write the tuning's report.html again, as far as it has come."""
    from cudadent42.tune.report.page import write

    print_line(console_for(), f"report: {write(folder)}")


@tune_app.command("stop")
def stop(folder: FolderArgument) -> None:
    """End the process of a tuning after the block that it measures. The same command goes on later."""
    from cudadent42.tune.coordinator import STOP

    if _state(folder).finished:
        print_line(console_for(), f"{folder} is finished: there is nothing to stop")
        return
    (folder / STOP).touch()  # also for a process of another machine, whose lock may not be seen here
    said = (
        f"the tuning in {folder} ends after the block that is being measured"
        if in_use(folder)
        else f"no process on this machine works on {folder}; one on another machine ends after the block that it "
        "measures"
    )
    print_line(console_for(), said)


@tune_app.command("install")
def install(
    folder: FolderArgument,
    package: Annotated[
        bool,
        typer.Option(
            "--package",
            help="Put them into the package's own tables, as its developers do. Default: the user's.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Put the configurations that were confirmed to be faster into the table that calls ask."""
    from cudadent42.tune.installing import install_tuning

    table = install_tuning(folder, package=package)
    if as_json:
        print_json({"table": table.path, "entries": [encoded(entry) for entry in table.entries]})
        return
    console = console_for()
    for entry in table.entries:
        settings = ", ".join(f"{name}={value}" for name, value in entry.settings.items())
        print_line(console, f"{settings}: {entry.ratio:.3f}× ({entry.low:.3f} to {entry.high:.3f})")
    print_line(console, f"table: {table.path}")


@tune_app.command("check")
def check(as_json: JsonOption = False) -> None:
    """Look through the tables of tuned configurations, and say which entries are used."""
    from cudadent42.tune.installing import check as look_through

    entries = look_through()
    if as_json:
        print_json({"entries": [encoded(entry) for entry in entries]})
        return
    console = console_for()
    if not entries:
        print_line(console, "no table of tuned configurations is installed")
    for entry in entries:
        if not entry.kernel:  # of a table that cannot be read, which its problem names
            print_line(console, f"not used: {entry.problem}")
            continue
        word = f"not used: {entry.problem}" if entry.problem else "used"
        print_line(
            console,
            f"{entry.kernel} on {entry.device}: {entry.ratio:.3f}× "
            f"({entry.low:.3f} to {entry.high:.3f}), {word}",
        )


def _state(folder: Path) -> State:
    from cudadent42.tune.journal import read
    from cudadent42.tune.state import fold

    setup, entries = read(folder)
    return fold(setup, entries)


def _limits(spent: Spent) -> Limits:
    """Raises UsageError, before the machine is looked at."""
    from cudadent42.cost import rates
    from cudadent42.tune.coordinator import Limits

    rate = rates.load().get(spent.rate or rates.of_this_machine()).usd_per_hour
    if spent.max_cost is not None and rate <= 0:
        raise UsageError("--max-cost needs to know what the machine costs; name its rate with --rate")
    return Limits(None if spent.budget is None else seconds(spent.budget), spent.max_cost, rate)


def _go_on(
    opened: Opened,
    spent: Spent,
    limits: Limits,
    watcher: Observer,
    *,
    ignore_preflight: bool,
    suite: str = "",
) -> State:
    from cudadent42.tune.flow import go_on, go_on_with

    if spent.fleet is None:
        return go_on(opened, limits, watcher)
    started = engines(spent.fleet, opened.setup.plan.device, ignore_preflight=ignore_preflight, races=True)
    return go_on_with(opened, started, limits, watcher, suite=suite)


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """``90s``, ``30m`` or ``2h``."""
    number, unit = text[:-1], text[-1:]
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 0.0 < value < 1e9:
        raise UsageError(f"--budget {text!r}: expected a time such as 90s, 30m or 2h")
    return value


def _margin(text: str) -> float:
    """As a suite's: with one below 0, what is slower than the default could be installed."""
    value = share(text, "--margin")
    if not 0.0 <= value < 1.0:
        raise UsageError(f"--margin {text!r}: expected a share from 0 to below 1, such as 0.01 or 1 %")
    return value


_MOST_BLOCKS = 100_000


def _rungs(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    parts = text.split(",")
    rungs = tuple(int(part) for part in parts if part.strip().isascii() and part.strip().isdigit())
    rising = all(a < b for a, b in pairwise(rungs))
    if len(rungs) < len(parts) or not rising or rungs[0] < 4 or rungs[-1] > _MOST_BLOCKS:
        raise UsageError(f"--rungs {text!r}: expected rising numbers of blocks from 4 on, such as 4,12,24,54")
    return rungs


def _dry_run(request: Request, gpu: str, shown: Shown) -> None:
    import tempfile

    from cudadent42.tune.opening import preview

    with watching(shown.verbose) as watcher, tempfile.TemporaryDirectory(prefix="cudadent42-") as folder:
        outlook = preview(request, gpu, Path(folder), watcher)
    if shown.as_json:
        print_json(encoded(outlook))
        return
    _print_outlook(outlook)


def _print_outlook(outlook: Outlook) -> None:
    from collections import Counter

    from cudadent42.tune.prune import representatives
    from cudadent42.tune.space import DEFAULT

    console = console_for()
    if outlook.most:
        print_line(console, f"a search would propose up to {outlook.most} configurations, {outlook.why}")
        return
    print_line(console, f"{outlook.arms - 1} configurations beside the default")
    print_line(console, f"every one would be raced, {outlook.why}")
    for case in outlook.cases:
        raced, out = representatives(outlook.compiled, case)
        if DEFAULT in out:
            print_line(
                console, f"{case}: none would be raced, as the default itself cannot be: {out[DEFAULT]}"
            )
            continue
        print_line(console, f"{case}: {len(raced) - 1} would be raced")
        for reason, count in Counter(out.values()).most_common():
            print_line(console, f"    {count} not: {reason}")


def _print(folder: Path, state: State, shown: Shown) -> None:
    from cudadent42.tune.report.view import view_of

    view = view_of(folder, state)
    if shown.as_json:
        print_json(
            {
                "folder": folder,
                "finished": state.finished,
                "paused": state.paused,
                "spent_s": state.spent_s,
                "spent_usd": state.spent_usd,
                "headline": view.headline,
                "cases": [encoded(row) for row in view.cases],
                "winners": [encoded(winner) for winner in state.winners],
            }
        )
    else:
        console = console_for()
        print_line(console, view.headline)
        for row in view.cases:
            figures = f" {row.ratio} ({row.interval})" if row.ratio else ""
            print_line(console, f"  {row.case}: {row.arm}{figures}, {row.outcome}")
            if row.near:
                print_line(console, f"      not separated from: {row.near}")
        print_line(console, view.subline)
        if (folder / "report.html").is_file():
            print_line(console, f"report: {folder / 'report.html'}")
        if state.winners and state.finished and not state.installed:
            print_line(
                console,
                f"`cudadent42 tune install {shlex.quote(str(folder))}` puts what is confirmed into the user's table",
            )
    raise typer.Exit(ExitCode.PASS)
