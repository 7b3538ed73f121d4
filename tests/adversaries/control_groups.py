"""Control groups of the old kind, which bound the processor time of what is put into them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup/cpu")

_TURN_S = 0.01


@contextmanager
def half_a_processor(root: Path = ROOT, patience_s: float = 10.0) -> Iterator[Path]:
    """A group that nobody else has. Raises OSError where this process may make none, and then leaves nothing behind.

    At the end it goes. What was in it has been killed, and may not have ended: TimeoutError where that takes longer
    than ``patience_s``.
    """
    group = root / f"cudadent42-test-{uuid.uuid4().hex}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError:
        group.rmdir()
        raise
    try:
        yield group
    finally:
        _remove(group, patience_s)


def _remove(group: Path, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while True:
        try:
            return group.rmdir()
        except OSError as error:
            if time.monotonic() > until:
                raise TimeoutError(f"{group} cannot be removed after {patience_s:g} s: {error}") from error
            time.sleep(_TURN_S)
