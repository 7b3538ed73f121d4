"""What leaves a candidate's tree of processes in the audit is stopped with it, counted with it, and ends with it."""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import lab
import pytest

from cudadent42.audit.party import Party
from cudadent42.audit.race import ring
from cudadent42.audit.referee import Referee
from cudadent42.model.records import TimerKind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")

ESCAPES = """
import ctypes, os, time
from flashmoe_science import flash_attention

def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

def leave(work):
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans are not taken in any more
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            work()
        os._exit(0)
    os.waitpid(child, 0)

def spin():
    while True:
        pass

leave(spin)
"""

BRIEFLY = """
import os, signal, time
from flashmoe_science import flash_attention

def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for it, so nobody counts it
if os.fork() == 0:
    stop = time.process_time() + 0.3
    while time.process_time() < stop:
        pass
    os._exit(0)
try:
    os.wait()
except ChildProcessError:
    pass
"""


def state(process: int) -> str:
    """Empty for one that is gone."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def until_stopped(process: int) -> None:
    """A signal is on its way for a moment. Only pytest's limit ends this."""
    while state(process) != "T":
        time.sleep(0.001)


def test_a_process_that_left_is_stopped_counted_and_ended(tmp_path: Path) -> None:
    file = tmp_path / "escapes.py"
    file.write_text(ESCAPES)
    name = lab.candidate(file)
    plan = lab.plan_for([name], TimerKind.CPU)
    with Referee(tmp_path / "audit.log", plan.operation) as referee:
        with ring(plan, referee, name, random.Random(0)) as both:
            both.check(lab.CASE)
            left = [each for each in both._candidate.tree() if each != both._candidate.pid]
            assert len(left) == 1
            until_stopped(left[0])
            assert left[0] not in set(both._judge.tree())
            contestants = [both._candidate.pid, both._judge.pid]
        # Nothing of them is left that could be taken for what left the next contestant's tree.
        assert referee._escaped() == []
        assert not any(state(process) for process in (*left, *contestants))


def test_what_ended_unseen_is_counted_where_linux_counts(tmp_path: Path) -> None:
    file = tmp_path / "briefly.py"
    file.write_text(BRIEFLY)
    name = lab.candidate(file)
    plan = lab.plan_for([name], TimerKind.CPU)
    with (
        Referee(tmp_path / "audit.log", plan.operation) as referee,
        ring(plan, referee, name, random.Random(0)) as both,
    ):
        if both._candidate._clock is None:
            pytest.skip("this machine does not let processes be counted (perf_event_open)")
        of_living = Party(both._candidate.pid, 0, 0)
        of_living._clock = None
        assert both._candidate.ran_ns() - of_living.ran_ns() > 0.25e9
