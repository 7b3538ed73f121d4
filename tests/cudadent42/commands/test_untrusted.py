"""``--untrusted`` on the command line: refused where the machine has too little, with the words that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sandbox"))

from machines import NO_FILTER, NO_LANDLOCK, NO_NAMESPACES

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, runpy, sys
sys.path.insert(0, sys.argv[1])
from restricted import refuse
refuse({int(call): error for call, error in json.loads(sys.argv[2]).items()})
sys.argv[:] = ["cudadent42", *sys.argv[3:]]
runpy.run_module("cudadent42", run_name="__main__")
"""


def lab_on(machine: dict[int, int], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The lab on a machine that refuses some system calls."""
    folder = str(ROOT / "tests/cudadent42/sandbox")
    command = [sys.executable, "-c", PROGRAM, folder, json.dumps(machine), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are made of Linux")
def test_a_machine_that_cannot_confine_refuses_with_what_to_do(tmp_path: Path) -> None:
    candidate = tmp_path / "mine.py"
    mark = tmp_path / "ran"
    candidate.write_text(f"open({str(mark)!r}, 'w')\ndef attention(*_, **__): ...\n")
    name = f"{candidate}:attention"
    arguments = (
        "verify",
        "--device",
        "cpu",
        "--suite",
        "small",
        "--case",
        "tiny",
        "--ignore-preflight",
        "--json",
    )
    done = lab_on(
        NO_NAMESPACES | NO_LANDLOCK | NO_FILTER, *arguments, "--untrusted", "--implementations", name
    )
    assert done.returncode == 4, done.stderr
    message = json.loads(done.stdout)["error"]["message"]
    assert "no protection of files" in message
    assert "--accept-missing files" in message
    assert not mark.exists()


def test_doing_without_is_about_a_sandbox() -> None:
    command = [sys.executable, "-m", "cudadent42", "verify", "--accept-missing", "files"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give --untrusted with it" in done.stderr


def test_what_can_be_done_without_has_names() -> None:
    command = [sys.executable, "-m", "cudadent42", "verify", "--untrusted", "--accept-missing", "everything"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    for name in ("files", "network", "processes", "limits"):
        assert name in done.stderr
