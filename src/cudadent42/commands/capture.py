"""``capture``: what a script asks of attention and experts, as a suite."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.commands.common import console_for, fail, print_json, print_line, say
from cudadent42.commands.options import JsonOption

if TYPE_CHECKING:
    from cudadent42.recording.suite import Written

_SHOWN = 12
"""Kinds of calls that the terminal lists."""


def capture(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT",
            help="Run this script with its arguments. Everything behind the script belongs to it; -m "
            "MODULE is a script too.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write the suite into this file. Further suites, where they are needed, are written "
            "beside it.",
        ),
    ] = Path("captured.toml"),
    runs: Annotated[
        int,
        typer.Option("--runs", metavar="N", min=1, max=100, help="Run and record the script so often."),
    ] = 1,
    cases: Annotated[
        int,
        typer.Option("--cases", metavar="N", min=1, max=1000, help="Put at most so many cases into a suite."),
    ] = 24,
    replay: Annotated[
        list[Path] | None,
        typer.Option(
            "--replay",
            metavar="RUN",
            help="Check the prediction of this run folder: the script is run with the kernels and without. Repeat the "
            "option for all suites of the recording.",
        ),
    ] = None,
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", min=1, max=1000, help="With --replay: run so many pairs.")
    ] = 5,
    as_json: JsonOption = False,
) -> None:
    """Record a script's calls of attention and experts as a suite.

    `cudadent42 run --suite captured.toml` then predicts what the whole script would gain. The exit code is that of the
    script.
    """
    if replay:
        _replay(command, replay, pairs, as_json)
        return
    _record(command, output, runs, cases, as_json)


def _record(command: list[str], output: Path, runs: int, cases: int, as_json: bool) -> NoReturn:
    from cudadent42.recording import launch
    from cudadent42.recording.suite import Source, recording_id, suites, write

    _check(command, output)
    recordings = []
    code = 0
    for number in range(runs):
        if runs > 1:
            say(f"run {number + 1} of {runs}")
        ended = launch.run(launch.RECORD, command, quiet_output=as_json)
        code = code or ended.exit_code
        if ended.recording is not None:
            recordings.append(ended.recording)
        if code:
            break
    if not recordings:
        fail(
            "the script left no recording: it was killed, or ended by os._exit; nothing is written",
            ExitCode.NOTHING_MEASURED if code == 0 else code,
        )
    written = suites(recordings, Source(tuple(command), recording_id()), output.stem, most_cases=cases)
    paths = write(written, output.parent)
    if as_json:
        print_json(
            {
                "suites": paths,
                "exit_code": code,
                "seconds": written.seconds,
                "calls": written.parts,
                "notes": written.notes,
            }
        )
    else:
        _print(written, paths, code)
    raise typer.Exit(code)


def _check(command: list[str], output: Path) -> None:
    if output.suffix != ".toml":
        raise UsageError(f"--output {output}: expected a name that ends in .toml")
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}; make it first")
    if command[0] == "-m":
        if len(command) == 1:
            raise UsageError("-m: expected the name of a module")
    elif not Path(command[0]).is_file():
        raise UsageError(f"there is no script {command[0]}; expected the path of a Python file, or -m MODULE")


def _print(written: Written, paths: list[Path], code: int) -> None:
    """On standard error, as standard output is the script's."""
    from cudadent42.model import text

    console = console_for(stderr=True)
    total = fmean(written.seconds)
    if code:
        print_line(console, f"the script ended with exit code {code}; what it did until then is recorded")
    calls = sum(part.calls for part in written.parts)
    share = sum(part.mean_seconds for part in written.parts) / total
    print_line(
        console,
        f"{text.plural(calls, 'call')} of attention and experts: {text.percent(share)} of {text.seconds(total)}",
    )
    for part in written.parts[:_SHOWN]:
        fate = f"stays: {part.reason}" if part.reason else "ours already" if part.ours else "raced"
        fate += ", with its backward pass" if part.operation.endswith("_training_step") else ""
        print_line(
            console,
            f"  {text.percent(part.mean_seconds / total):>8} {part.calls:>9,} × {part.what} {part.dtype}: {fate}",
        )
    if len(written.parts) > _SHOWN:
        print_line(console, f"  and {len(written.parts) - _SHOWN} more")
    for note in written.notes:
        print_line(console, note)
    for path in paths:
        print_line(console, f"suite: {path}; next: cudadent42 run --suite {path}")
    if not paths:
        print_line(console, "none of these calls can be raced, so there is no suite")


def _replay(command: list[str], folders: list[Path], pairs: int, as_json: bool) -> None:
    from cudadent42.recording import launch
    from cudadent42.recording.replay import prediction_of, replay
    from cudadent42.runs.checking import load_checked
    from cudadent42.runs.replays import write_replay
    from cudadent42.stages import report
    from cudadent42.stages.report.script import prediction_line, replay_line

    _check(command, Path("captured.toml"))
    prediction = prediction_of([load_checked(folder) for folder in folders], command)
    say(prediction_line(prediction))
    outcome = replay(
        prediction,
        lambda mode: launch.run(mode, command, quiet_output=as_json),
        pairs,
        tell=say,
    )
    for folder in folders:
        write_replay(folder, outcome)
        report.write(folder)
    if as_json:
        agrees = outcome.inside if outcome.has_interval else None
        print_json({"replay": outcome, "error": outcome.error, "agrees": agrees})
    else:
        print_line(console_for(stderr=True), replay_line(outcome))
