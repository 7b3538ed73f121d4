"""A line on standard error where something takes long, so that the first call of a kernel is not silent."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_VARIABLE = "FLASHMOE_QUIET"
"""Set to anything but the empty string or 0, it keeps the line away."""
NOTICE_AFTER_S = 2.0


@contextmanager
def notice_of_waiting(text: str, after_s: float = NOTICE_AFTER_S) -> Iterator[None]:
    """Print `text` to standard error, once, if the body is still running after `after_s` seconds."""
    if os.environ.get(QUIET_VARIABLE, "0") not in ("", "0"):
        yield
        return
    timer = threading.Timer(after_s, _print, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print(text: str) -> None:
    # None where there is no console (pythonw, some services).
    if sys.stderr is not None:
        print(f"flashmoe_science: {text}", file=sys.stderr, flush=True)
