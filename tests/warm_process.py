"""How a process that was forked by `warm_python` begins and ends, as one that was executed does."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

MOST_OPEN_FILES = 256
_UNWRITTEN_OUTPUT = 120
"""Exit code of an interpreter that could not write what was left of its standard output."""


_MADV_COLLAPSE = 25
_HUGE_BYTES = 2 << 20


def take_huge_pages() -> None:
    """To copy the tables of 300 MB in pages of 4 KiB takes ten milliseconds for each process, and as much at its end.

    Linux before 6.1 has no such advice (madvise(2), ``MADV_COLLAPSE``), and leaves the pages as they are.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line.split() for line in maps]
    for addresses, rights, _, _, inode, *name in lines:
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            for at in range(-(-start // _HUGE_BYTES) * _HUGE_BYTES, end - _HUGE_BYTES + 1, _HUGE_BYTES):
                advise(at, _HUGE_BYTES, _MADV_COLLAPSE)


def leave_to_the_server() -> None:
    """What was made until now is not taken apart at the end of each process that is forked: 300 finalizers of PyTorch's
    take twenty milliseconds."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def fork() -> int:
    """``os.fork`` without its warning of threads: those of OpenBLAS, which looks after them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def forget_the_compiler(environment: Mapping[str, str]) -> None:
    """On a processor with AMX the server has asked its own compiler what it knows."""
    host = sys.modules.get("flashmoe_science.jit.host")
    if host is None:
        return
    if any(os.environ.get(name) != environment.get(name) for name in (host.COMPILER_VARIABLE, "PATH")):
        host.find_compiler.cache_clear()
        host._compiler_takes.cache_clear()


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
