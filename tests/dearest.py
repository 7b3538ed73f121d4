"""Where the processor's time goes: ``--dearest 20`` names the tests and the files of tests that took most of it.

A test's is that of its process and of those that it waited for, with the set-up of fixtures that it was the first to
ask for. How busy the machine is changes it little, unlike the time on the wall.
"""

from __future__ import annotations

import resource
from collections.abc import Generator
from typing import Any

import pytest

_NAME = "processor_s"


def processor_s() -> float:
    """User and system time so far."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


class Dearest:
    """A plugin of pytest, in the processes of tests and in the one that reports."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._began_s = 0.0
        self._tests: list[tuple[float, str]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self._began_s = processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((_NAME, processor_s() - self._began_s))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests += [
            (value, report.nodeid)
            for name, value in report.user_properties
            if name == _NAME and isinstance(value, float)
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total_s = sum(value for value, _ in self._tests)
        terminalreporter.section(f"{total_s:.0f} processor seconds in {len(self._tests)} tests")
        files: dict[str, float] = {}
        for value, name in self._tests:
            file = name.partition("::")[0]
            files[file] = files.get(file, 0.0) + value
        for each in ([(value, name) for name, value in files.items()], self._tests):
            for value, name in sorted(each, reverse=True)[: self._count]:
                terminalreporter.write_line(f"{value:8.2f} s  {name}")
