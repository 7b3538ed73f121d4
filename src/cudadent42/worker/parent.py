"""Verifying and timing in a process of their own, so that a candidate can crash or hang without taking the
run along.

One worker serves both stages: importing torch costs seconds. When it dies, what it was doing is recorded as
failed and a new worker goes on after it.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from cudadent42.base.errors import ExitCode, LabError
from cudadent42.base.interpreter import module_command
from cudadent42.base.output import OutputLog
from cudadent42.base.serialise import dumps, loads
from cudadent42.base.shown import message
from cudadent42.model.events import (
    BUILDING,
    LOADING,
    Doing,
    Event,
    StageDone,
    StageFailed,
    from_line,
)
from cudadent42.model.records import Plan
from cudadent42.registry import registry
from cudadent42.sandbox.launch import FOLDER, Sandbox
from cudadent42.worker.branch import Branch, Trunk
from cudadent42.worker.child import DEVICE_LOST_EXIT, NOTE_BYTES, Request
from cudadent42.worker.processes import MARK, end_all

START_TIMEOUT_S = 180.0
"""Longest time until a new worker is at work: importing torch from a cold disk, importing a plug-in."""

TIMEOUT_S = 60.0
"""Longest silence after that, besides what the case's own calls may take. A worker speaks after each check and
each block, notes what it turns to, and speaks every second while a reference is computed; compiling a kernel at
its first call takes up to 30 s."""

BUILD_TIMEOUT_S = 900.0
"""Longest silence while a version's kernels are compiled: the compiler has a limit of its own for each."""

SILENT_CALLS = 10
"""Calls of one implementation between two signs of life, at most: warming up, memory, calibration."""

SLOW_FLOPS_PER_S = {"cpu": 2e9, "cuda": 1e12}
"""What a slow implementation on a slow device reaches; below that it counts as hung. PyTorch's gradients of attention
in bf16 reach 5 to 6e9 on one thread of a CPU with AVX2, and less beside other programs."""

_HUNG_BEFORE = 0.5
"""Share of the usual silence that is left to an implementation that has hung once."""

_MOST_EVENT_BYTES = 64 << 20
"""Of one event. The longest has some kilobytes for each implementation."""

_STAGE_ERRORS = (ExitCode.USAGE, ExitCode.NOT_READY, ExitCode.BUILD_FAILED)
"""That a stage ends with in the worker. Any other was written by a candidate: 0 would let the command pass."""

_MOST_ERROR_LETTERS = 300
"""Of a stage's error: a candidate may have written it."""

_KILL_WAIT_S = 10.0

_KEEPER_WAIT_S = 2.0
"""Longest time that the worker's keeper has for ending all."""

_POLL_S = 0.5
"""Signals (Ctrl-C) are served at least this often."""

OnEvent = Callable[[Event], None]


class LostError(Exception):
    """The worker is gone. The message says how, ``doing`` what it noted last (None if it had not begun)."""

    doing: Doing | None = None


class ForgedError(LostError):
    """Somebody else wrote to its event pipe. ``doing``: whose turn it was when that may have been."""


class HungError(LostError):
    """It said nothing for too long, and was killed."""


