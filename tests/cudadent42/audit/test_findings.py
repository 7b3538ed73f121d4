"""What the audit says of a process that somebody changed, and of one that its clock does not count: users read it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from cudadent42.audit.party import DisturbedError, Party, _uncounted
from cudadent42.timing.standing import standings


def test_a_thread_that_is_run_otherwise_than_before() -> None:
    read, write = os.pipe()
    party = Party(os.getpid(), write, read)
    try:
        before = standings(os.getpid())
        party._standings = {task: replace(each, niceness=each.niceness + 7) for task, each in before.items()}
        with pytest.raises(DisturbedError) as told:
            party._check_standing()
    finally:
        party.close()
    words, niceness = str(told.value), os.nice(0)
    assert words.startswith(
        "in the audit somebody changed how a thread of the baseline's process is run: it had "
        f"niceness {niceness + 7}, "
    )
    assert f" before the other side's turn, and niceness {niceness}, " in words
    assert words.endswith(" after it")


def test_processes_that_the_clock_does_not_count() -> None:
    assert str(_uncounted(30_000_000, 1_200_000)) == (
        "its processes ran for 30 ms in the audit, and the audit's clock of all of them counted 1.2 ms: one of them "
        "keeps out of that clock"
    )
