"""``compare`` and ``bisect``: versions of a kernel against each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.commands.common import choices_of, command_line, console_for, encoded, print_json
from cudadent42.commands.help import KEPT, WHAT
from cudadent42.commands.options import (
    BudgetOption,
    CacheStateOption,
    CaseOption,
    DeviceOption,
    DTypeOption,
    GateOption,
    IgnoreOption,
    JsonOption,
    OutputOption,
    PrecisionOption,
    RepeatsOption,
    SaveOption,
    SeedOption,
    TimerOption,
    VerboseOption,
    WarmupOption,
)
from cudadent42.commands.run import carry_out

if TYPE_CHECKING:
    from cudadent42.flows.race.bisect import BisectResult
    from cudadent42.plan import Choices

RaceSuiteOption = Annotated[
    str,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        rich_help_panel=WHAT,
        help="The suite: race (a few cases that suit the device), or any other suite.",
    ),
]
RepositoryOption = Annotated[
    Path | None,
    typer.Option(
        "--repo",
        metavar="FOLDER",
        rich_help_panel=WHAT,
        help="A folder in the git repository. Default: the current folder.",
    ),
]
EntryOption = Annotated[
    str,
    typer.Option(
        "--implementation",
        metavar="FILE",
        rich_help_panel=WHAT,
        help="What is taken from each version: path/to/file.py:callable or kernel.toml. Default: flashmoe_science.",
    ),
]


def compare(
    rev_a: Annotated[
        str, typer.Argument(metavar="REV_A", help="The parent: a git revision, WORKTREE, or ./folder.")
    ],
    rev_b: Annotated[
        str, typer.Argument(metavar="REV_B", help="The child: a git revision, WORKTREE, or ./folder.")
    ],
    suite: RaceSuiteOption = "race",
    dtype: DTypeOption = None,
    case: CaseOption = None,
    implementation: EntryOption = "",
    repository: RepositoryOption = None,
    gate: GateOption = None,
    repeats: RepeatsOption = None,
    warmup: WarmupOption = None,
    precision: PrecisionOption = None,
    budget: BudgetOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    timer: TimerOption = None,
    l2: CacheStateOption = None,
    output_dir: OutputOption = None,
    save_csv: SaveOption = True,
    with_report: Annotated[
        bool,
        typer.Option(
            "--report/--no-report", rich_help_panel=KEPT, help="Write report.html. This is the default."
        ),
    ] = True,
    ignore_preflight: IgnoreOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Race two versions of a kernel in one process.

    Both are built and verified, then timed in paired blocks. Above 1×, REV_B is faster.
    """
    from cudadent42.flows import race
    from cudadent42.stages import gates

    request = race.RaceRequest(
        choices=race_choices(
            choices_of(suite, dtype, case, None, repeats, warmup, seed, timer, l2, precision, budget)
        ),
        device=device,
        output=output_dir,
        command=command_line(),
        repository=repository,
        entry=implementation,
        gate=gates.load(gate) if gate else None,
        save_samples=save_csv,
        ignore_preflight=ignore_preflight,
        with_report=with_report,
    )
    carry_out(partial(race.race, rev_a, rev_b, request), verbose, as_json, with_report)


def race_choices(choices: Choices) -> Choices:
    """With the precision and the time of a race where the command line leaves them open.

    Whoever gives a number of blocks, and no precision, wants that number.
    """
    from dataclasses import replace

    from cudadent42.flows.race import DEFAULT_CHOICES

    if choices.precision is None and choices.repeats is None:
        choices = replace(choices, precision=DEFAULT_CHOICES.precision)
    if choices.budget_s is None:
        choices = replace(choices, budget_s=DEFAULT_CHOICES.budget_s)
    return choices


def bisect(
    good: Annotated[str, typer.Option("--good", metavar="REV", help="A commit at which it was fast.")],
    bad: Annotated[str, typer.Option("--bad", metavar="REV", help="A later commit at which it was slow.")],
    gate: Annotated[
        str,
        typer.Option(
            "--gate",
            metavar="NAME|FILE",
            rich_help_panel=KEPT,
            help="The gates that a commit must pass in a race against --good.",
        ),
    ] = "default",
    suite: RaceSuiteOption = "race",
    dtype: DTypeOption = None,
    case: CaseOption = None,
    implementation: EntryOption = "",
    repository: RepositoryOption = None,
    repeats: RepeatsOption = None,
    warmup: WarmupOption = None,
    precision: PrecisionOption = None,
    budget: BudgetOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    timer: TimerOption = None,
    l2: CacheStateOption = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            metavar="FOLDER",
            rich_help_panel=KEPT,
            help="The folder of the bisection. Where it exists, that bisection goes on. Default: bisects/<good>-<bad>.",
        ),
    ] = None,
    ignore_preflight: IgnoreOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the commit that made it slower.

    git chooses the commits; each is raced against the good one. What cannot be built or decided is skipped.
    """
    from cudadent42.base.progress import observer
    from cudadent42.flows import race
    from cudadent42.flows.race.bisect import bisect as search
    from cudadent42.stages import gates

    request = race.RaceRequest(
        choices=race_choices(
            choices_of(suite, dtype, case, None, repeats, warmup, seed, timer, l2, precision, budget)
        ),
        device=device,
        output=output_dir,
        command=command_line(),
        repository=repository,
        entry=implementation,
        gate=gates.load(gate),
        ignore_preflight=ignore_preflight,
    )
    with observer(console_for(stderr=True), verbose) as watcher:
        result = search(good, bad, request, watcher)
    if as_json:
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