class Worker:
    """A worker process, started when first needed and again after it is lost. A context manager.

    ``log_path`` receives what the worker and the candidates print; None discards it. With ``trunk``, a branch is forked
    from each worker before it loads anything of a candidate. ``sandbox`` is what it is confined to, with all that it
    starts; a branch of it would be in there too, so there is none.
    """

    def __init__(
        self,
        log_path: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        trunk: Trunk | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._trunk = trunk if sandbox is None else None
        self._sandbox = sandbox
        self._branch: Branch | None = None
        self._spared: tuple[int, ...] = ()
        self._log_path = log_path
        self._timeout_s = timeout_s
        self._at_work = False
        self._case_limits_s: dict[str, float] = {}
        self._compiling_s: dict[str, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._events = -1
        self._note: IO[bytes] | None = None
        self._log: OutputLog | None = None
        self._mark = ""
        self._hung: set[str] = set()
        self._pending = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Begin the process before there is anything for it to do: it loads what takes seconds."""
        if self._process is None:
            self._start()

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        process, self._process = self._process, None
        if process is not None:
            self._kill(process, self._mark, self._spared)
            if self._sandbox is not None:
                self._sandbox.settle()
            os.close(self._events)
            for file in (self._note, self._log):
                if file is not None:
                    file.close()
            if self._branch is not None:
                self._branch.close()
        self._branch, self._spared = None, ()
        self._pending = b""
        self._at_work = False

    def hand_over_branch(self) -> Branch | None:
        """The running worker's branch, which is the caller's to close from here on; None where there is none."""
        branch, self._branch = self._branch, None
        if branch is not None:
            try:
                self._spared = (branch.pid,)
            except OSError:
                branch.close()
                return None
        return branch

    @property
    def pid(self) -> int | None:
        """Of the process that was started, if it runs: the keeper, whose child the worker is."""
        return self._process.pid if self._process else None

    def run(self, request: Request, on_event: OnEvent) -> None:
        """One request to its end. Raises ``LostError`` when the worker dies or falls silent, and the
        worker's own ``LabError``. Whatever is raised, Ctrl-C included, the process is ended."""
        finished = False
        try:
            self.start()
            if self._note is not None:
                self._note.truncate(0)
            self._case_limits_s = case_limits(request.plan)
            self._compiling_s = {
                name: item.compiling_s
                for name, item in registry(request.plan.operation).items()
                if item.compiling_s
            }
            self._send(dumps(request, indent=None))
            while not finished:
                event = self._next_event()
                if isinstance(event, StageFailed):
                    self._send(secrets.token_hex(16))
                    raise _error(event)
                finished = isinstance(event, StageDone)
                if not finished:
                    on_event(event)
                self._send(secrets.token_hex(16))
        except LostError as error:
            error.doing = error.doing or self.doing()
            if isinstance(error, HungError) and error.doing is not None:
                self._hung.add(error.doing.implementation)
            raise
        finally:
            if not finished:
                self.close()

    def doing(self) -> Doing | None:
        """What the worker noted last."""
        if self._note is None:
            return None
        text = os.pread(self._note.fileno(), NOTE_BYTES, 0).decode(errors="replace").strip()
        try:
            return loads(Doing, text)
        except ValueError:  # nothing noted yet, or read while it is being written
            return None

    def _start(self) -> None:
        read_fd, write_fd = os.pipe()
        self._note = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._log = OutputLog(self._log_path)
        self._mark = uuid.uuid4().hex
        note_fd = self._note.fileno()
        package_root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, MARK: self._mark}
        paths = [package_root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        command = module_command("cudadent42.worker.child", "-X", "faulthandler")
        command += [str(write_fd), str(note_fd)]
        if self._sandbox is None:
            command.append(str(os.getpid()))
        else:
            command = self._sandbox.command(command)
            environment = self._sandbox.environment(environment)
        theirs: socket.socket | None = None
        if self._trunk is not None:
            mine, theirs = socket.socketpair()
            self._branch = Branch(mine, self._mark)
            command += [str(theirs.fileno()), self._trunk.module, self._trunk.argument]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log.file,
            stderr=self._log.file,
            pass_fds=(write_fd, note_fd, *([theirs.fileno()] if theirs is not None else [])),
            env=environment,
            cwd=None if self._sandbox is None else FOLDER,
            start_new_session=True,  # Ctrl-C goes to the parent, which ends the group
        )
        os.close(write_fd)
        if theirs is not None:
            theirs.close()
        os.set_blocking(read_fd, False)
        self._events = read_fd

    def _send(self, line: str) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise LostError("the worker is not running")
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise LostError(self._cause_of_death()) from error

    def _next_event(self) -> Event:
        began_s = time.monotonic()
        doing = self.doing()
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if selector.select(_POLL_S):
                    data = os.read(self._events, 1 << 16)
                    if not data:
                        raise LostError(self._cause_of_death())
                    self._pending += data
                    if len(self._pending) > _MOST_EVENT_BYTES:
                        raise LostError("another process wrote to its event pipe; killed")
                elif (now := self.doing()) != doing:
                    doing = now
                    self._at_work |= now is not None and now.input != LOADING
                    began_s = time.monotonic()
                if self._log is not None:
                    self._log.limit()
                limit_s = self._limit_s(doing)
                if time.monotonic() - began_s > limit_s:
                    raise HungError(f"no sign of life for {limit_s:.0f} s; killed")
        if self._log is not None:
            self._log.limit()
        self._at_work = True
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            return from_line(line.decode(errors="replace"))
        except ValueError as error:
            raise LostError(f"another process wrote to its event pipe ({error}); killed") from error

    def _limit_s(self, doing: Doing | None) -> float:
        """The longest silence while this is being done."""
        if not self._at_work:
            return max(self._timeout_s, START_TIMEOUT_S)
        if doing is not None and doing.input == BUILDING:
            return max(self._timeout_s, BUILD_TIMEOUT_S)
        if doing is None:
            return self._timeout_s
        calls_s = self._case_limits_s.get(doing.case, 0.0)
        silence_s = self._timeout_s * (_HUNG_BEFORE if doing.implementation in self._hung else 1.0)
        return silence_s + calls_s + self._compiling_s.get(doing.implementation, 0.0)

    def _cause_of_death(self) -> str:
        if self._process is None:
            return "the worker is not running"
        try:
            code = self._process.wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            return "closed its event pipe; killed"
        if code == DEVICE_LOST_EXIT:
            return "GPU context lost" + self._last_line()
        if code < 0:
            # Who aborts has mostly said why. A fault has no words, and what was printed before is about other things.
            said = self._last_line() if -code == signal.SIGABRT else ""
            return f"worker died: signal {-code} ({_signal_name(-code)}){said}"
        return f"worker died: exit code {code}" + self._last_line()

    def _last_line(self) -> str:
        line = self._log.last_line() if self._log is not None else ""
        return f": {line}" if line else ""

    @staticmethod
    def _kill(process: subprocess.Popen[bytes], mark: str, spared: Sequence[int]) -> None:
        process.terminate()  # its keeper ends all that came of it
        with suppress(subprocess.TimeoutExpired):  # it was stopped, or died
            process.wait(_KEEPER_WAIT_S)
        end_all(process.pid, mark, runs=process.poll() is None, spared=spared)
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # stuck inside a driver: nothing more can be done from here
            process.wait(_KILL_WAIT_S)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return "real-time"


def case_limits(plan: Plan) -> dict[str, float]:
    """Seconds that the calls of a case may take on a slow machine, by ``Case.id``."""
    rate = SLOW_FLOPS_PER_S[plan.device.partition(":")[0]]
    return {case.id: SILENT_CALLS * case.flops / rate for case in plan.cases}


def _error(event: StageFailed) -> LabError | LostError:
    """What the stage raised, or that no stage raises this."""
    if event.exit_code not in _STAGE_ERRORS:
        return LostError(
            f"another process wrote to its event pipe (no stage fails with exit code {event.exit_code}); killed"
        )
    error = LabError(message(event.message, _MOST_ERROR_LETTERS))
    error.exit_code = ExitCode(event.exit_code)
    return error
