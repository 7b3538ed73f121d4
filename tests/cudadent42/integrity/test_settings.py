"""Settings are everybody's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from cudadent42.integrity import settings
from cudadent42.integrity.watch import Watch
from cudadent42.model.integrity import Breach, Finding, Grade


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = settings.read()
    yield
    settings.write(before)


def test_every_setting_can_be_put_back() -> None:
    before = settings.read()
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.cuda.enable_flash_sdp(not torch.backends.cuda.flash_sdp_enabled())
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    changed = settings.changes(before, settings.read())
    assert set(changed) == {
        "torch.set_num_threads",
        "flash_sdp",
        "torch.set_default_dtype",
        "torch.use_deterministic_algorithms",
        "allow_bf16_reduced_precision_reduction",
    }
    assert "torch.set_default_dtype torch.float32 -> torch.float64" in settings.in_words(changed)
    settings.write(before)
    assert settings.read() == before


def test_each_has_its_own_turn_by_turn() -> None:
    findings: list[Finding] = []
    watch = Watch()
    watch.begin({"baseline"}, findings.append)
    threads = torch.get_num_threads()
    with watch.loading("mine"):
        torch.set_num_threads(threads + 2)
    assert torch.get_num_threads() == threads
    with watch.counted_turn("baseline"):
        assert torch.get_num_threads() == threads
    with watch.counted_turn("mine"):
        assert torch.get_num_threads() == threads + 2
    assert torch.get_num_threads() == threads
    assert not findings
    assert any("torch.set_num_threads" in note for note in watch.notes())


def test_what_a_counted_call_leaves_is_found_once() -> None:
    findings: list[Finding] = []
    watch = Watch()
    watch.begin((), findings.append)
    threads = torch.get_num_threads()
    for step in (1, 2):
        with watch.counted_turn("mine", "case"):
            torch.set_num_threads(threads + step)
    assert [(each.breach, each.grade, each.implementation) for each in findings] == [
        (Breach.LEFT_SETTINGS, Grade.SUSPECT, "mine")
    ]
    assert "put them back" in findings[0].line
    assert torch.get_num_threads() == threads


def test_what_a_turn_left_that_nobody_looked_at_is_blamed_on_who_does_it_again() -> None:
    findings: list[Finding] = []
    watch = Watch()
    watch.begin((), findings.append)
    threads = torch.get_num_threads()
    with watch.counted_turn("mine", look=False):
        torch.set_num_threads(threads + 1)
    with watch.counted_turn("honest", look=True):
        assert torch.get_num_threads() == threads
    assert not findings
    with watch.counted_turn("mine", look=False):  # from now on each is looked at
        torch.set_num_threads(threads + 1)
    with watch.counted_turn("honest", look=False):
        assert torch.get_num_threads() == threads
    assert {each.implementation for each in findings} == {"mine"}


class EqualsAll:
    """As a candidate may leave behind."""

    def __call__(self, *arguments: object) -> None:
        return

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_nobody_is_asked_whether_he_equals_what_was_there() -> None:
    before = settings.read()
    gc.callbacks.append(EqualsAll())
    try:
        first = settings.read()
        gc.callbacks[-1] = EqualsAll()
        assert set(settings.changes(before, first)) == {"gc.callbacks"}
        assert set(settings.changes(first, settings.read())) == {"gc.callbacks"}
        settings.write(before)
        assert settings.same(settings.read(), before)
    finally:
        gc.callbacks[:] = [each for each in gc.callbacks if type(each) is not EqualsAll]


def test_equal_values_that_are_other_objects_are_the_same() -> None:
    before = ((1, 2.5), ["a"], {b"name": b"value"}, frozenset({0, 1}), torch.float32, len)
    again = ((1, 2.5), ["a"], {b"name": b"value"}, frozenset({1, 0}), torch.float32, len)
    assert settings.same(before, again)
    assert not settings.same(before, (*again[:-1], print))
    assert not settings.same((1,), (1.0,))
