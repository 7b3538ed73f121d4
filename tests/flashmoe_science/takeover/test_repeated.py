"""A CUDA call like the last one that was taken is recognised by one comparison; another is asked about again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flashmoe_science.cuda.attention.forward import calls
from flashmoe_science.takeover import attention, repeated
from flashmoe_science.takeover.repeated import remember, repeat

RESULT = torch.zeros(1)


class Recent:
    """What `calls` would keep after a call with these options, with tensors of one shape."""

    def __init__(self, causal: bool = False, scale: float | None = None) -> None:
        self.tensors = tuple(torch.zeros(1, 2, 3, 8) for _ in range(3))
        self.called = 0
        self.tuple = (3, causal, scale, False, None, self._matches, self._call)

    def _matches(self, *tensors: torch.Tensor) -> bool:
        return all(each.shape == (1, 2, 3, 8) for each in tensors)

    def _call(self, *tensors: torch.Tensor) -> Any:
        self.called += 1
        return RESULT, None


@pytest.fixture
def recent(monkeypatch: pytest.MonkeyPatch) -> Recent:
    made = Recent()
    monkeypatch.setattr(calls, "recent", made.tuple)
    monkeypatch.setattr(repeated, "_taken", repeated._Taken())
    return made


def again(recent: Recent, causal: bool = False, scale: float | None = None, grouped: bool = True) -> Any:
    return repeat(*recent.tensors, causal=causal, scale=scale, grouped=grouped)


def taken(recent: Recent) -> Recent:
    remember(*recent.tensors, causal=False, scale=None, grouped=True)
    return recent


def test_what_was_not_asked_about_is_not_repeated(recent: Recent) -> None:
    """A call of `flash_attention` itself says nothing of what the takeover may take."""
    assert again(recent) is None
    assert again(taken(recent)) is RESULT


def test_another_call_in_between_ends_it(recent: Recent, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(recent)
    monkeypatch.setattr(calls, "recent", Recent().tuple)
    assert again(recent) is None


@pytest.mark.parametrize("other", [{"causal": True}, {"scale": 0.5}, {"grouped": False}])
def test_other_options_are_another_call(recent: Recent, other: dict[str, Any]) -> None:
    assert again(taken(recent), **other) is None


def test_a_scale_is_compared_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = Recent(scale=0.125)
    monkeypatch.setattr(calls, "recent", recent.tuple)
    monkeypatch.setattr(repeated, "_taken", repeated._Taken())
    remember(*recent.tensors, causal=False, scale=float("0.125"), grouped=True)
    assert again(recent, scale=float("0.125")) is RESULT
    assert again(recent, scale=float("nan")) is None


def test_other_tensors_are_another_call(recent: Recent) -> None:
    query, _, value = taken(recent).tensors
    longer = torch.zeros(1, 2, 4, 8)
    assert repeat(query, longer, value, causal=False, scale=None, grouped=True) is None
    remember(query, longer, value, causal=False, scale=None, grouped=True)
    assert again(recent) is RESULT  # what does not match the last call is not remembered


def test_a_mode_and_forward_differentiation_see_the_call(recent: Recent) -> None:
    taken(recent)

    class Watches(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            return function(*arguments, **(named or {}))

    with Watches():
        assert again(recent) is None
    with torch.autograd.forward_ad.dual_level():
        assert again(recent) is None
    assert again(recent) is RESULT


def test_the_takeover_asks_nothing_else_of_such_a_call(
    recent: Recent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: Any, **options: Any) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(attention, "why_not", asked)
    output = attention.attempt(
        *taken(recent).tensors, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, grouped=True
    )
    assert output is RESULT
    with pytest.raises(AssertionError, match="asked again"):
        attention.attempt(
            *recent.tensors,
            attn_mask=torch.ones(3, 3, dtype=torch.bool),
            dropout_p=0.0,
            is_causal=False,
            scale=None,
            grouped=True,
        )
