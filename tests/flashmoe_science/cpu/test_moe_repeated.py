"""Calls of fused_moe and topk_routing on the CPU that are like the last one: recognised, and taken for no other."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from moe_reference import make_moe

from flashmoe_science import InputError, alike, fused_moe, topk_routing
from flashmoe_science.cpu import moe, routing

Tensors = list[torch.Tensor]


def experts(tokens: int = 5, *, seed: int = 0) -> Tensors:
    return list(make_moe(tokens, 32, 48, 4, 2, seed=seed).tensors)


def biases() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "w13_bias": torch.randn(4, 96, generator=generator),
        "w2_bias": torch.randn(4, 32, generator=generator),
    }


def logits(tokens: int = 5, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def nothing_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    if alike.matcher(torch.zeros(2), torch.zeros(2)) is alike.never:
        pytest.skip("this torch has no TensorGuards, or others than ours")
    monkeypatch.setattr(moe, "_thread", moe._OfThread())
    monkeypatch.setattr(moe, "_plans", {})
    monkeypatch.setattr(routing, "_thread", routing._OfThread())
    monkeypatch.setattr(routing, "_repeats", {})


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A call that was not recognised appears here."""
    calls: list[object] = []

    def counted(function: Callable[..., None]) -> Callable[..., None]:
        def remember(*arguments: Any) -> None:
            calls.append(arguments)
            function(*arguments)

        return remember

    for module in (moe, routing):
        monkeypatch.setattr(module, "_remember", counted(module._remember))
    return calls


def equal(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}, {"w13_layout": "interleaved"}, biases()])
def test_layers_of_a_kind_are_looked_up_once(options: dict[str, Any], looked_up: list[object]) -> None:
    layers = [experts(seed=seed) for seed in range(3)]
    results = [fused_moe(*layer, **options) for layer in layers]
    assert len(looked_up) == 1
    for layer, result in zip(layers, results, strict=True):
        assert torch.equal(result, fused_moe(*layer, **options, out=torch.empty_like(result)))
    assert len({result.data_ptr() for result in results}) == 3


def test_another_call_of_experts_is_not_taken_for_the_last_one() -> None:
    layer = experts()
    plain = fused_moe(*layer)
    others: list[dict[str, Any]] = [{"activation": "gelu"}, {"w13_layout": "interleaved"}, biases()]
    others += [{"w13_bias": biases()["w13_bias"]}, {"w2_bias": biases()["w2_bias"]}]
    for options in others:
        expected = fused_moe(*layer, **options, out=torch.empty_like(plain))
        fused_moe(*layer)
        assert torch.equal(fused_moe(*layer, **options), expected)
        assert not torch.equal(plain, expected)


def test_weights_that_require_gradients_are_repeatable_where_nothing_is_recorded(
    looked_up: list[object],
) -> None:
    layer = experts()
    layer[1] = torch.nn.Parameter(layer[1])
    with torch.no_grad():
        results = [fused_moe(*layer) for _ in range(3)]
    assert len(looked_up) == 1
    recorded = fused_moe(*layer)
    assert recorded.requires_grad
    assert torch.equal(recorded, results[2])
    with pytest.raises(InputError, match="out="):
        fused_moe(*layer, out=torch.empty_like(results[0]))


def test_autocast_casts_experts_after_calls_that_it_did_not() -> None:
    layer = experts()
    for _ in range(2):
        assert fused_moe(*layer).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert fused_moe(*layer).dtype == torch.bfloat16


@pytest.mark.parametrize("index", range(5))
def test_experts_tensors_that_are_refused_are_refused_after_a_good_call(index: int) -> None:
    layer = experts()
    for _ in range(2):
        fused_moe(*layer)
    for strange in (layer[index].mT, layer[index].double().bool(), layer[index].to("meta"), None):
        changed: list[Any] = list(layer)
        changed[index] = strange
        with pytest.raises(InputError):
            fused_moe(*changed)


def test_experts_whose_memory_was_freed_are_named() -> None:
    layer = experts()
    fused_moe(*layer)
    layer[2] = layer[2].clone()
    layer[2].untyped_storage().resize_(0)
    with pytest.raises(InputError, match="w2 has no memory"):
        fused_moe(*layer)


