"""Programs that start others: ended whole when they take too long."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from cudadent42.base import output
from cudadent42.stages.profile import child


def test_what_is_printed_is_in_the_result() -> None:
    done = child.run(["sh", "-c", "echo out; echo error >&2; exit 3"], timeout_s=math.inf)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"error\n")


def test_what_is_printed_goes_to_a_file(tmp_path: Path) -> None:
    with closing(output.OutputLog(tmp_path / "log")) as log:
        child.run(["sh", "-c", "echo out; echo error >&2"], timeout_s=math.inf, output=log)
    assert (tmp_path / "log").read_text() == "out\nerror\n"


@pytest.mark.parametrize("to_file", [False, True])
def test_what_a_candidate_prints_while_it_is_profiled_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_file: bool
) -> None:
    monkeypatch.setattr(output, "MOST_BYTES", 3 << 20)
    with closing(output.OutputLog(tmp_path / "log")) as log:
        command = ["sh", "-c", "head -c 20000000 /dev/zero; echo end"]
        done = child.run(command, timeout_s=math.inf, output=log if to_file else None)
    kept = (tmp_path / "log").read_bytes() if to_file else done.stdout
    assert len(kept) < 4 << 20
    assert b"bytes left out" in kept
    assert kept.endswith(b"end\n")


def test_the_environment_is_the_one_given() -> None:
    done = child.run(
        ["sh", "-c", "echo $WORD"], timeout_s=math.inf, environment={**os.environ, "WORD": "here"}
    )
    assert done.stdout == b"here\n"


def test_nothing_is_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is reached, by a clock of the test's own, once what the program starts is there."""
    script = (
        f"sleep 1000 & echo $! > {tmp_path / 'pid.new'}; mv {tmp_path / 'pid.new'} {tmp_path / 'pid'}; wait"
    )
    looks = itertools.count()  # the first one is the start, by which the program may be there already

    def monotonic() -> float:
        return float(next(looks) > 0 and (tmp_path / "pid").exists())

    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(child, "LOOK_S", 0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        child.run(["sh", "-c", script], timeout_s=1.0)
    pid = int((tmp_path / "pid").read_text())
    while _runs(pid):  # until the time limit of a test
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether it is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
