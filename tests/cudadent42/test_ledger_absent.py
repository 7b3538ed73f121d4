"""Without SQLAlchemy: runs go on without a word, and the commands name the extra."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flashmoe_science.jit.requirements import install_command

ROOT = Path(__file__).resolve().parents[2]


def python(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    blocked = "import sys\nsys.modules['sqlalchemy'] = None\n"
    return subprocess.run(
        [sys.executable, "-c", blocked + code],
        env=os.environ
        | {"PYTHONPATH": str(ROOT / "src"), "XDG_STATE_HOME": str(tmp_path), "CUDADENT42_LEDGER": ""},
        capture_output=True,
        text=True,
    )


def test_recording_keeps_only_the_folders_place(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom cudadent42 import ledger\nfrom cudadent42.flows import pipeline\n"
        "print(ledger.record(Path('nowhere')))"
    )
    done = python(tmp_path, code)
    assert done.stdout == "None\n", done.stderr
    (listed,) = (tmp_path / "cudadent42").iterdir()
    assert "nowhere" in listed.read_text()


def test_the_commands_name_the_extra(tmp_path: Path) -> None:
    for command in (["ledger", "list"], ["ledger", "rebuild"], ["cost"], ["history"]):
        done = python(
            tmp_path, f"import cudadent42.commands.cli as c\nsys.argv[1:] = {command}\nsys.exit(c.main())"
        )
        assert done.returncode == 4
        assert install_command("ledger") in done.stderr
        assert "Traceback" not in done.stderr


def test_advice_and_rates_need_no_database(tmp_path: Path) -> None:
    command = ["cost", "advise", "--machine", "gcp-l4", "--idle", "1h"]
    done = python(
        tmp_path, f"import cudadent42.commands.cli as c\nsys.argv[1:] = {command}\nsys.exit(c.main())"
    )
    assert done.returncode == 0, done.stderr
    assert "keep: saves" in done.stdout
