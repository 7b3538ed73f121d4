"""What a worker asks of the machine that it is on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.fleet.worker import device_of_ones_own


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of locks, which is not there yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"cudadent42-{os.getuid()}"


def test_a_device_is_locked_in_a_folder_of_one_s_own(locks: Path) -> None:
    with device_of_ones_own("unit"):
        assert locks.stat().st_mode & 0o077 == 0
        assert len(list(locks.iterdir())) == 1
    with device_of_ones_own("unit"):
        pass


def test_a_folder_that_others_write_to_holds_no_lock(locks: Path) -> None:
    locks.mkdir()
    locks.chmod(0o777)
    with pytest.raises(UsageError, match="only you can write to"), device_of_ones_own("unit"):
        pass


def test_a_link_is_not_followed(locks: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    locks.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="only you can write to"), device_of_ones_own("unit"):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []
