"""The parent's side of an audit: it starts the contestants and ends them (`party` gives them their turns)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from cudadent42.audit.nursery import fork
from cudadent42.audit.party import AuditLostError, Party
from cudadent42.base.interpreter import module_command
from cudadent42.base.output import OutputLog
from cudadent42.sandbox.launch import FOLDER, Sandbox
from cudadent42.timing.processor_time import children, descendants, process_ns
from cudadent42.worker.branch import Branch
from cudadent42.worker.processes import MARK

START_TIMEOUT_S = 180.0
"""Longest time until the nursery has imported PyTorch from a cold disk."""

_KILL_WAIT_S = 10.0

_LOOK_AGAIN_S = 0.001


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
        self._dismissed_ns = 0
        self._resources = ExitStack()

    def __enter__(self) -> Referee:
        with ExitStack() as resources:
            self._log = OutputLog(self._log_path)
            resources.callback(self._log.close)
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
        command = module_command("cudadent42.audit.nursery")
        command += [str(theirs.fileno()), str(os.getpid()), self._operation]
        if self._sandbox is not None:
            command.append(self._sandbox.policy.to_json())
            environment = self._sandbox.environment(environment)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log.file,
            stderr=self._log.file,
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
        return (ran_ns + self._dismissed_ns + sum(party.ran_ns() for party in self._parties)) / 1e9

    def start(self, memories: Sequence[int], *, owns_escaped: bool = False) -> Party:
        """A contestant that sees these shared memories, its own first. ``owns_escaped``: whether processes that left a
        contestant's tree are taken to be its own. Raises AuditLostError."""
        requests, to_contestant = os.pipe()
        from_contestant, answers = os.pipe()
        try:
            pid = fork(self._requests, [requests, answers, self._log.file.fileno(), *memories])
        except (EOFError, OSError) as error:
            raise AuditLostError(f"the audit's processes did not start ({error})") from error
        finally:
            os.close(requests)
            os.close(answers)
        escaped = self._escaped if owns_escaped else None
        alone = self._sandbox is None  # a sandbox may begin with a process of its own
        party = Party(pid, to_contestant, from_contestant, escaped, self._log, alone=alone)
        self._parties.append(party)
        return party

    def dismiss(self, party: Party) -> None:
        """It ends, with all that it started, ahead of the others.

        When this returns they are gone: who is still there would be taken for what left the next contestant's tree,
        and its processor time for that one's, which no clock has counted.
        """
        self._dismissed_ns += party.ran_ns()
        own = set(party.tree()).intersection(descendants(str(self._nursery_pid)))
        for process in own:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        self._parties.remove(party)
        party.close()
        limit_s = time.monotonic() + _KILL_WAIT_S
        while own.intersection(descendants(str(self._nursery_pid))) and time.monotonic() < limit_s:
            time.sleep(_LOOK_AGAIN_S)

    def _escaped(self) -> list[int]:
        """What is below the nursery and below no contestant: whoever leaves a contestant's tree stays in the nursery's,
        which takes in orphans (`worker.processes.adopt_orphans`)."""
        contestants = {party.pid for party in self._parties}
        return [process for process in children(self._nursery_pid) if process not in contestants]


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
