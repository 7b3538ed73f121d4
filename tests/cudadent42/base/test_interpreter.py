"""A file of the current folder is nobody's module of Python's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cudadent42.base import interpreter

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no option for it")


@pytest.mark.usefixtures("fresh_processes")
def test_a_module_of_the_current_folder_is_not_taken_for_pythons(tmp_path: Path) -> None:
    """The worker imports ``queue``. It ends at once, as no child of the process that it is told of."""
    (tmp_path / "queue.py").write_text("raise SystemExit('shadowed')")
    command = [*interpreter.module_command("cudadent42.worker.child"), "1", "2", "0"]
    source = str(Path(interpreter.__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "shadowed" not in done.stderr
    assert done.returncode == -signal.SIGKILL


def test_what_lies_there_can_still_be_imported_behind_all_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    interpreter.add_folder(str(tmp_path))
    interpreter.add_folder(str(tmp_path))
    assert sys.path[-1] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1
