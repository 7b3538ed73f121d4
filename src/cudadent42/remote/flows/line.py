"""One machine that works for a fleet over a connection, which is made again where it is lost."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from cudadent42.base.errors import LabError
from cudadent42.fleet.engine import Joined
from cudadent42.fleet.relay import Heard, Said, say
from cudadent42.fleet.task import Returned
from cudadent42.remote.core import hosts
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core.run import RETRY_S, workspace_of
from cudadent42.remote.core.scripts import script
from cudadent42.remote.core.ssh import ConnectionLostError, Done, converse
from cudadent42.remote.core.tree import Tree

_STARTS = 3
"""Of workers there that end or do not begin, before the machine is given up. One that worked and cannot be reached has
`RETRY_S` to answer again."""
_PAUSE_S = 5.0


@dataclass(frozen=True)
class Device:
    """What workers there are asked for."""

    name: str
    """``cpu`` or ``cuda``."""
    ignore_preflight: bool = False


class Host:
    """One machine, in a thread of its own."""

    def __init__(
        self, name: str, device: Device, heard: queue.Queue[tuple[Host, Said | LabError, bytes]]
    ) -> None:
        self.name = name
        self.over = False
        """Nothing more comes of it."""
        self._workspace = workspace_of(hosts.get(name))
        self._device = device
        self._heard = heard
        self._stdin: IO[bytes] | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._joined = self._worked = False
        self._job = f"fleet-{secrets.token_hex(4)}"
        """As the machine knows it. The next connection ends what a lost one left there."""

    def begin(self, tree: Tree) -> None:
        self._thread = threading.Thread(target=self._serve, args=(tree,), daemon=True)
        self._thread.start()

    def tell(self, message: Said, packed: bytes = b"") -> None:
        """Nobody may be there any more: then its workers are told as gone."""
        with self._lock, suppress(OSError, ValueError):
            if self._stdin is not None:
                say(self._stdin, message, packed)  # type: ignore[arg-type]

    def close(self) -> None:
        """The workers there end when they are not wanted."""
        self._closing.set()
        with self._lock, suppress(OSError):
            if self._stdin is not None:
                self._stdin.close()

    def join(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        self._workspace.connection.close()

    def _serve(self, tree: Tree) -> None:
        starts, lost_s = 0, 0.0
        while True:
            self._joined = self._worked = False
            try:
                jobs.send(self._workspace, tree)
                self._converse()
                reason = LabError("the workers there ended")
            except LabError as error:
                reason = error
            now_s = time.monotonic()
            starts = 1 if self._worked else starts + 1
            lost_s = now_s if self._joined else lost_s
            cut = isinstance(reason, ConnectionLostError) and lost_s > 0 and now_s - lost_s < RETRY_S
            self.over = self._closing.is_set() or (starts >= _STARTS and not cut)
            self._heard.put((self, reason, b""))
            if self.over:
                return
            self._closing.wait(_PAUSE_S)

    def _converse(self) -> None:
        heard = Heard()

        def on_bytes(chunk: bytes) -> None:
            for message, packed in heard.of(chunk):
                self._joined = self._joined or isinstance(message, Joined)
                self._worked = self._worked or isinstance(message, Returned)
                self._heard.put((self, message, packed))

        def on_open(stdin: IO[bytes]) -> None:
            with self._lock:
                self._stdin = stdin

        remote, device = self._workspace.remote, self._device
        flags = ("--ignore-preflight",) if device.ignore_preflight else ()
        words = (remote.folder, self._job, remote.python, device.name, *flags)
        try:
            done = converse(self._workspace.connection, script("relay.sh"), words, on_bytes, on_open)
        finally:
            with self._lock:
                self._stdin = None
        if done.exit_code == jobs.BUSY:
            raise self._workspace.busy(Done(done.exit_code, done.errors.encode(), ""))
        jobs.require(self._workspace, done)


Arrivals = queue.Queue[tuple[Host, Said | LabError, bytes]]
"""What a machine said, with what was packed behind it, or how its connection ended."""
