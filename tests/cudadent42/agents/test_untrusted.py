"""What an agent asks to be confined is confined: the wish reaches the process that does the work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudadent42.agents.tasks import Race, Verification, from_line, to_line
from cudadent42.plan import Choices


def test_the_wish_travels_with_the_task() -> None:
    for task in (
        Verification("cpu", Choices(), untrusted=True),
        Race("cpu", Choices(), sealed=False, untrusted=True),
    ):
        assert from_line(to_line(task)) == task


@pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are made of Linux")
def test_a_candidate_is_confined_where_an_agent_asks_for_it(tmp_path: Path) -> None:
    """It says where it runs; what it writes elsewhere is not there."""
    mark = tmp_path / "outside" / "mark"
    mark.parent.mkdir()
    folder = tmp_path / "candidate"
    folder.mkdir()
    (folder / "mine.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "try:\n"
        f"    open({str(mark)!r}, 'w')\n"
        "except OSError:\n"
        "    pass\n"
        "def attention(q, k, v, *, causal, softmax_scale):\n"
        "    raise NotImplementedError('it is only loaded')\n"
    )
    choices = Choices(
        suite="small", cases=("tiny",), dtypes=("fp32",), implementations=(f"{folder}/mine.py:attention",)
    )
    marks = []
    for untrusted in (True, False):
        task = to_line(Verification("cpu", choices, untrusted=untrusted))
        null = os.open(os.devnull, os.O_WRONLY)
        command = [sys.executable, "-m", "cudadent42.agents.work", str(null), str(os.getpid())]
        done = subprocess.run(
            command,
            input=task,
            capture_output=True,
            text=True,
            pass_fds=(null,),
            cwd=tmp_path,  # the project
            check=False,
        )
        os.close(null)
        if untrusted and "no protection of" in done.stdout + done.stderr:
            pytest.skip("no sandbox can be made on this machine")
        marks.append(mark.exists())
    assert marks == [False, True]
