from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# For sky_lab.py: in importlib's import mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))

from sky_lab import BOOTSTRAP, PYTHON, STAND_IN, Sky
from sshd import Server

from cudadent42.remote.core import run
from cudadent42.runs import starts


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "a project"
    (root / "tools").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "tools/bootstrap.sh").write_text(BOOTSTRAP)
    (root / "tools/bootstrap.sh").chmod(0o755)
    (root / "python").write_text(PYTHON)
    monkeypatch.setattr(run, "project_root", lambda: root)
    return root


@pytest.fixture
def cloud(server: Server, project: Path, tmp_path: Path) -> Sky:
    folder = tmp_path / "sky"
    folder.mkdir()
    executable = tmp_path / "tools/sky"
    executable.write_text(
        STAND_IN.format(
            python=sys.executable,
            folder=str(folder),
            config=str(tmp_path / "ssh_config"),
            port=server.port,
            journal=str(starts.journal()),
        )
    )
    executable.chmod(0o755)
    return Sky(folder, tmp_path / "here/run", [], server)
