"""``run`` and ``bench``: everything, with or without a report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import typer

from cudadent42.base.errors import ExitCode
from cudadent42.commands import trace
from cudadent42.commands.common import (
    choices_of,
    console_for,
    fail,
    print_json,
    print_line,
    run_options,
    watching,
)
from cudadent42.commands.fleet import spread
from cudadent42.commands.gate import gates_document, print_gates
from cudadent42.commands.grouped import grouped
from cudadent42.commands.options import Confined, Elsewhere, How, Kept, Shown, What, Where

if TYPE_CHECKING:
    from cudadent42.base.observer import Observer
    from cudadent42.flows.pipeline import Outcome
    from cudadent42.plan import RunOptions
    from cudadent42.runs.run_folder import RunWriter


@grouped
def run(
    what: What,
    how: How,
    where: Where,
    confined: Confined,
    elsewhere: Elsewhere,
    kept: Kept,
    shown: Shown,
) -> None:
    """Do everything and write a report."""
    options = run_options(choices_of(what, how), where, kept, confined)
    if elsewhere.on is not None and elsewhere.fleet is not None:
        fail("--on names one machine, --fleet many; give one of them", ExitCode.USAGE)
    if elsewhere.on is not None:
        from cudadent42.commands.elsewhere import run_there

        run_there(elsewhere.on, elsewhere, options, shown)
    if elsewhere.max_cost is not None or elsewhere.yes:
        fail("--max-cost and --yes are about a run elsewhere; name the machine with --on", ExitCode.USAGE)
    _run(options, shown, elsewhere.fleet)


@grouped
def bench(what: What, how: How, where: Where, confined: Confined, kept: Kept, shown: Shown) -> None:
    """Do everything but the report.

    Verification cannot be left out: what is wrong is not timed.
    """
    _run(run_options(choices_of(what, how), where, kept, confined, with_report=False), shown)


def _run(options: RunOptions, shown: Shown, fleet: str | None = None) -> None:
    from cudadent42.flows import pipeline

    start = partial(pipeline.run, options, execute=spread(fleet, options))
    carry_out(start, shown, options.with_report)


_PRINTING = (
    "cudadent42.commands.tables",
    "cudadent42.stages.report.facts",
    "cudadent42.stages.report.planning",
    "cudadent42.stages.report.script",
)
"""What the outcome is shown with."""

Start = Callable[["Observer", "Callable[[RunWriter], None]"], "Outcome"]
"""Begins a run, given whom to tell how it goes on, and what to call when there is a folder."""


def carry_out(start: Start, shown: Shown, with_report: bool) -> NoReturn:
    """A run from its beginning to the exit code, with what it says on the way."""
    opened: list[RunWriter] = []

    def remember(folder: RunWriter) -> None:
        for name in _PRINTING:  # ahead of any candidate, which may write to files (`flows.groundwork`)
            importlib.import_module(name)
        console_for().measure("\N{CJK UNIFIED IDEOGRAPH-5B57}")  # with its table of how wide letters are
        opened.append(folder)
        trace.current().folders.append(folder.path)

    try:
        with watching(shown.verbose) as watcher:
            outcome = start(watcher, remember)
    except BaseException:
        for folder in opened:
            print(f"{folder.sample_count} samples are kept in {folder.path}", file=sys.stderr)
            if folder.sample_count:
                print("`cudadent42 report` compares what is there", file=sys.stderr)
        raise
    if shown.as_json:
        print_json(
            {
                "folder": outcome.folder,
                "verification_passed": outcome.verify.passed,
                "results": outcome.results,
                **(gates_document(outcome.gates) if outcome.gates else {}),
            }
        )
    else:
        _print_outcome(outcome, shown.verbose, with_report)
    if not outcome.verify.passed:
        fail("verification failed, so not everything was timed; see verify.json", outcome.exit_code)
    if outcome.exit_code is ExitCode.NOTHING_MEASURED:
        fail("nothing was timed; the lines 'not timed' above, and in log.jsonl, say why", outcome.exit_code)
    if outcome.exit_code is ExitCode.UNTRUSTED_RESULT:
        fail(
            "something was found that this result must not rest on; see integrity in results.json",
            outcome.exit_code,
        )
    raise typer.Exit(outcome.exit_code)


def _print_outcome(outcome: Outcome, verbose: bool, with_report: bool) -> None:
    from cudadent42.commands import tables
    from cudadent42.runs.instructions import device_words
    from cudadent42.runs.run_folder import load_manifest
    from cudadent42.stages.report.facts import rivals_line
    from cudadent42.stages.report.planning import planning_lines
    from cudadent42.stages.report.script import prediction_line

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
    manifest = load_manifest(outcome.folder, with_build=False)
    processor = device_words(manifest) if manifest.plan.device == "cpu" else ""
    print_line(console, tables.verdict_line(outcome.results, processor))
    against_others = rivals_line(outcome.results, outcome.results.candidate)
    if against_others:
        print_line(console, against_others)
    if lines := list(planning_lines(outcome.results)):
        console.print(tables.planning_table(outcome.results))
        for line in lines:
            print_line(console, line)
    if outcome.results.prediction is not None and outcome.exit_code is not ExitCode.UNTRUSTED_RESULT:
        print_line(console, prediction_line(outcome.results.prediction))
    if outcome.gates:
        print_gates(outcome.gates)
