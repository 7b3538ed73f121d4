"""Where workers of this machine work, and what is said where there is no room for them."""

from __future__ import annotations

import os

import pytest
import torch

from cudadent42.base.errors import UsageError
from cudadent42.commands.fleet import engines
from cudadent42.fleet.local import Slot, slots


def test_the_cores_of_a_cpu_are_shared_out() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert slots("cpu", None, "") == (Slot("cpu", tuple(cores)),)


def test_more_workers_than_cores_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(UsageError) as refused:
        engines(f"local:{cores + 1}", "cpu", ignore_preflight=True)
    assert str(refused.value) == (
        f"--fleet local:{cores + 1}: expected no more workers than cores; this machine has {cores}"
    )


@pytest.mark.parametrize("count", ["0", "-1", "two", "²"])
def test_a_number_of_workers_is_1_or_more(count: str) -> None:
    with pytest.raises(UsageError, match=f"expected a number of workers, 1 or more, in place of '{count}'"):
        engines(f"local:{count}", "cpu", ignore_preflight=True)


@pytest.mark.parametrize(
    ("count", "asked", "expected"),
    [
        (None, "--fleet local", "GPUs of one kind"),
        (1, "--fleet local:1", "a GPU"),
        (2, "--fleet local:2", "2 GPUs of one kind"),
        (None, "--device cuda", "GPUs of one kind"),  # of `fleet relay`, which knows no --fleet
    ],
)
def test_an_error_names_what_was_given(
    count: int | None, asked: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError) as refused:
        slots("cuda", count, asked)
    assert str(refused.value) == f"{asked}: expected {expected}; this machine has none"