def test_a_call_of_experts_that_may_be_repeated_keeps_what_it_reads() -> None:
    fused_moe(*experts())
    (plan,) = moe._plans.values()
    read = weakref.ref(plan.problem)
    del plan
    moe._plans.clear()
    gc.collect()
    assert read() is not None


ROUTINGS: list[dict[str, Any]] = [
    {},
    {"scores": "sigmoid"},
    {"renormalize": False},
    {"correction_bias": torch.tensor([0.0, 3.0, 0.0, -3.0, 0.0, 0.0, 3.0, 0.0])},
    {"scaling_factor": 2.5},
    {"groups": 4, "top_groups": 2},
    {"k": 3},
]


@pytest.mark.parametrize("options", ROUTINGS)
def test_routings_of_a_kind_are_looked_up_once(options: dict[str, Any], looked_up: list[object]) -> None:
    options = {"k": 2, **options}
    given = [logits(seed=seed) for seed in range(3)]
    results = [topk_routing(each, **options) for each in given]
    assert len(looked_up) == 1
    for each, result in zip(given, results, strict=True):
        routing._thread = routing._OfThread()
        assert equal(result, topk_routing(each, **options))


def test_another_routing_is_not_taken_for_the_last_one(looked_up: list[object]) -> None:
    given = logits()
    results = [topk_routing(given, **{"k": 2, **options}) for options in ROUTINGS]
    assert len(looked_up) == len(ROUTINGS)
    for number, options in enumerate(ROUTINGS):
        for before in ROUTINGS:
            topk_routing(given, **{"k": 2, **before})
            assert equal(topk_routing(given, **{"k": 2, **options}), results[number])


def test_a_factor_is_compared_by_its_value_and_a_zero_by_its_sign(looked_up: list[object]) -> None:
    given = logits()
    for number in (4, 4):
        topk_routing(given, 2, scaling_factor=1 / number)
    assert len(looked_up) == 1
    for zero in (0.0, -0.0, 0.0, -0.0):
        weights, _ = topk_routing(given, 2, scaling_factor=zero)
        assert {math.copysign(1, weight) for weight in weights.flatten().tolist()} == {math.copysign(1, zero)}


@pytest.mark.parametrize(
    "options",
    [{"k": True}, {"renormalize": 1}, {"groups": True}, {"top_groups": True}, {"scaling_factor": math.nan}],
)
def test_routing_options_that_only_equal_good_ones_are_refused(options: dict[str, Any]) -> None:
    given = logits()
    for _ in range(2):
        topk_routing(given, 1)
    with pytest.raises(InputError):
        topk_routing(given, **{"k": 1, **options})


def test_numpys_numbers_are_taken_as_ever() -> None:
    given, k, renormalize = logits(), np.int64(2), np.True_
    expected = topk_routing(given, 2)
    for _ in range(2):
        assert equal(topk_routing(given, k, renormalize=renormalize), expected)  # type: ignore[arg-type]


def test_logits_that_require_a_gradient_are_recorded_after_calls_that_were_not(
    looked_up: list[object],
) -> None:
    given = logits().requires_grad_()
    with torch.no_grad():
        results = [topk_routing(given, 2) for _ in range(3)]
    assert len(looked_up) == 1
    weights, ids = topk_routing(given, 2)
    assert weights.requires_grad
    assert equal((weights.detach(), ids), results[2])
    assert not topk_routing(given.detach(), 2)[0].requires_grad


@pytest.mark.parametrize("change", [torch.Tensor.t, torch.Tensor.double, torch.Tensor.to_sparse])
def test_logits_that_are_refused_are_refused_after_a_good_call(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    given = logits(8)
    topk_routing(given, 2)
    with pytest.raises(InputError):
        topk_routing(change(given), 2)


def test_a_bias_whose_memory_was_freed_is_named() -> None:
    given, bias = logits(), torch.zeros(8)
    topk_routing(given, 2, correction_bias=bias)
    bias.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="correction_bias has no memory"):
        topk_routing(given, 2, correction_bias=bias)
