"""``history``: a case over time and revisions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.commands.common import console_for, print_json, print_line
from cudadent42.commands.options import JsonOption, LedgerOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from cudadent42.model.history import Track


def history(
    case: Annotated[
        str | None,
        typer.Argument(
            metavar="CASE",
            help="Show this case, given as name or name/dtype. Without it, the cases on record are listed.",
        ),
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Option(
            "--implementation",
            metavar="NAME",
            help="Show the speed-up of this implementation. Default: the candidate of each run.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write a picture into this .html or .svg file."),
    ] = None,
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a case's speed-up over time and revisions.

    Changes of the machine are marked; what cannot be compared is kept apart.
    """
    from cudadent42.base.errors import UsageError
    from cudadent42.base.toml import did_you_mean
    from cudadent42.ledger import open_for_reading
    from cudadent42.model.history import tracks

    if output is not None and output.suffix not in (".html", ".svg"):
        raise UsageError(f"--output {output}: expected a name that ends in .html or .svg")
    opened = open_for_reading(ledger)
    from cudadent42.ledger import queries  # needs what opening has asked for

    cases = opened.read(queries.known_cases)
    if case is None:
        _list(cases, as_json)
        return
    name, _, dtype = case.partition("/")
    points = opened.read(lambda connection: queries.history(connection, name, dtype or None, implementation))
    if not points:
        names = [each for each, _ in cases]
        of = f" of {implementation}" if implementation else ""
        raise UsageError(
            f"the ledger has no comparison of the case {case!r}{of}; it has {', '.join(names) or 'none'}"
            + did_you_mean(name, names)
        )
    case_tracks = tracks(points)
    drawn = len(case_tracks) if output is None else _plot(output, case_tracks, case)
    if as_json:
        document = [
            {"title": t.title, "points": list(t.points), "machine_changes": list(t.changes)}
            for t in case_tracks
        ]
        print_json({"case": case, "tracks": document, "plot": output})
    else:
        _show(case_tracks, output, drawn)


def _list(cases: Sequence[tuple[str, int]], as_json: bool) -> None:
    """The cases on record, and how many runs have each."""
    if as_json:
        print_json({"cases": [{"name": name, "runs": count} for name, count in cases]})
        return
    if not cases:
        print_line(console_for(), "the ledger has no comparison of a case yet; `cudadent42 run` makes one")
    for name, count in cases:
        print(f"{name:24}{count} {'run' if count == 1 else 'runs'}")


def _show(case_tracks: list[Track], output: Path | None, drawn: int) -> None:
    """A table of each track, and where the picture of so many is."""
    console = console_for()
    for track in case_tracks:
        print_line(console, track.title)
        console.print(_table(track))
    if output is not None:
        print_line(console, f"plot: {output}")
    if drawn < len(case_tracks):
        print_line(
            console, f"drawn are the {drawn} longest of {len(case_tracks)} tracks; name an --implementation"
        )


def _plot(output: Path, case_tracks: list[Track], case: str) -> int:
    """Write the picture; how many tracks are in it."""
    from cudadent42.stages.report.figures.history import MOST_PANELS, history
    from cudadent42.stages.report.history import page

    drawn = page(case_tracks, case) if output.suffix == ".html" else history(case_tracks[:MOST_PANELS], case)
    output.write_text(drawn, encoding="utf-8", errors="replace")
    return min(len(case_tracks), MOST_PANELS)


def _table(track: Track) -> Table:
    from cudadent42.commands.tables import plain_table

    rows = [
        (
            point.started[:19].replace("T", " "),
            point.revision,
            f"now {point.machine}" if number in track.changes else point.machine,
            point.verdict,
            f"{point.speedup:.3f}×",
            f"{point.ci_low:.3f}–{point.ci_high:.3f}",
        )
        for number, point in enumerate(track.points)
    ]
    return plain_table(
        ("started (UTC)", "revision", "machine", "verdict"), ("speed-up", "95 % interval"), rows
    )
