"""Work that goes on while nothing is called, told from threads and processes that wait."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cudadent42.integrity.helpers import background_work

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
