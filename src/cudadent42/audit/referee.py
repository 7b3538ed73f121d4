"""The parent's side of an audit: it starts the contestants, gives one its turn while the others are stopped, and keeps
the clock."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from cudadent42.audit.messages import Answer, Ask
from cudadent42.audit.nursery import fork
from cudadent42.base.serialise import dumps, loads
from cudadent42.sandbox.launch import FOLDER, Sandbox
from cudadent42.timing.processor_time import descendants, process_ns
from cudadent42.worker.branch import Branch
from cudadent42.worker.processes import MARK

START_TIMEOUT_S = 180.0
"""Longest time until the nursery has imported PyTorch from a cold disk."""

TIMEOUT_S = 120.0
"""Longest time that one request may take: compiling a kernel takes up to 30 s."""

_KILL_WAIT_S = 10.0

_MOST_ANSWER_BYTES = 1 << 22


class AuditLostError(Exception):
    """A contestant died, hung or answered what is no answer."""


@dataclass(frozen=True)
class Turn:
    """What the requests of a turn took."""

    answers: tuple[Answer, ...]
    wall_ms: float
    """By this process's clock, from the first timed request to the last answer."""
    processor_ms: float
    """That the contestant and all below it were running, in all of the turn; 0 where it was not asked for."""


class Party:
    """One contestant, stopped except for its turns."""

    def __init__(self, pid: int, requests: int, answers: int) -> None:
        self.pid = pid
        self._requests = requests
        self._answers = answers
        self._pending = b""

    def take_turn(
        self, *asks: Ask, untimed: int = 0, by_processor: bool = False, timeout_s: float = TIMEOUT_S
    ) -> Turn:
        """One request after another, each when the one before is answered. The clock leaves the first ``untimed`` out.

        ``by_processor``: whether processor time is asked for, which reads all of /proc. Raises AuditLostError.
        """
        lines = [(dumps(ask, indent=None) + "\n").encode() for ask in asks]
        replies: list[str] = []
        self._signal(signal.SIGCONT)
        ran_ns = self.ran_ns() if by_processor else 0
        for number, line in enumerate(lines):
            if number <= untimed:
                began_ns = time.perf_counter_ns()
            self._send(line)
            replies.append(self._reply(timeout_s))
        wall_ns = time.perf_counter_ns() - began_ns
        self._signal(signal.SIGSTOP)
        ran_ns = self.ran_ns() - ran_ns if by_processor else 0
        try:
            answers = tuple(loads(Answer, reply) for reply in replies)
        except ValueError as error:
            raise AuditLostError(f"its process answered nonsense ({error})") from error
        return Turn(answers, wall_ns / 1e6, ran_ns / 1e6)

    def _send(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except BrokenPipeError as error:
            raise AuditLostError("its process died") from error

    def _reply(self, timeout_s: float) -> str:
        stop = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, stop - time.monotonic())):
                    raise AuditLostError(f"no answer for {timeout_s:.0f} s")
                data = os.read(self._answers, 1 << 16)
                if not data or len(self._pending) > _MOST_ANSWER_BYTES:
                    raise AuditLostError("its process died")
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        """To all that it has started too."""
        for process in (self.pid, *descendants(str(self.pid))):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)

    def ran_ns(self) -> int:
        """Nanoseconds that it and all below it were running."""
        return sum(map(process_ns, (self.pid, *descendants(str(self.pid)))))

    def close(self) -> None:
        os.close(self._requests)
        os.close(self._answers)


class Referee:
    """A context manager: at its end every process of the audit is gone.

    ``nursery``: a worker's branch, which is closed too; None starts one. ``sandbox`` is what each contestant is
    confined to, apart from the other; no branch of a worker can do that.
    """

    def __init__(
        self, log: Path, operation: str, nursery: Branch | None = None, sandbox: Sandbox | None = None
    ) -> None:
        assert nursery is None or sandbox is None
        self._sandbox = sandbox
        self._log_path = log
        self._operation = operation
        self._nursery = nursery
        self._parties: list[Party] = []
        self._resources = ExitStack()

    def __enter__(self) -> Referee:
        with ExitStack() as resources:
            self._log = resources.enter_context(self._log_path.open("ab"))
            nursery = self._nursery or self._start_nursery(resources)
            self._requests = resources.enter_context(nursery).requests
            self._requests.settimeout(START_TIMEOUT_S)
            self._nursery_pid = nursery.pid
            self._ran_before_ns = process_ns(nursery.pid) if self._nursery is not None else 0
            self._resources = resources.pop_all()
        return self

    def _start_nursery(self, resources: ExitStack) -> Branch:
        mine, theirs = socket.socketpair()
        mark = uuid.uuid4().hex
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, MARK: mark}
        paths = [root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        command = [sys.executable, "-m", "cudadent42.audit.nursery"]
        command += [str(theirs.fileno()), str(os.getpid()), self._operation]
        if self._sandbox is not None:
            command.append(self._sandbox.policy.to_json())
            environment = self._sandbox.environment(environment)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(theirs.fileno(),),
            env=environment,
            cwd=None if self._sandbox is None else FOLDER,
            start_new_session=True,
        )
        theirs.close()
        resources.callback(_wait_for, process)
        return Branch(mine, mark, process.pid)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for party in self._parties:
            party.close()
        self._resources.close()
        if self._sandbox is not None:
            self._sandbox.settle()

    def processor_s(self) -> float:
        """Of all processes until now; of a nursery that the worker branched off, what it did since."""
        ran_ns = process_ns(self._nursery_pid) - self._ran_before_ns
        return (ran_ns + sum(party.ran_ns() for party in self._parties)) / 1e9

    def start(self, memories: Sequence[int]) -> Party:
        """A contestant that sees these shared memories, its own first. Raises AuditLostError."""
        requests, to_contestant = os.pipe()
        from_contestant, answers = os.pipe()
        try:
            pid = fork(self._requests, [requests, answers, self._log.fileno(), *memories])
        except (EOFError, OSError) as error:
            raise AuditLostError(f"the audit's processes did not start ({error})") from error
        finally:
            os.close(requests)
            os.close(answers)
        party = Party(pid, to_contestant, from_contestant)
        self._parties.append(party)
        return party


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_WAIT_S)


def shared_memory(size: int) -> IO[bytes]:
    """A file without a name, of this many bytes; in memory where the system offers that."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("cudadent42-audit"), "w+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the audit
    os.ftruncate(file.fileno(), size)
    return file
