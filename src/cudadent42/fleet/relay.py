"""This machine's workers for a coordinator at the other end of a connection, and what is said over it.

A message is a line of JSON and as many bytes behind it as the line says: the run folder of a task that ended, packed,
or the files of a kernel. Out go the messages of an engine; in come tasks, what they need, and who is admitted or
dismissed. The workers end when the connection does, so nothing here runs that nobody waits for. The files go with them.
"""

from __future__ import annotations

import json
import reprlib
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from cudadent42.base import parcels
from cudadent42.base.errors import LabError
from cudadent42.base.parcels import Parcel
from cudadent42.base.reading import parse_json
from cudadent42.base.serialise import decode, encode
from cudadent42.fleet.engine import Alive, Claimed, Engine, Joined, Left
from cudadent42.fleet.packing import LIMITS, pack
from cudadent42.fleet.task import Returned, Task

_MOST_LINE_BYTES = 64 << 20
_WAIT_S = 0.2

PARCELS = "parcels"
"""Of what was sent, in the folder of the work."""

_NOT_SENT = "the files of this task were not sent"


@dataclass(frozen=True)
class Offer:
    """A task for the worker that it names."""

    task: Task


@dataclass(frozen=True)
class Sent:
    """Files that tasks name, packed behind the message."""

    parcel: Parcel


@dataclass(frozen=True)
class Admit:
    worker: str


@dataclass(frozen=True)
class Dismiss:
    worker: str


Said = Joined | Left | Claimed | Alive | Returned | Sent | Offer | Admit | Dismiss

_KINDS: Mapping[str, type[Said]] = {
    kind.__name__.lower(): kind
    for kind in (Joined, Left, Claimed, Alive, Returned, Sent, Offer, Admit, Dismiss)
}


def say(stream: BinaryIO, message: Said, packed: bytes = b"") -> None:
    """Raises OSError where nobody listens any more."""
    head = {"kind": type(message).__name__.lower(), "bytes": len(packed), "record": encode(message)}
    stream.write(json.dumps(head, ensure_ascii=False).encode() + b"\n" + packed)
    stream.flush()


class Heard:
    """What comes in, from pieces as they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        """So many bytes of the rest have no end of a line."""
        self._head: tuple[Said, int] | None = None
        """Of the message whose bytes are awaited: it, and how many."""

    def of(self, chunk: bytes) -> Iterator[tuple[Said, bytes]]:
        """The messages that are whole now, each with the bytes behind it. Raises LabError for what is none.

        Each byte is looked at and moved once, however small the pieces are.
        """
        self._rest += chunk
        while True:
            if self._head is None:
                end = self._rest.find(b"\n", self._searched)
                if end < 0:
                    self._searched = len(self._rest)
                    if self._searched > _MOST_LINE_BYTES:
                        raise LabError("the other end said a line without an end")
                    return
                self._head = _message(bytes(self._rest[:end]))
                self._searched = 0
                del self._rest[: end + 1]
            message, size = self._head
            if len(self._rest) < size:
                return
            packed = bytes(self._rest[:size])
            del self._rest[:size]
            self._head = None
            yield message, packed


def _message(line: bytes) -> tuple[Said, int]:
    """What a line says, and how many bytes are behind it. Raises LabError."""
    try:
        head = parse_json(line)
        size, message = head["bytes"], decode(_KINDS[head["kind"]], head["record"])
        if type(size) is not int:
            raise ValueError(f"bytes is {reprlib.repr(size)}")
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"the other end said {line[:80]!r}; expected a message ({error})") from error
    if not 0 <= size <= LIMITS.most_bytes:
        raise LabError(f"the other end announced {size} bytes; expected up to {LIMITS.most_bytes}")
    return message, size


def relay(engine: Engine, root: Path, incoming: FileIO, outgoing: BinaryIO) -> None:
    """Serve the other end with an engine of this machine until it hangs up. Raises LabError where no worker can
    come, or what is sent cannot be written.

    What is sent is unpacked below ``root``, where `cudadent42.base.parcels` finds it, and removed in the end.
    ``incoming`` has no buffer: an interpreter that ends while a thread waits in a buffered file aborts, and what it
    had to say is lost.
    """
    sent = parcels.make(root / PARCELS)
    unplaced: dict[Parcel, str] = {}
    runs: dict[str, str] = {}
    claims: dict[str, str] = {}
    orders: list[tuple[Said, bytes]] = []
    lock = threading.Lock()
    over = threading.Event()

    def listen() -> None:
        heard = Heard()
        try:
            while chunk := incoming.read(1 << 16):
                with lock:
                    orders.extend(heard.of(chunk))
        finally:
            over.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        while not over.is_set():
            with lock:
                given, orders[:] = list(orders), []
            for order, packed in given:
                if isinstance(order, Sent):
                    unplaced[order.parcel] = _placed(order.parcel, packed, sent)
                elif isinstance(order, Offer):
                    reasons = [unplaced.get(each, _NOT_SENT) for each in order.task.parcels]
                    if any(reasons):
                        reason = "; ".join(filter(None, reasons))
                        say(outgoing, Returned(order.task.key, order.task.worker, 0.0, error=reason))
                        continue
                    runs[order.task.key] = order.task.run
                    engine.offer(order.task)
                elif isinstance(order, Admit):
                    engine.admit(order.worker)
                elif isinstance(order, Dismiss):
                    engine.dismiss(order.worker)
            for message in engine.wait(_WAIT_S):
                key = ""
                if isinstance(message, Claimed):
                    claims[message.worker] = message.key
                elif isinstance(message, Returned):
                    key = message.key
                    claims.pop(message.worker, None)
                elif isinstance(message, Left):
                    key = claims.pop(message.worker, "")  # whole blocks that it leaves behind count
                run = runs.pop(key, "")
                say(outgoing, message, pack(root / run) if run else b"")
                if run:
                    shutil.rmtree(root / run, ignore_errors=True)
    except BrokenPipeError:
        return
    finally:
        engine.close()
        shutil.rmtree(sent, ignore_errors=True)


def _placed(parcel: Parcel, packed: bytes, root: Path) -> str:
    """Why what was sent is not to be raced; empty where it lies there, and is what its digest is of.

    Raises LabError where this machine's disk does not take it: then tasks are for others, and none of them failed.
    """
    try:
        parcels.place(parcel, packed, root)
    except OSError as error:
        raise LabError(f"the files of a kernel cannot be written here: {error.strerror}") from error
    except LabError as error:
        return f"the files of {parcel.name or parcel.digest[:12]} did not come as they were sent: {error}"
    return ""
