"""What every command runs in: one place for errors, signals and exit codes, without the commands."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, Any, NoReturn, TextIO, cast

import typer

from cudadent42.base.errors import EXPECTED, ExitCode, LabError, in_words
from cudadent42.base.shown import PlainStream, message
from cudadent42.commands import trace
from cudadent42.commands.common import answer_error, fail
from cudadent42.commands.help import App, Group
from cudadent42.version import __version__
from flashmoe_science.errors import BuildError, DeviceError, InputError

# Typer has exceptions of its own, or Click's, by its version: these are the bases of what it makes public.
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickException: Any = typer.BadParameter.__mro__[2]

_USAGE_LETTERS = 1500
"""Of what is wrong with the command line; the usage stands above it."""

BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit code where nobody reads standard output any more (``| head``): the shell's for a program that this ended, since
the others say something of the work."""


class _Group(Group):
    """The commands, with one place for errors, and ``--debug`` allowed after the command's name too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if (
            "--debug" in args and "capture" not in args[: args.index("--debug")]
        ):  # behind it, it may be the script's
            args = ["--debug", *(argument for argument in args if argument != "--debug")]
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            _wrong_usage(error)

    def invoke(self, ctx: Any) -> Any:
        """The one place where a failed command ends, so also where its lessons are printed."""
        with trace.following() as heard:
            try:
                return self._invoke(ctx)
            except typer.Exit as end:
                if end.exit_code not in (ExitCode.PASS, ExitCode.INTERRUPTED, BROKEN_PIPE):
                    trace.teach(heard)
                raise

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, typer.Abort):
            fail("interrupted", ExitCode.INTERRUPTED)
        except _UsageError as error:
            _wrong_usage(error)
        except (typer.Exit, _ClickException):
            raise
        except LabError as error:
            if ctx.params.get("debug"):
                raise
            fail(str(error), error.exit_code)
        except (InputError, DeviceError, BuildError, OSError) as error:
            if isinstance(error, BrokenPipeError) and not _is_read():
                raise typer.Exit(BROKEN_PIPE) from None
            if ctx.params.get("debug"):
                raise
            fail(*in_words(error))
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            fail(_as_defect(error), ExitCode.INTERNAL_ERROR)


_OF_THE_PARSER = (
    (re.compile(r"Value error, "), ""),
    (re.compile(r"Input should be a valid integer[^;]*"), "expected a whole number"),
    (re.compile(r"Input should be a valid number[^;]*"), "expected a number"),
)
"""Words of the library that checks an option's value, and what a reader is told instead."""


def _wrong_usage(error: Any) -> NoReturn:
    """As Click shows it, and as a document where one was asked for."""
    words = error.format_message()
    for pattern, instead in _OF_THE_PARSER:
        words = pattern.sub(instead, words)
    text = message(words, _USAGE_LETTERS)
    shows_help = type(error).show is not _UsageError.show
    (error if shows_help else _UsageError(text, error.ctx)).show()
    answer_error(text, ExitCode.USAGE)
    raise typer.Exit(ExitCode.USAGE)


def _as_defect(error: BaseException) -> str:
    return (
        f"this program has a defect: {type(error).__name__}: {' '.join(str(error).split()) or 'no more is said'}; "
        "--debug shows where. Please report it with the command and what it was given"
    )


def run_program(app: App) -> int:
    """Run a command line; the exit code."""
    code = _run(app)
    try:
        sys.stdout.flush()  # what is left fails here, where it can be told
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it ends
        if isinstance(error, BrokenPipeError):
            return code or BROKEN_PIPE
        print(f"error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return code or ExitCode.USAGE
    return code


def _is_read() -> bool:
    """Whether somebody may read standard output: other pipes than that break too."""
    watch = select.poll()
    try:
        watch.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # it is no file, or closed
        return True
    return not watch.poll(0)


def _run(app: App) -> int:
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × and – is no reason to fail
    sys.stdout, sys.stderr = (cast("TextIO", PlainStream(stream)) for stream in streams)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored
            signal.signal(number, _interrupt)
    # Who ignores it, which is inherited, waits for no child: each is gone, and seems to have ended well.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        app(prog_name="cudadent42")
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.PASS
    except Exception as error:  # noqa: BLE001 - Python's own exit code for these is a failed gate's
        return _with_traceback(error)
    finally:
        sys.stdout, sys.stderr = streams
    return ExitCode.PASS


def _with_traceback(error: Exception) -> ExitCode:
    """What ``--debug`` lets through, and what even the command line's own parts did not expect."""
    if "--debug" not in sys.argv:
        print(f"error: {message(_as_defect(error))}", file=sys.stderr)
        return ExitCode.INTERNAL_ERROR
    traceback.print_exception(error)
    return in_words(error)[1] if isinstance(error, EXPECTED) else ExitCode.INTERNAL_ERROR


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Being told to end (a closed connection, a batch system's limit) is like Ctrl-C: nothing is lost.

    Who closes a terminal sends SIGHUP more than once (the shell, then the kernel). That must not cut off what the first
    interrupt began, such as the end of a machine; only a second Ctrl-C or SIGTERM does.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"cudadent42 {__version__}")
        raise typer.Exit


def make_app() -> App:
    """A command line without commands yet."""
    app = App(
        cls=_Group,
        help="Get from an unknown machine to a number that can be defended: preflight, build, "
        "verify, bench, compare, report.",
    )
    app.callback()(_top)
    return app


def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    return
