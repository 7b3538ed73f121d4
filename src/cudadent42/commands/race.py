"""``compare`` and ``bisect``: versions of a kernel against each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.commands.common import (
    choices_of,
    console_for,
    encoded,
    print_json,
    run_options,
)
from cudadent42.commands.fleet import spread
from cudadent42.commands.grouped import grouped
from cudadent42.commands.help import KEPT, WHAT
from cudadent42.commands.options import (
    CaseOption,
    Confined,
    DTypeOption,
    Fleet,
    How,
    Kept,
    Shown,
    What,
    Where,
)
from cudadent42.commands.run import carry_out

if TYPE_CHECKING:
    from cudadent42.flows.race import RaceOptions
    from cudadent42.flows.race.bisect import BisectResult

RaceSuiteOption = Annotated[
    str,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        rich_help_panel=WHAT,
        help="Take this suite: race (a few cases that suit the device), or any other suite.",
    ),
]
RepositoryOption = Annotated[
    Path | None,
    typer.Option(
        "--repo",
        metavar="FOLDER",
        rich_help_panel=WHAT,
        help="Name a folder in the git repository. Default: the current folder.",
    ),
]
EntryOption = Annotated[
    str,
    typer.Option(
        "--implementation",
        metavar="FILE",
        rich_help_panel=WHAT,
        help="Choose what is taken from each version: path/to/file.py:callable, kernel.toml, or a "
        "variant of our kernels such as 'cudadent42[portable]'. Default: flashmoe_science, "
        "with its own choice of kernels.",
    ),
]


@dataclass(frozen=True)
class Raced:
    """What is raced: two versions of one thing."""

    suite: RaceSuiteOption = "race"
    dtype: DTypeOption = None
    case: CaseOption = None
    implementation: EntryOption = ""
    repository: RepositoryOption = None


@grouped
def compare(
    *,
    rev_a: Annotated[
        str, typer.Argument(metavar="REV_A", help="Name the parent: a git revision, WORKTREE, or ./folder.")
    ],
    rev_b: Annotated[
        str, typer.Argument(metavar="REV_B", help="Name the child: a git revision, WORKTREE, or ./folder.")
    ],
    raced: Raced,
    how: How,
    where: Where,
    confined: Confined,
    spread_over: Fleet,
    kept: Kept,
    with_report: Annotated[
        bool,
        typer.Option(
            "--report/--no-report", rich_help_panel=KEPT, help="Write report.html. This is the default."
        ),
    ] = True,
    shown: Shown,
) -> None:
    """Race two versions of a kernel in one process.

    Both are built and verified, then timed in paired blocks. Above 1×, REV_B is faster.
    """
    from cudadent42.flows import race

    options = _race_options(raced, how, where, kept, confined, with_report)
    start = partial(race.race, rev_a, rev_b, options, execute=spread(spread_over.fleet, options.run))
    carry_out(start, shown, with_report)


def _race_options(
    raced: Raced, how: How, where: Where, kept: Kept, confined: Confined, with_report: bool = True
) -> RaceOptions:
    from cudadent42.flows.race import RaceOptions, with_defaults

    choices = choices_of(What(suite=raced.suite, dtype=raced.dtype, case=raced.case), how)
    return RaceOptions(
        run=run_options(with_defaults(choices), where, kept, confined, with_report=with_report),
        repository=raced.repository,
        entry=raced.implementation,
    )


@grouped
def bisect(
    *,
    good: Annotated[str, typer.Option("--good", metavar="REV", help="Name a commit at which it was fast.")],
    bad: Annotated[
        str, typer.Option("--bad", metavar="REV", help="Name a later commit at which it was slow.")
    ],
    gate: Annotated[
        str,
        typer.Option(
            "--gate",
            metavar="NAME|FILE",
            rich_help_panel=KEPT,
            help="Hold each commit against these gates, in a race against --good.",
        ),
    ] = "default",
    raced: Raced,
    how: How,
    where: Where,
    confined: Confined,
    spread_over: Fleet,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            metavar="FOLDER",
            rich_help_panel=KEPT,
            help="Keep the bisection in this folder. Where it exists, that bisection goes on. Default:"
            " bisects/<good>-<bad>.",
        ),
    ] = None,
    shown: Shown,
) -> None:
    """Find the commit that made it slower.

    git chooses the commits; each is raced against the good one. What cannot be built or decided is skipped.
    """
    from cudadent42.base.progress import observer
    from cudadent42.flows.race.bisect import bisect as search

    options = _race_options(raced, how, where, Kept(gate=gate, output_dir=output_dir), confined)
    with observer(console_for(stderr=True), shown.verbose) as watcher:
        result = search(good, bad, options, watcher, spread(spread_over.fleet, options.run))
    if shown.as_json:
        print_json({"outcome": result.ending, **encoded(result)})
    else:
        _print_bisection(result)
    raise typer.Exit(result.exit_code)


def _print_bisection(result: BisectResult) -> None:
    from cudadent42.flows.race.bisect import Ending, Role
    from cudadent42.flows.race.history import Mark

    for step in result.steps:
        print(f"{step.mark.value:5} {step.commit[:8]} {step.role.value:12} {step.run}  {step.reason}")
    confirmations = [step for step in result.steps if step.role is Role.CONFIRMATION]
    if result.ending is Ending.FOUND:
        print(f"first bad commit: {result.commit} {result.subject}")
        for step in confirmations:
            word = "confirmed" if step.mark is Mark.BAD else "not decided"
            print(f"{word} against its parent: {step.reason}; {result.folder / step.run}")
    elif result.ending is Ending.NOT_CONFIRMED:
        print(f"not confirmed: {result.commit} {result.subject}")
        for step in confirmations:
            print(f"it passes against its own parent: {step.reason}; {result.folder / step.run}")
        print(
            "a judgement was wrong, or the slowdown came in small steps; "
            "race the neighbours of that commit with --precision"
        )
    elif result.ending is Ending.ONLY_SKIPPED:
        print("the first bad commit is one of these, which could not all be judged:")
        for commit in result.possible:
            print(f"  {commit}")
    elif result.ending is Ending.NO_DIFFERENCE:
        print("nothing to find: the bad commit passes the gates in a race against the good one")
    else:
        why = result.steps[-1].reason if result.steps else "nothing was raced"
        print(f"undecided: the race of the two ends gave no answer: {why}")
        print("the measurement could not tell; give a longer --budget, or take a quieter machine")
    print(f"folder: {result.folder}")
