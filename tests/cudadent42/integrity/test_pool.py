"""PyTorch's own threads: who lowers them is told by what runs, whatever they are called."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.usefixtures("warm_texts"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how a thread is run"),
]

PROGRAM = """
import os, threading, torch
torch.set_num_threads(2)
from cudadent42.integrity.pool import Pool

pool = Pool()
own = threading.get_native_id()
others = [thread for thread in map(int, os.listdir("/proc/self/task")) if thread != own]
print(repr(pool.disturbed()))
stop = threading.Event()
waiting = threading.Thread(target=stop.wait)
waiting.start()
os.setpriority(os.PRIO_PROCESS, waiting.native_id, 19)
print(repr(pool.disturbed()))
for thread in others:
    {lower}
print(repr(pool.disturbed()))
stop.set()
"""


@pytest.mark.parametrize(
    ("lower", "words"),
    [
        ("os.setpriority(os.PRIO_PROCESS, thread, 19)", "niceness 19"),
        ("os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))", f"scheduling {3}"),
    ],
    ids=["niceness", "class"],
)
def test_a_thread_of_somebody_elses_may_be_lowered_and_pytorchs_may_not(lower: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(lower=lower)], capture_output=True, text=True, check=True
    )
    clean, own, lowered = done.stdout.splitlines()
    assert (clean, own) == ("''", "''")
    assert words in lowered
    assert "of PyTorch's" in lowered


def test_a_thread_that_works_beside_one_operation_is_not_pytorchs() -> None:
    program = """
import os, threading, torch
torch.set_num_threads(2)
from cudadent42.integrity.pool import Pool

class Once(Pool):
    "Another thread works during the first of the operations, and only then."

    def _work(self):
        super()._work()
        begin.set()
        done.wait()

begin, done = threading.Event(), threading.Event()

def work_once():
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    lowered.set()
    begin.wait()
    sum(range(100_000))
    done.set()
    ended.wait()

lowered, ended = threading.Event(), threading.Event()
pool = Pool()
threading.Thread(target=work_once).start()
lowered.wait()
pool.__class__ = Once
print(repr(pool.disturbed()))
ended.set()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "''"


def test_one_thread_is_no_pool() -> None:
    program = "import torch; torch.set_num_threads(1); from cudadent42.integrity.pool import Pool; "
    program += "import os; pool = Pool(); os.nice(1); print(repr(pool.disturbed()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "''"
