"""The ledger: ``ledger rebuild``, ``ledger list`` and ``ledger status``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cudadent42.commands.common import console_for, print_json, print_line
from cudadent42.commands.help import App
from cudadent42.commands.options import JsonOption, LedgerOption, VerboseOption

_REBUILD_THERE = "run `cudadent42 ledger rebuild` on"

ledger_app = App(
    help="Look into the database of all runs and sessions.",
)


@ledger_app.command()
def rebuild(
    roots: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="ROOT",
            help="Read these folders, which hold runs. Default: runs and sessions in the current folder.",
        ),
    ] = None,
    ledger: LedgerOption = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the ledger again from the folders."""
    from cudadent42 import ledger as ledgers
    from cudadent42.base.progress import observer

    with observer(console_for(stderr=True), verbose) as watcher:
        watcher.stage("rebuild")
        done = ledgers.rebuild(
            ledger, roots or (), lambda read, of: watcher.advance(read / of, f"{read} of {of} runs")
        )
    for problem in done.problems:
        print(f"left out: {problem}", file=sys.stderr)
    if done.kept_tables:
        print(
            f"some rows lack what the present form needs; they stay in {', '.join(done.kept_tables)}",
            file=sys.stderr,
        )
    if done.rebuild_on:
        print(
            f"rows of other machines are missing: {_REBUILD_THERE} {', '.join(done.rebuild_on)}",
            file=sys.stderr,
        )
    if as_json:
        print_json({"rebuilt": done})
        return
    if done.moved_aside is not None:
        print(f"the old ledger could not be used; it is now {done.moved_aside}")
    print(
        f"{done.runs} runs with {done.samples} samples and {done.sessions} sessions in {done.seconds:.1f} s; "
        f"{done.forgotten} forgotten whose folders are gone"
    )
    print(f"ledger: {done.ledger}")


@ledger_app.command("list")
def list_runs(
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="Show so many runs, the latest first.")
    ] = 20,
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the latest runs."""
    from cudadent42.ledger import open_for_reading

    opened = open_for_reading(ledger)
    from cudadent42.commands.tables import plain_table
    from cudadent42.ledger import queries

    lines = opened.read(lambda connection: queries.list_runs(connection, limit))
    if as_json:
        print_json({"ledger": opened.name, "runs": lines})
        return
    console = console_for()
    if not lines:
        print_line(console, "the ledger holds no run yet")
        return
    rows = [
        (
            line.started[:19].replace("T", " "),
            line.suite,
            line.machine,
            line.revision or line.status,
            line.verdict or line.status,
            "–" if line.speedup is None else f"{line.speedup:.2f}×",
            "–" if line.ci_low is None else f"{line.ci_low:.2f}–{line.ci_high:.2f}",
            str(line.samples),
        )
        for line in lines
    ]
    words = ("started (UTC)", "suite", "machine", "revision", "verdict")
    console.print(plain_table(words, ("speed-up", "95 % interval", "samples"), rows))


@ledger_app.command()
def status(ledger: LedgerOption = None, as_json: JsonOption = False) -> None:
    """Show where the ledger is, how much it holds and whether it is undamaged."""
    from cudadent42.ledger import open_for_reading

    opened = open_for_reading(ledger)
    from cudadent42.ledger import queries

    opened.check()
    contents = opened.read(queries.contents)
    if as_json:
        print_json({"ledger": opened.name, "contents": contents})
        return
    print(f"ledger: {opened.name}, whole")
    print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in contents.rows.items()))
    print(f"{contents.samples} samples in the run folders")
    if contents.first is not None:
        print(f"runs from {contents.first} to {contents.last}")
    if contents.unfinished_rebuild is not None:
        print(
            f"a rebuild that began {contents.unfinished_rebuild} has not ended: unless it still goes on, run "
            "`cudadent42 ledger rebuild` again"
        )
    if contents.rebuild_on:
        print(f"rows of other machines are missing: {_REBUILD_THERE} {', '.join(contents.rebuild_on)}")
