"""Interrupts that are put off until what must not be cut in two is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def put_off() -> Iterator[None]:
    """Within it no interrupt is raised: the first one that came is raised at its end.

    For a few milliseconds, such as the start of a process whose number is not known before it runs. Signals are handled
    in the main thread alone, so in another one nothing needs to be put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {}
    for number in INTERRUPTS:
        handler = signal.getsignal(number)
        if callable(
            handler
        ):  # neither ignored nor left to the system, which ends the process and all is said
            handlers[number] = handler
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            first, frame = came[0]
            handlers[signal.Signals(first)](first, frame)
