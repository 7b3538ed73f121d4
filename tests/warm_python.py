"""Python processes for tests that begin as a fork of an interpreter which has imported torch and the lab already.

Importing them is two to three seconds of a processor, for each command and once more for its worker. `WarmPopen` is
`subprocess.Popen` but for ``python -m cudadent42...`` and the scripts of examples, benchmarks and fuzzers. These it has
forked by a server: a process of its own, with the arguments, environment, folder, files and parent that it would have
had, and with the signals of a terminal. Everything else is started as ever, and so is a command whose environment holds
what an interpreter or its libraries read once, at their start.

What starts in a sandbox is forked too: it confines itself as ever, and goes on as what it would have executed. With
``--slow``, and where a test is `fresh`, it is executed. What is forked is brief about its clocks (`brief_timing`).

A command line gets a server of its own, for what it starts in turn, and so do an agent's task and a text. It is forked
before any of these begins, so that nothing of them is in its children.

Linux alone: a forked process becomes a child of the one that asked for it by outliving its parent (prctl(2),
``PR_SET_CHILD_SUBREAPER``).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import itertools
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import warm_programs as programs
from brief_timing import be_brief
from own_revision import ask_once
from quick_kernels import compile_lesser_ones_quickly
from warm_process import (
    MOST_OPEN_FILES,
    forget_the_compiler,
    fork,
    leave_to_the_server,
    run_to_its_end,
    take_files,
    take_huge_pages,
)

AVAILABLE = sys.platform == "linux"

_SERVE = "--serve"
"""In a request: what is forked is a server itself, of processes that import transformers too."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_MOST_REQUEST_BYTES = 1 << 20
_MOST_FILES = 16
_POLL_S = 0.0005
_FEW = 8
"""Processes, for which a server does not take huge pages: that is half a second."""

FreshPopen = subprocess.Popen
_Settings = tuple[tuple[str, str], ...]
_servers: dict[tuple[_Settings, _Settings | None], _Server] = {}
"""By what was read at their start, and by transformers where they have imported it."""
_own_server: _Server | None = None
"""In a command line that was forked: the one for what it starts."""
_path_at_the_start: list[str] = []
"""In a server: where an interpreter without any settings looks for modules."""
_of_workers: set[str] = set()
"""In a server: the modules that a worker has."""
_forgotten: list[types.ModuleType] = []
"""In a worker: the others, which are kept, for to take them apart would copy them."""
_customised = False
"""In a forked process: whether a ``sitecustomize`` has run."""
_threads_at_the_start = 0
"""In a server: how many PyTorch takes where nothing says how many."""


