"""``compare``: two versions of a kernel against each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.commands.common import choices_of, command_line
from cudadent42.commands.run import carry_out
from cudadent42.options import (
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

if TYPE_CHECKING:
    from cudadent42.plan import Choices

RaceSuiteOption = Annotated[
    str,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="What to measure: race (a few cases that suit the device), or any other suite.",
    ),
]
RepositoryOption = Annotated[
    Path | None,
    typer.Option("--repo", help="A folder in the git repository. Default: the current folder."),
]
EntryOption = Annotated[
    str,
    typer.Option(
        "--implementation",
        metavar="FILE:CALLABLE",
        help="What to take from each version: path/to/file.py:callable. Default: flashmoe_science.",
    ),
]


def compare(
    rev_a: Annotated[
        str, typer.Argument(metavar="REV_A", help="The parent: a git revision, WORKTREE, or ./folder.")
    ],
    rev_b: Annotated[str, typer.Argument(metavar="REV_B", help="The child, likewise.")],
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
    ignore_preflight: IgnoreOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Race two versions of a kernel in one process.

    Both are built and verified, then timed in paired blocks. Above 1×, REV_B is faster.
    """
    from cudadent42 import gates, race

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
    )

    carry_out(partial(race.race, rev_a, rev_b, request), verbose, as_json, with_report=True)


def race_choices(choices: Choices) -> Choices:
    """With the precision and the time of a race where the command line leaves them open.

    Whoever gives a number of blocks, and no precision, wants that number.
    """
    from dataclasses import replace

    from cudadent42.race import DEFAULT_CHOICES

    if choices.precision is None and choices.repeats is None:
        choices = replace(choices, precision=DEFAULT_CHOICES.precision)
    if choices.budget_s is None:
        choices = replace(choices, budget_s=DEFAULT_CHOICES.budget_s)
    return choices
