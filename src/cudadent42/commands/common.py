"""What the commands share: printing, JSON, and ending with an error."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from cudadent42.base.shown import message, plain, unfiltered
from cudadent42.commands import trace

if TYPE_CHECKING:
    from rich.console import Console

    from cudadent42.base.observer import Observer
    from cudadent42.commands.options import Confined, How, Kept, What, Where
    from cudadent42.decisions.gates import GateFile
    from cudadent42.plan import Choices, RunOptions

JSON_SCHEMA_VERSION = 1
"""Of what ``--json`` prints."""


def choices_of(what: What, how: How) -> Choices:
    """Raises UsageError."""
    from cudadent42.plan import Choices

    return Choices(
        suite=what.suite,
        dtypes=split(what.dtype),
        cases=split(what.case),
        implementations=split(what.implementations),
        repeats=how.repeats,
        warmup=how.warmup,
        seed=how.seed,
        timer=how.timer,
        cache=how.l2,
        precision=None if how.precision is None else share(how.precision, "--precision"),
        budget_s=how.budget,
    )


def run_options(
    choices: Choices, where: Where, kept: Kept, confined: Confined, *, with_report: bool = True
) -> RunOptions:
    """What a command asks of a run. Raises UsageError where its gates are not understood."""
    from cudadent42.plan import RunOptions

    checked(confined)

    return RunOptions(
        choices=choices,
        device=where.device,
        ignore_preflight=where.ignore_preflight,
        gate=None if kept.gate is None else _gates(kept.gate),
        output=kept.output_dir,
        save_samples=kept.save_csv,
        with_report=with_report,
        sealed=kept.sealed,
        untrusted=confined.untrusted,
        accepted_missing=tuple(confined.accept_missing or ()),
        command=command_line(),
    )


def checked(confined: Confined) -> Confined:
    """Raises UsageError where something of a sandbox is said, and none is asked for."""
    from cudadent42.base.errors import UsageError

    if confined.accept_missing and not confined.untrusted:
        raise UsageError("--accept-missing is about a sandbox; give --untrusted with it")
    return confined


def _gates(name: str) -> GateFile:
    from cudadent42.stages import gates  # NumPy, for which a run that is not judged does not wait

    return gates.load(name)


def share(text: str, option: str) -> float:
    """``0.005`` or ``0.5 %`` as a number."""
    from cudadent42.base.errors import UsageError

    number, percent, rest = text.partition("%")
    try:
        value = float(number)
    except ValueError:
        rest = "not a number"
    if rest.strip():
        raise UsageError(f"{option} {text!r}: expected a number, such as 0.005 or 0.5 %")
    return value / 100 if percent else value


_COMMA = re.compile(r",(?![^\[\]]*\])")
"""One that does not stand in brackets, where it separates what a variant sets."""


def split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for value in values or () for part in _COMMA.split(value) if part.strip())


def command_line() -> tuple[str, ...]:
    return ("cudadent42", *sys.argv[1:])


def console_for(stderr: bool = False) -> Console:
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            """Rich would end the program with exit code 1, which is a failed gate's."""
            raise BrokenPipeError

        def render(self, renderable: Any, options: Any = None) -> Any:
            """Rich's own control codes stay; what it shows has none."""
            for segment in super().render(renderable, options):
                text = segment.text if segment.control else plain(segment.text)
                yield segment if text == segment.text else segment._replace(text=text)

    file = unfiltered(sys.stderr if stderr else sys.stdout)
    console = Piped(file=file)
    # A log has no width of its own; the default of 80 would fold the tables.
    return console if console.is_terminal or "COLUMNS" in os.environ else Piped(file=file, width=140)


def say(text: str) -> None:
    """A line of progress, on standard error. A terminal that was closed keeps nothing from being done."""
    with suppress(OSError):
        print(message(text), file=sys.stderr, flush=True)


def print_line(console: Console, text: str) -> None:
    """Text as it is: paths are neither wrapped nor read as markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def encoded(record: object) -> dict[str, Any]:
    from cudadent42.base.serialise import encode

    encoded: dict[str, Any] = encode(record)
    return encoded


def print_json(document: dict[str, Any]) -> None:
    from cudadent42.base.serialise import encode

    trace.current().answered = True
    print(json.dumps(encode({"schema_version": JSON_SCHEMA_VERSION, **document}), indent=2, allow_nan=False))


@contextmanager
def watching(verbose: bool) -> Iterator[Observer]:
    """Shows on standard error how far the work is, and remembers what it said for the lessons of a failure."""
    from cudadent42.base.progress import observer

    with observer(console_for(stderr=True), verbose) as watcher:
        yield trace.Heard(watcher)


def fail(text: str, code: int) -> NoReturn:
    """End with an error: a message on standard error, and a document where one was asked for and none was printed."""
    trace.current().lines.extend(text.splitlines())
    text = message(text)
    say(f"error: {text}")
    answer_error(text, code)
    raise typer.Exit(code)


def answer_error(text: str, code: int) -> None:
    """With ``--json``, standard output is one document, whatever came of the command."""
    given = sys.argv[1:]
    options = given[: given.index("--")] if "--" in given else given
    if "--json" in options and not trace.current().answered:
        print_json({"error": {"message": text, "exit_code": int(code)}})
