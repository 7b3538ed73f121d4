"""Who may use the GPU: tests of several processes together, or one that races by itself."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def turnstiles() -> Path:
    """The folder of this user's locks."""
    folder = Path(tempfile.gettempdir()) / f"cudadent42-gpu-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def gpu_turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Inside, nobody is ``alone`` who is not the only one. Whoever waits to be alone lets nobody else begin."""
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with ExitStack() as held:
        with _locked(folder / "door", kind):
            held.enter_context(_locked(folder / "gpu", kind))
        yield


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
