"""Room on a disk, asked before anything else is blamed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cudadent42.base.errors import UnwritableError
from cudadent42.base.files import require_room


def test_room_is_asked_for_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_room(tmp_path)
    assert not list(tmp_path.iterdir())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnwritableError, match="No space left on device"):
        require_room(tmp_path)
    assert not list(tmp_path.iterdir())
