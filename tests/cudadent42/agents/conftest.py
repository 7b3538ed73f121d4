from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that tests here share


from served_project import MINE, SUITE, WITHOUT_END


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    root = tmp_path / "project"
    root.mkdir()
    (root / "agents.toml").write_text(SUITE)
    (root / "mine.py").write_text(MINE)
    (root / "without_end.py").write_text(WITHOUT_END)
    return root.resolve()


@pytest.fixture
def costly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 3 US dollars an hour."""
    folder = tmp_path / "config/cudadent42"
    folder.mkdir(parents=True)
    (folder / "rates.toml").write_text(
        'schema_version = 1\n[[rate]]\nname = "mine"\nusd_per_hour = 3.0\ndate = 2026-11-01\nsource = "a test"\n'
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CUDADENT42_RATE", "mine")
