"""The command line: arguments and printing. What the commands do is elsewhere, and imported when they run."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from cudadent42 import __version__
from cudadent42.errors import ExitCode, LabError
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
from cudadent42.records import CacheState, TimerKind
from flashmoe_science.errors import BuildError, DeviceError, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from cudadent42.pipeline import Outcome
    from cudadent42.plan import Choices
    from cudadent42.runs import RunWriter

JSON_SCHEMA_VERSION = 1
"""Of what ``--json`` prints."""


class _Group(TyperGroup):
    """The commands, with one place for errors, and ``--debug`` allowed after the command's name too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--debug" in args:
            args = ["--debug", *(argument for argument in args if argument != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _fail("interrupted", ExitCode.INTERRUPTED)
        except LabError as error:
            if ctx.params.get("debug"):
                raise
            _fail(str(error), error.exit_code)
        except (InputError, DeviceError, BuildError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            _fail(*_in_words(error))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="From an unknown machine to a number that can be defended: "
    "preflight, build, verify, bench, compare, report.",
)
cache_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The compiled kernels that are kept."
)
app.add_typer(cache_app, name="cache")


def _in_words(error: InputError | DeviceError | BuildError | OSError) -> tuple[str, ExitCode]:
    """An error of the kernels or of the operating system, in one line, and the exit code of its kind."""
    if isinstance(error, OSError):
        return (f"{error.filename}: " if error.filename else "") + (
            error.strerror or str(error)
        ), ExitCode.USAGE
    if isinstance(error, DeviceError):
        return str(error), ExitCode.NOT_READY
    return str(error), ExitCode.BUILD_FAILED if isinstance(error, BuildError) else ExitCode.USAGE


def main() -> int:
    """Run the command line; the exit code."""
    code = _main()
    try:
        sys.stdout.flush()  # what is left fails here, where it can be told
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it ends
        print(f"error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return code or ExitCode.USAGE
    return code


def _main() -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × and – is no reason to fail
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored
            signal.signal(number, _interrupt)
    try:
        app(prog_name="cudadent42")
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.PASS
    return ExitCode.PASS


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Being told to end (a closed connection, a batch system's limit) is like Ctrl-C: nothing is lost."""
    raise KeyboardInterrupt


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"cudadent42 {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    return


# ---------------------------------------------------------------- the main job


@app.command()
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
        _choices(suite, dtype, case, implementations, repeats, warmup, seed, timer, l2),
        device,
        output_dir,
        save_csv,
        ignore_preflight,
        verbose,
        as_json,
        with_report=True,
    )


@app.command()
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
        _choices(suite, dtype, case, implementations, repeats, warmup, seed, timer, l2),
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
        choices, device, output, _command(), save_samples, ignore_preflight, with_report
    )
    opened: list[RunWriter] = []
    try:
        with observer(_console(stderr=True), verbose) as watcher:
            outcome = pipeline.run(request, watcher, opened.append)
    except BaseException:
        for folder in opened:
            print(f"{folder.sample_count} samples are kept in {folder.path}", file=sys.stderr)
            if folder.sample_count:
                print("the report command compares those that there are", file=sys.stderr)
        raise
    if as_json:
        _print_json(
            {
                "folder": outcome.folder,
                "verification_passed": outcome.verify.passed,
                "results": outcome.results,
            }
        )
    else:
        _print_outcome(outcome, verbose, with_report)
    if outcome.exit_code is not ExitCode.PASS:
        _fail("verification failed, so not all was timed; see verify.json", outcome.exit_code)


def _print_outcome(outcome: Outcome, verbose: bool, with_report: bool) -> None:
    from cudadent42 import tables

    console = _console()
    _print(console, tables.verify_line(outcome.verify))
    if verbose or not outcome.verify.passed:
        console.print(tables.verify_table(outcome.verify, everything=verbose))
    _print(console, f"run folder: {outcome.folder}")
    if with_report:
        _print(console, f"report: {outcome.folder / 'report.html'}")
    console.print(tables.results_table(outcome.results, with_control=verbose))
    for line in tables.caution_lines(outcome.results):
        _print(console, f"caution: {line}")
    _print(console, tables.verdict_line(outcome.results))


# ---------------------------------------------------------------- the stages


@app.command()
def preflight(
    device: DeviceOption = "auto",
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Mend what safely can be: the cache, packages in the project's .venv."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that this machine is ready.

    Each failure comes with its cause and the command that mends it.
    """
    from cudadent42.preflight import command

    code = command.main(device, fix, as_json)
    raise typer.Exit(code)


@app.command()
def build(
    device: DeviceOption = "auto",
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            metavar="NAMES",
            help="CUDA architectures, such as sm_90a, by commas; none need be present.",
        ),
    ] = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compile the kernels, show what they need.

    For this machine, or with --arch for CUDA architectures that are not present.
    """
    from cudadent42 import tables
    from cudadent42.build import build as build_kernels
    from cudadent42.build import choose_device
    from cudadent42.progress import observer

    target = choose_device(device, offline=bool(arch))
    with observer(_console(stderr=True), verbose) as watcher:
        watcher.stage("build")
        report = build_kernels(
            target, _split(arch), lambda done, total, what: watcher.advance(done / total, what)
        )
    if as_json:
        _print_json({"passed": report.passed, **_encoded(report)})
    else:
        console = _console()
        for title, table in tables.build_tables(report):
            _print(console, title)
            console.print(table)
        for line in tables.recipe_lines(report) if verbose else ():
            _print(console, line)
        for failure in report.failures:
            _print(console, f"{failure.kernel} for {failure.architecture} failed: {failure.message}")
            _print(console, failure.log)
        _print(console, tables.build_line(report))
    if not report.passed:
        raise typer.Exit(ExitCode.BUILD_FAILED)


@app.command()
def verify(
    suite: SuiteOption = "default",
    dtype: DTypeOption = None,
    case: CaseOption = None,
    implementations: ImplementationsOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    ignore_preflight: IgnoreOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check results against float64.

    Every case of the suite, and adversarial inputs.
    """
    from cudadent42 import pipeline, tables
    from cudadent42.progress import observer

    choices = _choices(suite, dtype, case, implementations, None, None, seed, None, None)
    request = pipeline.Request(choices, device, None, _command(), ignore_preflight=ignore_preflight)
    with observer(_console(stderr=True), verbose) as watcher:
        report = pipeline.verify_only(request, watcher)
    if as_json:
        _print_json({"passed": report.passed, **_encoded(report)})
    else:
        console = _console()
        if verbose or not report.passed:
            console.print(tables.verify_table(report, everything=verbose))
        _print(console, tables.verify_line(report))
    if not report.passed:
        raise typer.Exit(ExitCode.VERIFICATION_FAILED)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run folder again."""
    from cudadent42 import report as reports

    paths = reports.write(folder)
    if as_json:
        _print_json(_encoded(paths))
    else:
        print(paths.html)


# ---------------------------------------------------------------- what there is


@app.command()
def suites(as_json: JsonOption = False) -> None:
    """List the suites that come along."""
    from cudadent42.suites.loader import builtin_suites, load_suite

    found = [load_suite(name) for name in builtin_suites()]
    if as_json:
        _print_json({"suites": found})
        return
    for suite in found:
        print(f"{suite.name:10}{suite.description}; {suite.repeats} repeats")
        print(f"{'':10}cases: {', '.join(shape.name for shape in suite.shapes)}")


@app.command()
def implementations(
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """List what can be raced here."""
    from cudadent42.build import choose_device
    from cudadent42.implementations import registry, why_not

    device = choose_device(device, offline=False)
    rows = [(item.name, item.description, why_not(item, device)) for item in registry().values()]
    if as_json:
        names = ("name", "description", "unavailable")
        _print_json({"implementations": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    for name, description, reason in rows:
        print(f"{name:18}{description}" + (f" (not here: {reason})" if reason else ""))


@cache_app.command("list")
def cache_list(as_json: JsonOption = False) -> None:
    """Show the compiled kernels."""
    from cudadent42 import tables
    from cudadent42.build import open_cache

    cache = open_cache()
    entries = cache.entries()
    if as_json:
        _print_json({"directory": cache.directory, "entries": entries})
        return
    console = _console()
    if entries:
        console.print(tables.cache_table(entries))
    size = sum(entry.artifact_bytes for entry in entries)
    _print(console, f"{len(entries)} kernels, {size / 1e6:.1f} MB in {cache.directory}")


@cache_app.command("clear")
def cache_clear(as_json: JsonOption = False) -> None:
    """Remove the compiled kernels."""
    from cudadent42.build import open_cache

    cache = open_cache()
    cleared = cache.clear()
    if as_json:
        _print_json({"directory": cache.directory, **_encoded(cleared)})
    else:
        print(f"removed {cleared.entries} kernels, {cleared.bytes / 1e6:.1f} MB, from {cache.directory}")


# ---------------------------------------------------------------- helpers


def _choices(
    suite: str,
    dtype: list[str] | None,
    case: list[str] | None,
    implementations: list[str] | None,
    repeats: int | None,
    warmup: int | None,
    seed: int,
    timer: TimerKind | None,
    cache: CacheState | None,
) -> Choices:
    from cudadent42.plan import Choices

    return Choices(
        suite=suite,
        dtypes=_split(dtype),
        cases=_split(case),
        implementations=_split(implementations),
        repeats=repeats,
        warmup=warmup,
        seed=seed,
        timer=timer,
        cache=cache,
    )


def _split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for value in values or () for part in value.split(",") if part.strip())


def _command() -> tuple[str, ...]:
    return ("cudadent42", *sys.argv[1:])


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    # A log has no width of its own; the default of 80 would fold the tables.
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(stderr=stderr, width=140)


def _print(console: Console, text: str) -> None:
    """Text as it is: paths are neither wrapped nor read as markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _encoded(record: object) -> dict[str, Any]:
    from cudadent42.serialise import encode

    encoded: dict[str, Any] = encode(record)
    return encoded


def _print_json(document: dict[str, Any]) -> None:
    from cudadent42.serialise import encode

    print(json.dumps(encode({"schema_version": JSON_SCHEMA_VERSION, **document}), indent=2, allow_nan=False))


def _fail(message: str, code: ExitCode) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)
