"""``replay.json`` of a run folder: the script that its suite was recorded from, run with the kernels and without."""

from __future__ import annotations

from pathlib import Path

from cudadent42.base.files import decode_file, read_json, write_json
from cudadent42.model.script import Replay

REPLAY = "replay.json"


def write_replay(folder: Path, replay: Replay) -> None:
    write_json(folder / REPLAY, replay)


def load_replay(folder: Path) -> Replay | None:
    """None where the folder has none. Raises UsageError for one that cannot be understood."""
    data = read_json(folder / REPLAY)
    return None if data is None else decode_file(Replay, data, folder / REPLAY)
