"""Processes of tests that are forked after the tests were collected, where pytest-xdist would start interpreters.

Those of xdist import torch and collect all tests, each on its own, and a test is six messages there. These begin with
what was collected, so one more than there are processors costs little, and works where others wait. Options, shares and
work stealing are xdist's: each process begins with a share of its own, and who has none left takes half of the largest.
A share ends where a file does, if one does nearby: what a file's tests have in common is made in each process that has
some of them, and a run of the lab is ten seconds.

A process that ends within a test is a failure of that test, and another takes the rest. With a GPU xdist does it as
ever: what has looked for one cannot be forked.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

from warm_process import fork, run_to_its_end

_AT_ONCE = 16
"""Tests that a process asks for together, until few are left."""
_REPORTED_EVERY_S = 0.2
_LOOKED_AFTER_EVERY_S = 5.0
_NO_TEST = -1
_BYTES_OF_A_NUMBER = 4


def take_over(config: pytest.Config) -> None:
    """In ``pytest_configure`` of a conftest.py: what xdist was asked for is done by forks, where that can be."""
    count = len(config.getoption("tx", None) or ())
    if count and sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
        config.option.dist, config.option.tx = "no", []  # read by xdist after this
        config.pluginmanager.register(ForkedTests(count), "forked tests")


@dataclass
class _Process:
    pid: int
    connection: Connection
    board: mmap.mmap
    """Where it writes the number of the test that it runs."""
    share: deque[int]
    """Of numbers of tests: those that nobody has begun."""
    given: list[int] = field(default_factory=list)
    """Those that it has, and has not reported."""


class ForkedTests:
    """A plugin of pytest, in the process that collects."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[_Process] = []
        self._begun = 0
        self._threads = 1
        """Of PyTorch, in a process that runs tests."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[object]:
        """A module that computes something as it is imported starts no threads of OpenMP, which no fork would have."""
        import torch

        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None  # pytest's own loop has the words for these
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False
        factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        factory.getbasetemp()
        tests = len(session.items)
        count = min(self._count, tests)
        try:
            files = [item.path for item in session.items]
            cuts = [cut_between_files(files, tests * number // count) for number in range(1, count)]
            for first, last in zip([0, *cuts], [*cuts, tests], strict=True):
                self._begin(session, deque(range(first, last)))
            while self._processes:
                self._listen(session)
        finally:
            self._end_all()
        return True

    def _begin(self, session: pytest.Session, share: deque[int]) -> None:
        import torch

        ours, theirs = Pipe()
        self._begun += 1
        board = mmap.mmap(-1, _BYTES_OF_A_NUMBER)
        sys.stdout.flush()
        pid = fork()
        if pid == 0:
            for other in self._processes:
                other.connection.close()
            ours.close()
            name = f"forked-{self._begun}"
            torch.set_num_threads(self._threads)
            run_to_its_end(lambda: _Tests(session, theirs, board, name).run())
        theirs.close()
        self._processes.append(_Process(pid, ours, board, share))

    def _listen(self, session: pytest.Session) -> None:
        heard = wait([process.connection for process in self._processes], _LOOKED_AFTER_EVERY_S)
        if not heard:  # what a test started and left may hold the connection of a process that has ended
            for process in [each for each in self._processes if _has_ended(each.pid)]:
                if not process.connection.poll():
                    self._bury(session, process)
        for process in [each for each in self._processes if each.connection in heard]:
            try:
                kind, content = process.connection.recv()
            except (EOFError, ConnectionResetError):
                self._bury(session, process)
                continue
            if kind == "reports":
                self._report(session, process, content)
            elif kind == "warning":
                session.config.hook.pytest_warning_recorded.call_historic(kwargs=content)
            elif kind == "more":
                process.connection.send(self._next(session, process))
            elif kind == "interrupted":
                raise session.Interrupted(content)
            else:
                raise RuntimeError(f"a process of tests failed:\n{content}")

    def _report(
        self, session: pytest.Session, process: _Process, tests: Sequence[tuple[int, list[Any]]]
    ) -> None:
        hook = session.config.hook
        for number, reports in tests:
            for data in reports:
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
            process.given.remove(number)
            item = session.items[number]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _next(self, session: pytest.Session, process: _Process) -> list[int]:
        """Tests for it to go on with; none where none are left."""
        if not process.share:
            largest = max(self._processes, key=lambda other: len(other.share)).share
            cut = cut_between_files([session.items[number].path for number in largest], len(largest) // 2)
            process.share.extend(largest.pop() for _ in range(len(largest) - cut))
            process.share.reverse()
        left = sum(len(each.share) for each in self._processes)
        count = max(1, min(_AT_ONCE, left // (4 * self._count)))
        numbers = [process.share.popleft() for _ in range(min(count, len(process.share)))]
        process.given += numbers
        return numbers

    def _bury(self, session: pytest.Session, process: _Process) -> None:
        """It has ended: because all is done, or within a test."""
        _, status = os.waitpid(process.pid, 0)
        process.connection.close()
        self._processes.remove(process)
        current = int.from_bytes(process.board[:], sys.byteorder, signed=True)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and not process.given:
            return
        if current not in process.given:
            raise RuntimeError(f"a process of tests ended between two, {_words_of(code)}")
        item = session.items[current]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"The process of this test ended within it, {_words_of(code)}.",
            when="call",
        )
        data = session.config.hook.pytest_report_to_serializable(config=session.config, report=report)
        rest = deque([*(number for number in process.given if number != current), *process.share])
        self._report(session, process, [(current, [data])])
        if rest:
            self._begin(session, rest)

    def _end_all(self) -> None:
        """Where all is done there are none. Else they are interrupted, and tear down what they have."""
        for process in self._processes:
            process.connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        for process in self._processes:
            os.waitpid(process.pid, 0)
        self._processes.clear()


def cut_between_files(files: Sequence[Path], middle: int) -> int:
    """How many tests of these files come before the cut: ``middle``, or what is nearest to it and parts no file, where
    no more than a quarter of them all lies between."""
    starts = [each for each in range(1, len(files)) if files[each - 1] != files[each]]
    nearest = min(starts, key=lambda each: abs(each - middle), default=middle)
    return nearest if abs(nearest - middle) <= len(files) // 4 else middle


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _words_of(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


# ---------------------------------------------------------------- in a forked process


class _Tests:
    """Runs what it is given, and reports it."""

    def __init__(self, session: pytest.Session, connection: Connection, board: mmap.mmap, name: str) -> None:
        self._session = session
        self._connection = connection
        self._board = board
        self._name = name
        self._current: tuple[int, list[Any]] = (_NO_TEST, [])
        self._unsent: list[tuple[int, list[Any]]] = []
        self._sent_s = time.monotonic()
        self._listens = False
        """Warnings of before are told to whoever registers, and were reported."""

    def run(self) -> None:
        try:
            self._set_up()
            try:
                self._run_all()
            finally:
                signal.signal(
                    signal.SIGINT, signal.SIG_IGN
                )  # a terminal's, and then the collecting process's
                self._put(_NO_TEST)
                self._session._setupstate.teardown_exact(None)
            self._send()
        except (KeyboardInterrupt, pytest.exit.Exception) as error:
            self._tell("interrupted", str(error) or type(error).__name__)
        except BaseException:  # noqa: BLE001 - it is told to the process that collects, which raises
            self._tell("failed", traceback.format_exc())

    def _set_up(self) -> None:
        atexit._clear()  # what the process that collects does at its end
        config = self._session.config
        plugins = config.pluginmanager
        plugins.unregister(name="forked tests")
        plugins.unregister(name="terminalreporter")
        plugins.register(self)
        self._listens = True
        capture = plugins.getplugin("capturemanager")
        if capture is not None and capture.is_globally_capturing():
            capture.stop_global_capturing()  # into a file whose position processes would share
            capture.start_global_capturing()
        factory = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / self._name
        factory._basetemp.mkdir(mode=0o700)

    def _run_all(self) -> None:
        numbers = self._more()
        while numbers:
            for number, following in _with_the_next(numbers):
                last = following is None
                if last:  # what is next says which fixtures stay
                    numbers = self._more()
                    following = numbers[0] if numbers else None
                self._run(number, following)

    def _run(self, number: int, following: int | None) -> None:
        items = self._session.items
        self._put(number)
        self._current = (number, [])
        items[number].config.hook.pytest_runtest_protocol(
            item=items[number], nextitem=None if following is None else items[following]
        )
        self._unsent.append(self._current)
        if time.monotonic() - self._sent_s > _REPORTED_EVERY_S:
            self._send()

    def _more(self) -> list[int]:
        self._tell("more", None)
        numbers: list[int] = self._connection.recv()
        return numbers

    def _send(self) -> None:
        if self._unsent:
            self._tell("reports", self._unsent)
        self._unsent, self._sent_s = [], time.monotonic()

    def _tell(self, kind: str, content: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._connection.send((kind, content))

    def _put(self, number: int) -> None:
        self._board[:] = number.to_bytes(_BYTES_OF_A_NUMBER, sys.byteorder, signed=True)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._current[1].append(data)

    @pytest.hookimpl
    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if not self._listens:
            return
        try:
            pickle.loads(pickle.dumps(warning_message.message))
        except Exception:  # noqa: BLE001 - whatever a class of warnings raises where it cannot be pickled
            warning_message.message = UserWarning(str(warning_message.message))
            warning_message.category = UserWarning
        warning_message.source = None  # the object that it is about stays here
        given = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self._tell("warning", given)


def _with_the_next(numbers: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    yield from zip(numbers, [*numbers[1:], None], strict=True)
