"""Work that goes on while nothing is called, told from threads and processes that wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cudadent42.integrity.helpers import background_work, work_beside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the tasks of a process")


@contextmanager
def child(program: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True)\n{program}"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_waits_is_at_rest() -> None:
    with child("import time; time.sleep(600)"):
        assert background_work(30.0) is None


def test_a_child_that_spins_is_found_and_named() -> None:
    with child("while True: pass") as process:
        work = background_work(0.2)
    assert work is not None
    assert str(process.pid) in work.evidence


def test_threads_that_wait_are_at_rest_and_one_that_works_is_not() -> None:
    stop = threading.Event()
    waiting = [threading.Thread(target=stop.wait) for _ in range(4)]

    def work() -> None:
        while not stop.is_set():
            sum(range(1000))

    for thread in waiting:
        thread.start()
    try:
        assert background_work(30.0) is None
        working = threading.Thread(target=work)
        working.start()
        at_work = background_work(0.2)
    finally:
        stop.set()
    assert at_work is not None
    assert "thread" in at_work.evidence


def compute() -> None:
    stop = time.thread_time() + 1e-3
    while time.thread_time() < stop:
        pass


def test_who_rests_only_while_the_lab_waits_is_found_in_a_turn_of_the_baselines() -> None:
    """Its work is a child's here, so that it has a processor of its own."""
    program = "import sys\nwhile sys.stdin.read(1):\n    for _ in range(20_000): pass\n    print(flush=True)"
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def turn() -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            compute()
            process.stdin.write(b"x")
            process.stdin.flush()
            process.stdout.readline()

        turn()
        assert background_work(30.0) is None
        assert work_beside(compute) is None
        work = None
        while work is None:  # until the time limit of a test
            work = work_beside(turn)
        process.kill()
    assert str(process.pid) in work.evidence
    assert "worked while the baseline was called" in work.evidence
