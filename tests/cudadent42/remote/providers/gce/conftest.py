from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For standin.py and cloud_lab.py: in importlib's import mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))

from cloud_lab import Lab
from standin import Cloud, open_cloud

from cudadent42.remote.core import run


@pytest.fixture
def cloud(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with open_cloud(keys, tmp_path, monkeypatch) as opened:
        yield opened


@pytest.fixture
def lab(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    project = tmp_path / "project"
    project.mkdir()
    (project / "kernel.py").write_text("")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    monkeypatch.setattr(run, "project_root", lambda: project)
    monkeypatch.setattr(run, "_FIRST_PAUSE_S", 0.05)
    (tmp_path / "runs").mkdir()
    return Lab(cloud, tmp_path)