def with_usual_signals() -> None:
    """``preexec_fn`` of a command as a terminal starts it.

    A job in the background of a script has interrupts ignored, one of nohup hang-ups.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`; the lab's own programs are forked."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: Any,
        *rest: Any,
    ) -> None:
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _restore_signals, *more = rest
        gid, gids, uid, umask, start_new_session = more[:5]
        group = more[5] if len(more) > 5 else -1
        environment = dict(os.environ if env is None else env)
        arguments = programs.program(args, cwd)
        server = None
        if (
            arguments is not None
            and executable is None
            and preexec_fn in (None, with_usual_signals)
            and not shell
            and (gid, gids, uid, umask, group) == (None, None, None, -1, -1)
        ):
            of_models = programs.read_by_models(arguments, cwd, environment)
            server = None if "LD_PRELOAD" in environment else _server_for(environment, of_models)
        if server is None or arguments is None:
            super()._execute_child(  # type: ignore[misc]
                *(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags),
                *(shell, *rest),
            )
            return
        files = {0: p2cread, 1: c2pwrite, 2: errwrite}
        files = {number: number if given == -1 else given for number, given in files.items()}
        files.update({number: number for number in pass_fds})
        request = {
            "arguments": arguments,
            "folder": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "environment": environment,
            "new_session": bool(start_new_session),
            "targets": list(files),
        }
        self.pid = server.fork(request, list(files.values()))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _server_for(environment: Mapping[str, str], of_models: _Settings | None) -> _Server | None:
    """None where the program could not be told from one that began afresh only by its speed."""
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    if not AVAILABLE or not programs.finds_this_lab(path):
        return None
    settings = programs.read_at_the_start(environment)
    if _own_server is not None:
        return _own_server if settings == programs.read_at_the_start(os.environ) else None
    if (settings, None) not in _servers:
        _servers[settings, None] = _Server.started(settings, environment)
    if of_models is not None and (settings, of_models) not in _servers:
        _servers[settings, of_models] = _servers[settings, None].forked((*settings, *of_models), environment)
    return _servers[settings, of_models]


def _of_a_server(settings: _Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """No more than that: by a mark in its environment a process counts among those of a worker."""
    common = {name: environment[name] for name in programs.FOR_EVERY_PROGRAM if name in environment}
    return {**common, **dict(settings), "PYTHONPATH": str(programs.SOURCE)}


class _Server:
    """The asking side of a process that forks; it ends with its asker."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._connection = connection
        self._process = process

    @classmethod
    def started(cls, settings: _Settings, environment: Mapping[str, str]) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = FreshPopen(
                [sys.executable, __file__, str(theirs.fileno()), *programs.told_to_a_server()],
                env=_of_a_server(settings, environment),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                preexec_fn=with_usual_signals,
            )
        return cls(ours, process)

    def forked(self, settings: _Settings, environment: Mapping[str, str]) -> _Server:
        """A server that was forked by this one, and has imported what programs of models do."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "arguments": [_SERVE],
            "folder": "/",
            "environment": _of_a_server(settings, environment),
            "new_session": False,
            "targets": [3],
        }
        with theirs:
            self.fork(request, [theirs.fileno()])
        return type(self)(ours)

    def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """The process that was forked, a child of this one."""
        with _taking_in_orphans():
            socket.send_fds(self._connection, [json.dumps(request).encode()], files)
            answer = self._connection.recv(64)
        if not answer:
            raise RuntimeError("the server of warm interpreters has ended; what it printed says why")
        return int(answer)


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _taking_in_orphans() -> Iterator[None]:
    """Processes whose parent ends become children of this one.

    Of one thread at a time: who came second would put back what the first had set. From then on every orphan of a test
    would stay here as a zombie that nobody waits for.
    """
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.c_int()
    with _one_at_a_time:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# ---------------------------------------------------------------- the server


def serve(connection: socket.socket, huge_pages_after: int = -1) -> Callable[[], NoReturn] | None:
    """Forks until the asker is gone. In a process that was forked: what it is to do."""
    for number in itertools.count():
        message, files, _, _ = socket.recv_fds(connection, _MOST_REQUEST_BYTES, _MOST_FILES)
        if not message:
            break
        if number == huge_pages_after:
            take_huge_pages()
        read, write = os.pipe()
        between = fork()
        if between == 0:
            asked_by = os.getpid()
            process = fork()
            if process:
                os.write(write, str(process).encode())
                os._exit(0)
            while os.getppid() == asked_by:  # it is handed on as that one ends
                time.sleep(_POLL_S)
            os.close(read)
            os.close(write)
            return lambda: _begin(json.loads(message), files, connection)
        os.close(write)
        os.waitpid(between, 0)
        connection.send(os.read(read, 64))
        os.close(read)
        for file in files:
            os.close(file)
    return None


def _begin(request: Mapping[str, Any], files: Sequence[int], connection: socket.socket) -> NoReturn:
    """The program, in this process."""
    with_usual_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    forget_the_compiler(request["environment"])
    os.environ.clear()
    os.environ.update(request["environment"])
    connection.close()
    take_files(files, request["targets"])
    _take_threads()
    _set_up(request["arguments"])
    if programs.is_customised(_own_path()):
        _customise()
    arguments = request["arguments"]
    if arguments == [_SERVE]:
        _serve_models()
    if arguments[0] == "-c":
        _serve_this_one()
        run_to_its_end(lambda: _run_text(arguments))
    if arguments[0].endswith(".py"):
        run_to_its_end(lambda: _run_script(arguments))
    module = arguments[arguments.index("-m") + 1]
    if module in programs.START_WORKERS:
        _serve_this_one()
    if module == programs.SANDBOX:
        _go_on_instead_of_executing()
    _run_as_program(arguments)


def _run_as_program(arguments: Sequence[str]) -> NoReturn:
    sys.argv = list(arguments[arguments.index("-m") + 1 :])
    module = sys.argv[0]
    if module == programs.WORKER:
        _forget_what_workers_have_not()
    if module in (*programs.RUN_AS_PROGRAMS, programs.SANDBOX):  # as a program it is a module of its own
        sys.modules.pop(module, None)
    run_to_its_end(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def _go_on_instead_of_executing() -> None:
    """What the sandbox executes begins in this process, which is confined by then: with what execve(2) would leave of
    it, if it is a program of the lab's. Everything else is executed."""
    execute = os.execv
    at_the_start = programs.read_at_the_start(os.environ)

    def go_on(path: str, command: Sequence[str]) -> NoReturn:
        os.execv = execute
        arguments = programs.program(command, os.getcwd())
        if (
            arguments is None
            or "-m" not in arguments
            or programs.read_at_the_start(os.environ) != at_the_start
        ):
            execute(path, command)
        for file in range(3, MOST_OPEN_FILES):
            with contextlib.suppress(OSError):
                if fcntl.fcntl(file, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                    os.close(file)
        _set_up(arguments)
        _run_as_program(arguments)

    os.execv = go_on  # type: ignore[assignment]


def _run_script(arguments: Sequence[str]) -> None:
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def _run_text(arguments: Sequence[str]) -> None:
    sys.argv = ["-c", *arguments[2:]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)


def _take_threads() -> None:
    """PyTorch's, as many as its OpenMP would have read at its start. None is started here."""
    import torch

    wanted = os.environ.get(programs.THREADS, "")
    count = int(wanted) if wanted.isdigit() and int(wanted) else _threads_at_the_start
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


def _set_up(arguments: Sequence[str]) -> None:
    """What an interpreter does at its start."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    for number, name, mode, on_error in (
        (0, "stdin", "rb", errors),
        (1, "stdout", "wb", errors),
        (2, "stderr", "wb", "backslashreplace"),
    ):
        raw = open(number, mode, buffering=0 if unbuffered and number else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw,
            encoding=encoding,
            errors=on_error,
            line_buffering=number == 2 or raw.isatty(),
            write_through=unbuffered and number > 0,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    tempfile.tempdir = None
    safe = "-P" in arguments[: list(arguments).index("-m") if "-m" in arguments else 0]
    here = [] if safe else [""] if arguments[0] == "-c" else [os.getcwd()]
    sys.path[:] = [*here, *_own_path(), *_path_at_the_start]
    sys.orig_argv = [sys.executable, *arguments]
    if list(arguments[:2]) == ["-X", "faulthandler"]:
        import faulthandler

        faulthandler.enable()


def _own_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _customise() -> None:
    """Run ``sitecustomize`` before anything of the lab is imported, as an interpreter that begins does."""
    global _customised
    for name in [
        name for name in sys.modules if name.partition(".")[0] in (programs.COMMAND_LINE, "sitecustomize")
    ]:
        del sys.modules[name]
    importlib.import_module("sitecustomize")
    be_brief()
    _customised = True


def _serve_this_one() -> None:
    global _own_server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if fork() == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):  # a reader of this command's output waits for no server
            os.dup2(null, number)
        os.close(null)
        program = serve(theirs)
        if program is None:
            os._exit(0)
        program()
    theirs.close()
    _own_server = _Server(ours)
    subprocess.Popen = WarmPopen  # type: ignore[misc]


def _serve_models() -> NoReturn:
    """For programs that import transformers, which takes as long as all else."""
    gc.disable()
    for name in programs.OF_MODELS:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    program = serve(socket.socket(fileno=3))
    if program is None:
        os._exit(0)
    program()


def _forget_what_workers_have_not() -> None:
    """A worker looks at every function of the lab's that it has imported, again and again. What a ``sitecustomize``
    has imported it may have changed too: after one the lab is imported anew in any case."""
    if _customised:
        return
    for name in [name for name in sys.modules if name.startswith("cudadent42.") and name not in _of_workers]:
        package, _, last = name.rpartition(".")
        _forgotten.append(sys.modules.pop(name))
        if package in sys.modules and vars(sys.modules[package]).get(last) is _forgotten[-1]:
            delattr(sys.modules[package], last)


def _import_everything() -> None:
    """All that a command or its worker imports sooner or later; an extra is left to what asks for it."""
    import cudadent42

    for name in (*programs.AT_FIRST_USE, *programs.OF_WORKERS):
        importlib.import_module(name)
    _of_workers.update(sys.modules)
    left_out = {*programs.RUN_AS_PROGRAMS, "cudadent42.__main__"}
    modules = pkgutil.walk_packages(cudadent42.__path__, "cudadent42.")
    for name in (*programs.OF_COMMANDS, *(module.name for module in modules)):
        if name not in left_out:
            with contextlib.suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(name)
    _of_workers.update(name for name in sys.modules if name.startswith("cudadent42.operations."))
    importlib.import_module("cudadent42.patterns.lessons").shipped()  # asked for by every command that fails
    _build_command_line()


def _build_command_line() -> None:
    """Each command would make all commands with their options from their signatures again."""
    typer = importlib.import_module("typer.main")
    typer.get_command = functools.cache(typer.get_command)
    typer.get_command(importlib.import_module("cudadent42.commands.cli").app)


def main() -> None:
    global _threads_at_the_start
    connection = socket.socket(fileno=int(sys.argv[1]))
    if programs.EXECUTES in sys.argv:
        programs.execute_in_sandboxes()
    gc.disable()  # of what is imported next to nothing is garbage
    # This file is not among what a program of the lab can import.
    left_out = (programs.SOURCE, Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in left_out]
    sys.path.insert(0, str(programs.SOURCE))
    _import_everything()
    be_brief()
    if programs.COMPILES_QUICKLY in sys.argv:
        compile_lesser_ones_quickly()
    ask_once()()
    _threads_at_the_start = sys.modules["torch"].get_num_threads()
    sys.path.remove(str(programs.SOURCE))
    _path_at_the_start[:] = sys.path
    gc.freeze()  # what is never looked at stays shared; to look for garbage once takes most of a second
    gc.enable()
    leave_to_the_server()
    program = serve(connection, huge_pages_after=_FEW)
    if program is not None:
        program()


if __name__ == "__main__":
    main()
