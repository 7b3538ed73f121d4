"""How a thread is run, as the system tells."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from cudadent42.timing import standing as standing_module
from cudadent42.timing.standing import Standing, standing, standings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def test_a_threads_own_niceness_is_told() -> None:
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        begun.set()
        stop.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        assert thread.native_id is not None
        assert standing(thread.native_id).niceness == 19
        assert standings(os.getpid())[thread.native_id] == standing(thread.native_id)
        assert standings(os.getpid())[threading.get_native_id()].niceness == os.nice(0)
    finally:
        stop.set()
        thread.join()


def test_nobody_is_told_of_a_process_that_is_gone() -> None:
    assert standings(1 << 30) == {}


def test_words() -> None:
    assert str(Standing(19, 3, frozenset({0}))) == "niceness 19, scheduling 3, on 1 processor"
    grouped = Standing(0, 0, frozenset({0}), groups=("cpu:/slow",))
    assert str(grouped) == "niceness 0, scheduling 0, on 1 processor, in control group cpu:/slow"
    held = Standing(0, 0, frozenset({0, 1}), (0, 128))
    assert str(held) == "niceness 0, scheduling 0, on 2 processors, clocks held to (0, 128) of 1024"


def test_groups_that_may_bound_processor_time_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = b"5:cpu,cpuacct:/slow\n4:memory:/other\n3:cpuset:/\n0::/half:one\n"
    read, write = os.pipe()
    os.write(write, listed)
    os.close(write)
    monkeypatch.setattr(standing_module.os, "open", lambda path, flags: read)
    assert standing_module._groups(1) == ("cpu,cpuacct:/slow", ":/half:one")
