"""``patterns``: the library of lessons."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cudadent42.commands.common import encoded, print_json
from cudadent42.commands.help import App
from cudadent42.commands.options import JsonOption

if TYPE_CHECKING:
    from cudadent42.patterns import PatternEvidence
    from cudadent42.patterns.firings import Firings

patterns_app = App(help="Show the lessons that match a log or a run.")


@patterns_app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the lessons, with how often each has fired here."""
    from cudadent42.patterns import firings, library

    counts = firings.read()
    lessons = library()
    if as_json:
        print_json(
            {"lessons": [{**encoded(lesson), "fired": _fired(lesson.id, counts)} for lesson in lessons]}
        )
        return
    width = max(len(lesson.id) for lesson in lessons)
    for lesson in lessons:
        times = counts.lessons[lesson.id].count if lesson.id in counts.lessons else 0
        print(f"{lesson.id:{width}}  {times:4}x  {lesson.title}")


@patterns_app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="ID", help="Name a lesson; `patterns list` shows them.")],
    as_json: JsonOption = False,
) -> None:
    """Show one lesson in full."""
    from cudadent42.base.errors import UsageError
    from cudadent42.base.toml import did_you_mean
    from cudadent42.patterns import firings, library

    lessons = {lesson.id: lesson for lesson in library()}
    if name not in lessons:
        raise UsageError(
            f"unknown lesson {name!r}; `cudadent42 patterns list` shows all" + did_you_mean(name, lessons)
        )
    lesson, fired = lessons[name], _fired(name, firings.read())
    if as_json:
        print_json({"lesson": lesson, "fired": fired})
        return
    print(lesson.title)
    for label in ("cause", "remedy", "evidence", "cost"):
        print(f"  {label:9} {' '.join(getattr(lesson, label).split())}")
    for line in (text for symptom in lesson.symptom for text in symptom.describe()):
        print(f"  {'symptom':9} {line}")
    print(
        f"  {'fired':9} "
        + (f"{fired['count']} times, last {fired['last']}" if fired else "never on this machine")
    )


@patterns_app.command()
def match(
    source: Annotated[
        str,
        typer.Argument(
            metavar="LOG|FOLDER|-", help="Read a log file, a run or session folder, or - for standard input."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show the lessons that apply to a log or a run. Looking does not count as firing."""
    from cudadent42 import patterns

    matches = patterns.match(_evidence(source))
    if as_json:
        print_json({"matches": matches})
    elif matches:
        patterns.print_matches(matches, sys.stdout, most=len(matches))
    else:
        print("no lesson applies")


@patterns_app.command()
def add(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Take the lesson from this TOML file; `patterns show --json` shows the fields.",
        ),
    ],
    replace: Annotated[bool, typer.Option("--replace", help="Replace a lesson of the same name.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a lesson of your own and keep it in your configuration folder."""
    from cudadent42.patterns.lessons import add as keep

    path = keep(file, replace)
    if as_json:
        print_json({"file": path})
    else:
        print(path)


def _fired(name: str, counts: Firings) -> dict[str, Any] | None:
    return encoded(counts.lessons[name]) if name in counts.lessons else None


def _evidence(source: str) -> PatternEvidence:
    from cudadent42.patterns import evidence

    if source == "-":
        return evidence.of_text(
            sys.stdin.buffer.read(evidence.LOG_BYTES).decode("utf-8", errors="replace"), "stdin"
        )
    from cudadent42.runs.sessions import is_session

    path = Path(source)
    if is_session(path):
        from cudadent42.session.evidence import of_session

        return of_session(path)
    return evidence.of_run(path) if path.is_dir() else evidence.of_file(path)
