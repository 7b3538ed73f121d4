"""`cudadent42.capture`: a block of a script, recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cudadent42.recording.recorder import Recorder
from cudadent42.recording.seen import seen_by
from cudadent42.recording.suite import Source, recording_id, suites, write

_running: list[Recorder] = []
"""That of `cudadent42 capture`, if this process is one of its own; or of the block that is open."""


@contextmanager
def running(recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder takes the time, and blocks of the script belong to it."""
    _running.append(recorder)
    try:
        recorder.start()
        yield
    finally:
        recorder.stop()
        _running.remove(recorder)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """As `running`, and calls go through the recorder."""
    with seen_by(recorder), running(recorder):
        yield


@contextmanager
def capture(output: str | Path = "captured.toml") -> Iterator[None]:
    """See `cudadent42.capture`."""
    if _running:  # of `cudadent42 capture`, which writes the suite; or an outer block, which holds this one
        recorder = _running[-1]
        if recorder.belongs_to_command:
            with recorder.block():
                yield
        else:
            yield
        return
    recorder = Recorder()
    try:
        with recorded(recorder):
            yield
    finally:
        write(
            suites([recorder.recording()], Source((), recording_id()), Path(output).stem), Path(output).parent
        )
