"""A branch of a worker: clean, no child of the worker's, there when the worker is gone, gone when nobody needs it."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cudadent42.audit.nursery import trunk
from cudadent42.audit.party import AuditLostError
from cudadent42.audit.referee import Referee
from cudadent42.model.records import Plan, TimerKind
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.worker.branch import Branch
from cudadent42.worker.child import Request
from cudadent42.worker.parent import Worker
from cudadent42.worker.processes import _below

CASE = AttentionCase("tiny", "fp32", 1, 1, 1, 16, 16, 32)
PLAN = Plan("branch", "cpu", (CASE,), "pytorch", ("pytorch",), 2, 0, seed=0, timer=TimerKind.CALL)


@pytest.fixture(scope="module")
def branch() -> Branch:
    """Of a worker that has verified something, and ended."""
    with Worker(trunk=trunk("attention")) as worker:
        worker.run(Request("verify", PLAN), lambda event: None)
        assert worker.pid is not None
        handed = worker.hand_over_branch()
        assert handed is not None
        assert handed.pid not in list(_below(worker.pid))
        assert worker.hand_over_branch() is None
    return handed


def gone(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked for in /proc")
def test_it_outlives_its_worker_and_ends_with_the_audit(branch: Branch, tmp_path: Path) -> None:
    process = branch.pid
    assert not gone(process)
    with tempfile.TemporaryFile() as memory, Referee(tmp_path / "audit.log", "attention", branch) as referee:
        memory.truncate(1 << 16)
        first, second = (referee.start([memory.fileno()]) for _ in range(2))
        assert {process} == {
            int(Path(f"/proc/{each.pid}/stat").read_text().split()[3]) for each in (first, second)
        }
        assert referee.processor_s() >= 0.0
    for each in (process, first.pid, second.pid):
        wait_until(lambda each=each: gone(each))  # type: ignore[misc]
    branch.close()  # once more does no harm


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked for in /proc")
def test_a_branch_that_nobody_takes_ends_with_its_worker() -> None:
    with Worker(trunk=trunk("attention")) as worker:
        worker.run(Request("verify", PLAN), lambda event: None)
        assert worker._branch is not None
        process = worker._branch.pid
    wait_until(lambda: gone(process))


def test_a_nursery_that_is_gone_loses_the_audit_and_nothing_else(tmp_path: Path) -> None:
    mine, theirs = socket.socketpair()
    theirs.close()
    log = tmp_path / "audit.log"
    nobody = Branch(mine, "nobody", pid=os.getpid() + (1 << 22))
    with Referee(log, "attention", nobody) as referee, pytest.raises(AuditLostError, match="did not start"):
        referee.start([])
