"""``profile`` and ``doctor``: where the time of a case goes, and what to try first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.commands.common import choices_of, console_for, print_json, print_line, run_options
from cudadent42.commands.grouped import grouped
from cudadent42.commands.options import (
    CacheStateOption,
    Confined,
    How,
    Kept,
    OutputOption,
    SeedOption,
    Shown,
    SuiteOption,
    What,
    Where,
)

if TYPE_CHECKING:
    from cudadent42.profiles import Diagnosis

FullOption = Annotated[
    bool, typer.Option("--full", help="Read all of Nsight Compute's sections. This takes longer.")
]
CountersOption = Annotated[
    bool,
    typer.Option(
        "--counters/--no-counters",
        help="Read performance counters where that is allowed. This is the default.",
    ),
]


@dataclass(frozen=True)
class Profiled:
    """What is profiled."""

    case: Annotated[
        str,
        typer.Argument(metavar="CASE", help="Profile this case of the suite, given as name or name/dtype."),
    ]
    suite: SuiteOption = "default"
    implementation: Annotated[
        str,
        typer.Option("--implementation", "-i", metavar="NAME", help="Profile this implementation."),
    ] = "cudadent42"


@dataclass(frozen=True)
class Means:
    """By what it is profiled."""

    full: FullOption = False
    counters: CountersOption = True
    ablate: Annotated[
        bool | None,
        typer.Option(
            "--ablate/--no-ablate",
            help="Also time the kernel without exponentials, mask and loads. Default: on a GPU without counters.",
        ),
    ] = None
    kernel: Annotated[
        str,
        typer.Option(
            "--kernel",
            metavar="REGEX",
            help="Profile only those kernels of a call whose name matches.",
        ),
    ] = ""


@grouped
def profile(
    *,
    profiled: Profiled,
    means: Means,
    seed: SeedOption = 0,
    where: Where,
    l2: CacheStateOption = None,
    output_dir: OutputOption = None,
    shown: Shown,
) -> None:
    """Profile one case and name what holds it back.

    It writes a run folder with the profile, Nsight Compute's report, the diagnosis and a report.
    """
    from cudadent42.base.progress import observer
    from cudadent42.flows.profile import ProfileOptions, run
    from cudadent42.model.implementations import OURS

    what = What(suite=profiled.suite, case=[profiled.case], implementations=[profiled.implementation, OURS])
    options = ProfileOptions(
        run=run_options(
            choices_of(what, How(seed=seed, l2=l2)), where, Kept(output_dir=output_dir), Confined()
        ),
        implementation=profiled.implementation,
        full=means.full,
        counters=means.counters,
        ablate=means.ablate,
        kernel=means.kernel,
    )
    with observer(console_for(stderr=True), shown.verbose) as watcher:
        outcome = run(options, watcher)
    _show(outcome.diagnosis, outcome.folder, shown)


@dataclass(frozen=True)
class Examined:
    """What is looked at, and by what."""

    case: Annotated[
        str, typer.Option("--case", metavar="NAME", help="Look at this case. Default: the slowest.")
    ] = ""
    implementation: Annotated[
        str,
        typer.Option(
            "--implementation",
            "-i",
            metavar="NAME",
            help="Look at this implementation. Default: the candidate.",
        ),
    ] = ""
    before: Annotated[
        Path | None,
        typer.Option(
            "--before",
            metavar="FOLDER",
            help="Show a run folder with an earlier profile beside this one.",
        ),
    ] = None
    full: FullOption = False
    counters: CountersOption = True
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Profile if this is the machine of the run. This is the default.",
        ),
    ] = True


@grouped
def doctor(
    *,
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Name a run folder.")],
    examined: Examined,
    shown: Shown,
) -> None:
    """Find what holds a run's slowest case back and what to try next.

    It profiles the case if this is the machine of the run. Elsewhere it judges by what the folder holds, and says so.
    """
    from cudadent42.base.progress import observer
    from cudadent42.flows.doctor import examine
    from cudadent42.profiles.compare import changes, load
    from cudadent42.runs.checking import load_checked
    from cudadent42.stages import report as reports

    # What is wrong with either is said before anything begins.
    load_checked(folder)
    earlier = None if examined.before is None else load(examined.before)
    with observer(console_for(stderr=True), shown.verbose) as watcher:
        watcher.stage("profile")
        diagnosis = examine(
            folder,
            case=examined.case,
            implementation=examined.implementation,
            measure=examined.measure,
            full=examined.full,
            counters=examined.counters,
            observer=watcher,
        )
        watcher.stage("report")
        differences = changes(earlier, load(folder)) if earlier is not None else ()
        reports.write(folder, before=examined.before)
    _show(diagnosis, folder, shown, differences)


def _show(diagnosis: Diagnosis, folder: Path, shown: Shown, changes: tuple[str, ...] = ()) -> None:
    from cudadent42.profiles import text

    if shown.as_json:
        print_json({"folder": folder, "diagnosis": diagnosis, "changes": changes})
        return
    console = console_for()
    for line in text.lines(diagnosis, shown.verbose):
        print_line(console, line)
    for line in changes:
        print_line(console, line)
    print_line(console, f"report: {folder / 'report.html'}")
