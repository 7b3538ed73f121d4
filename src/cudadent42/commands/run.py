"""``run`` and ``bench``: everything, with or without a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cudadent42.commands.common import choices_of, command_line, console_for, fail, print_json, print_line
from cudadent42.errors import ExitCode
from cudadent42.options import (
    CacheStateOption,
    CaseOption,
    DeviceOption,
    DTypeOption,
    IgnoreOption,
    ImplementationsOption,
    JsonOption,
    OutputOption,
    RepeatsOption,
    SaveOption,
    SeedOption,
    SuiteOption,
    TimerOption,
    VerboseOption,
    WarmupOption,
)

if TYPE_CHECKING:
    from cudadent42.pipeline import Outcome
    from cudadent42.plan import Choices
    from cudadent42.runs import RunWriter


def run(
    suite: SuiteOption = "default",
    dtype: DTypeOption = None,
    case: CaseOption = None,
    implementations: ImplementationsOption = None,
    repeats: RepeatsOption = None,
    warmup: WarmupOption = None,
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
    """Do everything and write a report."""
    _run(
        choices_of(suite, dtype, case, implementations, repeats, warmup, seed, timer, l2),
        device,
        output_dir,
        save_csv,
        ignore_preflight,
        verbose,
        as_json,
        with_report=True,
    )


def bench(
    suite: SuiteOption = "default",
    dtype: DTypeOption = None,
    case: CaseOption = None,
    implementations: ImplementationsOption = None,
    repeats: RepeatsOption = None,
    warmup: WarmupOption = None,
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
    """Do everything but the report.

    Verification cannot be left out: what is wrong is not timed.
    """
    _run(
        choices_of(suite, dtype, case, implementations, repeats, warmup, seed, timer, l2),
        device,
        output_dir,
        save_csv,
        ignore_preflight,
        verbose,
        as_json,
        with_report=False,
    )


def _run(
    choices: Choices,
    device: str,
    output: Path | None,
    save_samples: bool,
    ignore_preflight: bool,
    verbose: bool,
    as_json: bool,
    with_report: bool,
) -> None:
    from cudadent42 import pipeline
    from cudadent42.progress import observer

    request = pipeline.Request(
        choices, device, output, command_line(), save_samples, ignore_preflight, with_report
    )
    opened: list[RunWriter] = []
    try:
        with observer(console_for(stderr=True), verbose) as watcher:
            outcome = pipeline.run(request, watcher, opened.append)
    except BaseException:
        for folder in opened:
            print(f"{folder.sample_count} samples are kept in {folder.path}", file=sys.stderr)
            if folder.sample_count:
                print("the report command compares those that there are", file=sys.stderr)
        raise
    if as_json:
        print_json(
            {
                "folder": outcome.folder,
                "verification_passed": outcome.verify.passed,
                "results": outcome.results,
            }
        )
    else:
        _print_outcome(outcome, verbose, with_report)
    if outcome.exit_code is not ExitCode.PASS:
        fail("verification failed, so not all was timed; see verify.json", outcome.exit_code)


def _print_outcome(outcome: Outcome, verbose: bool, with_report: bool) -> None:
    from cudadent42 import tables
    from cudadent42.report.facts import rivals_line

    console = console_for()
    print_line(console, tables.verify_line(outcome.verify))
    if verbose or not outcome.verify.passed:
        console.print(tables.verify_table(outcome.verify, everything=verbose))
    print_line(console, f"run folder: {outcome.folder}")
    if with_report:
        print_line(console, f"report: {outcome.folder / 'report.html'}")
    console.print(tables.results_table(outcome.results, with_control=verbose))
    for line in tables.caution_lines(outcome.results):
        print_line(console, f"caution: {line}")
    print_line(console, tables.verdict_line(outcome.results))
    against_others = rivals_line(outcome.results, outcome.results.candidate)
    if against_others:
        print_line(console, against_others)
