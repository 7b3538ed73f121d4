"""Processes that are forked from a warm interpreter have what they would have had, begun afresh."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

import warm_python

ENTER = [sys.executable, "-m", "cudadent42.sandbox.enter", "{}", "-1"]
WORKER = [sys.executable, "-X", "faulthandler", "-P", "-m", "cudadent42.worker.child", "4", "5"]


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("said", "threads"), [("1", 1), ("3", 3), ("", 2), ("0", 2), ("many", 2)])
@pytest.mark.usefixtures("_threads")
def test_a_process_has_as_many_threads_as_its_environment_says(
    said: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_python, "_threads_at_the_start", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    torch.set_num_threads(5)
    warm_python._take_threads()
    assert torch.get_num_threads() == threads


def test_what_is_confined_is_forked_unless_it_is_to_be_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_python, "_executes_in_sandboxes", False)
    assert warm_python._program([*ENTER, *WORKER], "/") == [*ENTER, *WORKER][1:]
    warm_python.execute_in_sandboxes()
    assert warm_python._program([*ENTER, *WORKER], "/") is None
    assert warm_python._program(WORKER, "/") == WORKER[1:]
