"""How a process that was forked by `warm_python` begins and ends, as one that was executed does."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

MOST_OPEN_FILES = 256
_UNWRITTEN_OUTPUT = 120
"""Exit code of an interpreter that could not write what was left of its standard output."""


def run_to_its_end(program: Callable[[], object]) -> NoReturn:
    try:
        program()
    except BaseException as error:  # noqa: BLE001 - as an interpreter ends
        _end(_exit_code(error))
    _end(0)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 1


def _end(code: int) -> NoReturn:
    """As an interpreter does, but that it takes nothing apart: modules that were shared until now would be copied."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:
        code = _UNWRITTEN_OUTPUT
    os._exit(code & 0xFF)


def take_files(files: Sequence[int], targets: Sequence[int]) -> None:
    """The files under the numbers that they are to have, and no others."""
    least = max(*targets, *files) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, least) for file in files]
    for file, target in zip(moved, targets, strict=True):
        os.dup2(file, target)
    begin = 3
    for target in sorted(number for number in targets if number > 2):
        os.closerange(begin, target)
        begin = target + 1
    os.closerange(begin, least + len(files) + MOST_OPEN_FILES)
