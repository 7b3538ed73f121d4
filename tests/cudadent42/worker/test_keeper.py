"""The process above a worker: it ends as the worker does, and leaves nothing behind that came of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no process takes in orphans elsewhere")

SOURCE = Path(__file__).resolve().parents[3] / "src"

BEGIN = """
import os, signal, sys, time
from cudadent42.timing.processor_time import Kin
from cudadent42.worker.keeper import go_below_keeper
keeper = go_below_keeper()
kin = Kin(keeper)

def leave(work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            work()
        os._exit(0)
    os.wait()
"""

DAEMON = """
def sleep():
    os.execve(sys.executable, ["python", "-S", "-c", "import time; time.sleep(1e6)"], {})

leave(sleep)
while not kin.left():
    time.sleep(0.001)
print(kin.left()[0], flush=True)
"""


def run(program: str, ahead: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ahead + BEGIN + program]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, stdin=subprocess.PIPE
    )


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(process: int) -> None:
    while not gone(process):  # until the time limit of a test
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os.abort()", -6)],
    ids=["exit code", "killed", "aborted"],
)
def test_it_ends_as_the_worker_does_and_a_daemon_with_it(end: str, code: int) -> None:
    with run(DAEMON + end) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        assert process.wait() == code
    wait_until_gone(daemon)


def test_what_the_lab_ends_ends_whole_and_its_time_is_counted() -> None:
    with run(DAEMON + "time.sleep(1e6)") as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        process.terminate()
        assert process.wait() == -signal.SIGKILL
    assert gone(daemon)


def test_time_of_orphans_that_have_ended_is_counted() -> None:
    program = """
def work():
    stop = time.process_time() + 0.2
    while time.process_time() < stop:
        pass
    os._exit(0)

assert kin.lost_ns() == 0
leave(work)
while kin.lost_ns() < 0.15e9:  # until the time limit of a test
    time.sleep(0.01)
print(kin.left(), flush=True)
"""
    with run(program) as process:
        assert process.communicate()[0].strip() == "[]"


LATE = """
import os, sys
from cudadent42.worker import keeper as module

late, done = os.pipe()
keep = module._keep

def keep_late(worker):
    os.close(done)
    os.read(late, 1)  # until the worker has done its part: as on a machine that gives the keeper no processor
    keep(worker)

module._keep = keep_late
"""


def test_an_orphan_of_before_the_keeper_first_ran_is_its_own() -> None:
    program = """
waits, ends = os.pipe()

def wait():
    os.closerange(0, 3)
    os.close(done)
    os.close(ends)
    os.read(waits, 1)  # until the worker has ended

leave(wait)
print(len(kin.left()), flush=True)
"""
    with run(program, LATE) as process:
        assert process.communicate()[0].strip() == "1"


def test_a_worker_that_ended_before_the_keeper_first_ran_is_waited_for() -> None:
    with run("os._exit(7)", LATE) as process:
        assert process.wait() == 7


def test_time_of_children_is_counted_below_a_parent_that_ignores_their_end() -> None:
    """Of these Linux waits for no child and counts none of them; a process that is started inherits it."""
    program = """
import resource

if os.fork() == 0:
    stop = time.process_time() + 0.1
    while time.process_time() < stop:
        pass
    os._exit(5)
code = os.waitstatus_to_exitcode(os.wait()[1])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(code, used.ru_utime + used.ru_stime >= 0.1, flush=True)
"""
    with run(program, "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)") as process:
        assert process.communicate()[0].strip() == "5 True"


def test_a_sibling_is_told_from_a_child() -> None:
    """clone(2) with CLONE_PARENT, as in the adversary of that name."""
    program = """
import ctypes, platform, subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1e6)"])
number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
call = ctypes.CDLL(None).syscall
sibling = call(ctypes.c_long(number), ctypes.c_long(0x8000 | signal.SIGCHLD), None, None, None, None)
if sibling == 0:
    time.sleep(1e6)
print(kin.left() == [sibling], kin.processes() == [child.pid, sibling], flush=True)
child.kill()
"""
    with run(program) as process:
        assert process.communicate()[0].strip() == "True True"
