"""Calls that a thread has made ready, as far as they can be had on CPU tensors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from flashmoe_science import alike
from flashmoe_science.cuda import calls as module
from flashmoe_science.cuda import repeat
from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.errors import InputError


class Device:
    """In the place of `torch.cuda.device`."""

    entered = 0

    def __init__(self, index: int) -> None:
        pass

    def __enter__(self) -> None:
        Device.entered += 1

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Device.entered = 0
    monkeypatch.setattr(module, "current_device", lambda: -1)  # that of CPU tensors
    monkeypatch.setattr(torch.cuda, "device", Device)


class Recorder:
    """An operation that says what it was asked."""

    def __init__(self) -> None:
        self.checked: list[Options] = []
        self.prepared: list[tuple[tuple[int, ...], Options]] = []

    def check(self, tensors: Tensors, options: Options) -> None:
        self.checked.append(options)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise InputError("expected tensors")

    def prepare(self, tensors: Tensors, options: Options, device: int) -> repeat.Call:
        self.prepared.append((tuple(tensors[0].shape), options))
        return lambda *given: (len(given), options)

    def calls(self, **more: Any) -> Calls:
        return Calls(self.check, self.prepare, options=1, **more)


def pair(rows: int = 2) -> Tensors:
    return torch.zeros(rows, 3), torch.zeros(rows, 3)


def test_a_combination_is_checked_and_prepared_once() -> None:
    recorder = Recorder()
    calls = recorder.calls()
    for _ in range(3):
        assert calls(pair(), ("a",)) == (2, ("a",))
    assert recorder.prepared == [((2, 3), ("a",))]
    assert len(recorder.checked) == 1
    assert Device.entered == 1


def test_other_shapes_options_and_numbers_of_tensors_are_other_calls() -> None:
    recorder = Recorder()
    calls = recorder.calls()
    for _ in range(2):
        assert calls(pair(), ("a",)) == (2, ("a",))
        assert calls(pair(), ("b",)) == (2, ("b",))
        assert calls(pair(4), ("b",)) == (2, ("b",))
        assert calls(pair()[:1], ("a",)) == (1, ("a",))
        assert calls((*pair(), torch.zeros(1)), ("a",)) == (3, ("a",))
    assert len(recorder.prepared) == 5


def test_the_last_call_is_recognised_without_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    if alike.matcher(*pair()) is alike.never:
        pytest.skip("this torch has no TensorGuards, or others than known")
    calls = Recorder().calls()
    calls(pair(), ("a",))  # prepared
    calls(pair(), ("a",))  # by its signature, and kept as the last
    monkeypatch.setattr(module, "signature_of", lambda *given: pytest.fail("a signature was built"))
    assert calls(pair(), ("a",)) == (2, ("a",))


def test_calls_that_are_not_to_be_repeated_are_looked_up() -> None:
    calls = Recorder().calls(repeated=lambda options: options[0] is None)
    for _ in range(2):
        calls(pair(), ("a",))
    assert calls.recent[-2] is alike.never


def test_no_tensors_are_said_by_the_check() -> None:
    with pytest.raises(InputError, match="expected tensors"):
        Recorder().calls()((None, None), ("a",))  # type: ignore[arg-type]


def test_no_more_calls_are_kept_than_asked() -> None:
    calls = Recorder().calls(most=3)
    for rows in range(1, 9):
        calls(pair(rows), ("a",))
        assert len(calls.ready) <= 3


def test_every_thread_has_its_own() -> None:
    recorder = Recorder()
    calls = recorder.calls()
    calls(pair(), ("a",))
    other = threading.Thread(target=lambda: calls(pair(), ("a",)))
    other.start()
    other.join()
    assert len(recorder.prepared) == 2
