"""What the tests of the recorder share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from cudadent42.recording.context import recorded
from cudadent42.recording.recorder import Recorder
from cudadent42.recording.records import Group, Recording
from cudadent42.recording.suite import Source

SOURCE = Source(("script.py",), "recording")


def record(call: Callable[[], Any], now: Callable[[], float] | None = None) -> tuple[Recording, Any]:
    recorder = Recorder() if now is None else Recorder(now)
    with recorded(recorder):
        result = call()
    return recorder.recording(), result


def only(recording: Recording) -> Group:
    (group,) = recording.groups
    return group


def ticking() -> Callable[[], float]:
    """A clock of the test's own: a second from one look to the next."""
    return itertools.count().__next__
