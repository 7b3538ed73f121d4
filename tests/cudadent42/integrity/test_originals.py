"""Functions that are not what was imported are named."""

from __future__ import annotations

import subprocess
import sys
import time
import types

import pytest
import torch

from cudadent42.correctness import norms, truth
from cudadent42.integrity.originals import Originals
from cudadent42.operations.attention import implementations


def names(originals: Originals) -> list[str]:
    return [each.name for each in originals.replaced()]


def test_nothing_is_found_where_nothing_happened() -> None:
    originals = Originals()
    torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3)
    truth.heartbeat(lambda event: None)()
    assert originals.replaced() == []


class Nameless:
    """It says that it is a module, and has nothing of one."""

    __slots__ = ()
    __class__ = types.ModuleType  # type: ignore[assignment]


def without_name() -> types.ModuleType:
    module = types.ModuleType("made.by.somebody")
    del module.__name__
    return module


@pytest.mark.parametrize("name", ["cython.parallel", "cudadent42.not_there"])
@pytest.mark.parametrize("stand_in", [object(), None, Nameless(), without_name()])
def test_objects_may_stand_for_modules(monkeypatch: pytest.MonkeyPatch, stand_in: object, name: str) -> None:
    """As Cython's do, which Liger imports."""
    monkeypatch.setitem(sys.modules, name, stand_in)  # type: ignore[arg-type]
    originals = Originals()
    originals.include_new(kernels=False)
    assert originals.replaced() == []


def test_a_clock_a_constant_a_function_and_one_of_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    originals = Originals()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    monkeypatch.setattr(truth, "ERROR_FACTOR", 1e9)
    monkeypatch.setattr(norms, "error_norms", lambda a, b: None)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda *a: None)
    replaced = {each.name: each.of_lab for each in originals.replaced()}
    assert replaced == {
        "time.perf_counter_ns": True,
        "cudadent42.correctness.truth.ERROR_FACTOR": True,
        "cudadent42.correctness.norms.error_norms": True,
        "torch.nn.functional.softmax": False,
    }


def test_other_code_in_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    originals = Originals()

    def other(result: object, reference: object) -> None:
        return

    monkeypatch.setattr(norms.error_norms, "__code__", other.__code__)
    assert "cudadent42.correctness.norms.error_norms" in names(originals)


def test_a_frozen_record_that_was_written_to() -> None:
    originals = Originals()
    record, prepare = implementations.ALL[0], implementations.ALL[0].prepare
    object.__setattr__(record, "prepare", lambda case, inputs: None)
    try:
        assert "cudadent42.operations.attention.implementations.ALL[0].prepare" in names(originals)
    finally:
        object.__setattr__(record, "prepare", prepare)
    assert originals.replaced() == []


def test_what_pytorch_counts_with_is_its_own_and_its_functions_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    originals = Originals()
    monkeypatch.setattr(torch.cuda, "_initialized", not torch.cuda._initialized)
    monkeypatch.setattr(torch.cuda, "default_generators", ("one of a GPU",))
    assert originals.replaced() == []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert names(originals) == ["torch.cuda.synchronize"]


@pytest.mark.usefixtures("warm_texts")
def test_what_was_written_to_where_it_lies() -> None:
    """In a process of its own: the constant is everybody's."""
    program = """
import ctypes
from cudadent42.correctness import truth
from cudadent42.integrity.originals import Originals
originals = Originals()
print([each.name for each in originals.rewritten()])
ctypes.c_double.from_address(id(truth.ERROR_FACTOR) + 16).value = 1e6
print([each.name for each in originals.replaced()])
print([each.name for each in originals.rewritten()])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    untouched, by_identity, by_contents = done.stdout.splitlines()
    assert (untouched, by_identity) == ("[]", "[]")
    assert "cudadent42.correctness.truth.ERROR_FACTOR" in by_contents
