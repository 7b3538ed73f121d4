"""Tests that use the GPU together, and those that need it for themselves."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_turns import gpu_turn


def started(folder: Path, inside: Callable[[], None], *, alone: bool) -> threading.Thread:
    def take() -> None:
        with gpu_turn(folder, alone=alone):
            inside()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread


def test_those_that_share_are_inside_together(tmp_path: Path) -> None:
    both = threading.Barrier(2)
    threads = [started(tmp_path, lambda: void(both.wait()), alone=False) for _ in range(2)]
    for thread in threads:
        thread.join()
    assert not both.broken


@pytest.mark.parametrize("other_alone", [False, True])
def test_nobody_is_beside_one_that_is_alone(other_alone: bool, tmp_path: Path) -> None:
    order: list[str] = []
    with gpu_turn(tmp_path, alone=True):
        other = started(tmp_path, lambda: order.append("other"), alone=other_alone)
        other.join(0.2)
        order.append("first")
    other.join()
    assert order == ["first", "other"]


def test_who_waits_to_be_alone_comes_ahead_of_those_that_begin_later(tmp_path: Path) -> None:
    order: list[str] = []
    with gpu_turn(tmp_path, alone=False):
        alone = started(tmp_path, lambda: order.append("alone"), alone=True)
        while not taken(tmp_path / "door"):
            alone.join(0.01)
        later = started(tmp_path, lambda: order.append("later"), alone=False)
        later.join(0.2)
        order.append("first")
    alone.join()
    later.join()
    assert order == ["first", "alone", "later"]


def taken(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def void(_: object) -> None:
    return
