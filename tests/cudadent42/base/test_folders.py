"""Where the lab keeps what belongs to a user who has no home."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.base.folders import config_folder, state_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user without a home: whom the table of users lacks, expanduser leaves the tilde as it is."""
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_private_folder_takes_the_place_of_a_home(temporary: Path) -> None:
    home = temporary / f"cudadent42-home-{os.getuid()}"
    assert config_folder() == home / ".config/cudadent42"
    assert state_folder() == home / ".local/state/cudadent42"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.parametrize("relative", ["", "home"])
def test_a_home_that_is_no_absolute_path_is_none(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, relative: str
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: relative)
    assert config_folder().is_relative_to(temporary)


def test_what_somebody_else_may_have_made_is_refused(temporary: Path) -> None:
    home = temporary / f"cudadent42-home-{os.getuid()}"
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(UsageError, match="is not a folder of this user's alone; set HOME"):
        config_folder()
    home.rmdir()
    home.symlink_to(temporary, target_is_directory=True)
    with pytest.raises(UsageError, match="is not a folder of this user's alone; set HOME"):
        state_folder()
