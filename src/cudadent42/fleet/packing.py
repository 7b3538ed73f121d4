"""Run folders that travel between machines, as archives in memory: those of a task are small."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

from cudadent42.base.archives import Limits, unpack

LIMITS = Limits(most_bytes=1 << 30, most_files=10_000)


def pack(folder: Path) -> bytes:
    """Nothing where there is no such folder."""
    if not folder.is_dir():
        return b""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def place(packed: bytes, folder: Path) -> None:
    """Makes the new ``folder`` of what was packed, if anything was. Raises LabError where it is no such archive."""
    if not packed:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile() as file:
        file.write(packed)
        file.flush()
        unpack(Path(file.name), folder, LIMITS)
