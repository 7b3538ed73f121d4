"""Calls of attention_varlen that are like the one before: recognised, and never taken for another."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from varlen_cases import Shape, bounds, forget_calls, packed, paged

from flashmoe_science import InputError, attention_varlen
from flashmoe_science.cpu import varlen as cpu
from flashmoe_science.varlen import launch
from flashmoe_science.varlen.problem import Problem, Run

SHAPE = Shape(queries=(1, 1, 1), keys=(5, 40, 2))


@pytest.fixture(autouse=True)
def nothing_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_calls(monkeypatch)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A call that was not recognised appears here."""
    calls: list[object] = []
    signature_of = launch.signature_of

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return signature_of(*arguments)

    monkeypatch.setattr(launch, "signature_of", counted)
    return calls


def attend(call: dict[str, Any], **options: Any) -> Any:
    return attention_varlen(**{**bounds(SHAPE), **call, **options})


def afresh(call: dict[str, Any], **options: Any) -> Any:
    """The same by the look-up."""
    launch.of_thread.recent.clear()
    return attend(call, **options)


def test_layers_of_a_step_are_looked_up_once(looked_up: list[object]) -> None:
    layers = [paged(SHAPE, 16, seed) for seed in range(4)]
    results = [attend(layer) for layer in layers]
    assert len(looked_up) == 1
    for result, layer in zip(results, layers, strict=True):
        assert torch.equal(result, afresh(layer))


def test_layers_of_two_kinds_in_turn_are_looked_up_once_each(looked_up: list[object]) -> None:
    call, sinks = paged(SHAPE, 16), torch.randn(4)
    for _ in range(3):
        attend(call)
        attend(call, window=(3, 0), sinks=sinks)
    assert len(looked_up) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": (3, 0)},
        {"softcap": 2.0},
        {"softmax_scale": 0.5},
        {"split_keys": 128},
        {"return_lse": True},
        {"sinks": torch.zeros(4)},
        {"alibi_slopes": torch.ones(4)},
        {"max_seqlen_k": 64},
        {"out": torch.full((3, 4, 32), torch.nan)},
    ],
)
def test_another_call_is_not_taken_for_the_last_one(options: dict[str, Any], looked_up: list[object]) -> None:
    call = paged(SHAPE, 16)
    attend(call)
    changed = attend(call, **options)
    assert len(looked_up) == 2
    expected = afresh(call, **options)
    again = attend(call, **options)
    assert len(looked_up) == 3
    for one, other in ((changed, expected), (again, expected)):
        for a, b in zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]:
            assert torch.equal(a, b)


def test_sinks_are_not_taken_for_slopes(looked_up: list[object]) -> None:
    call, numbers = paged(SHAPE, 16), torch.rand(4)
    with_sinks = attend(call, sinks=numbers)
    with_slopes = attend(call, alibi_slopes=numbers)
    assert len(looked_up) == 2
    assert not torch.equal(with_sinks, with_slopes)


@pytest.mark.parametrize(
    "shape",
    [
        Shape((1, 1), (5, 40)),
        Shape((2, 1, 1), (5, 40, 2)),
        Shape(SHAPE.queries, SHAPE.keys, heads=8),
        Shape(SHAPE.queries, SHAPE.keys, head_dim=64),
        Shape(SHAPE.queries, SHAPE.keys, dtype=torch.bfloat16),
    ],
)
def test_other_shapes_are_others(shape: Shape, looked_up: list[object]) -> None:
    attend(paged(SHAPE, 16))
    call = paged(shape, 16)
    result = attend(call, **bounds(shape))
    assert len(looked_up) == 2
    assert torch.equal(result, afresh(call, **bounds(shape)))


def test_lengths_that_change_in_place_are_read_anew(looked_up: list[object]) -> None:
    call = paged(SHAPE, 16)
    attend(call)
    call["seqused_k"].copy_(torch.tensor([1, 7, 2], dtype=torch.int32))
    result = attend(call)
    assert len(looked_up) == 1
    assert torch.equal(result, afresh(call))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log-sum-exp": {"return_lse": True},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.3]), "window": (7, 0)},
    "a row of slopes for each sequence": {"alibi_slopes": torch.arange(12.0).view(3, 4) / 12},
    "a tree": {"tree_mask": torch.ones(3, dtype=torch.int64)},
    "all": {
        "return_lse": True,
        "sinks": torch.ones(4),
        "tree_mask": torch.ones(3, dtype=torch.int64),
        "softcap": 5.0,
        "split_keys": 128,
    },
}


@pytest.mark.parametrize("keys", [packed, lambda shape: paged(shape, 16)], ids=["packed", "paged"])
@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_repeated_calls_of_every_kind_are_those_of_the_look_up(
    options: dict[str, Any], own_output: bool, keys: Any, looked_up: list[object]
) -> None:
    call = keys(SHAPE)
    expected = attend(call, **options)
    more = {"out": torch.full((3, 4, 32), torch.nan)} if own_output else {}
    attend(call, **options, **more)
    looked_up.clear()
    for _ in range(2):
        if own_output:
            more["out"].fill_(torch.nan)
        repeated = attend(call, **options, **more)
        for one, other in zip(
            repeated if isinstance(repeated, tuple) else [repeated],
            expected if isinstance(expected, tuple) else [expected],
            strict=True,
        ):
            assert torch.equal(one, other)
    assert looked_up == []


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "cu_seqlens_q", "block_table", "seqused_k", "sinks", "tree_mask", "out"]
)
def test_memory_that_was_freed_is_named_in_a_repeated_call(name: str, looked_up: list[object]) -> None:
    more = {
        "sinks": torch.ones(4),
        "tree_mask": torch.ones(3, dtype=torch.int64),
        "out": torch.empty(3, 4, 32),
    }
    call = {**paged(SHAPE, 16), **more}
    attend(call)
    looked_up.clear()
    gone = call[name].clone()
    gone.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="has no memory"):
        attend({**call, name: gone})
    assert looked_up == []
    attend(call)


def test_a_call_that_may_be_repeated_keeps_what_it_reads() -> None:
    call = paged(SHAPE, 16)
    expected = attend(call)
    launch._runs.clear()
    gc.collect()
    filler = [cpu._Problem(heads=1 << 40) for _ in range(64)] + [cpu._Repeat(given=99) for _ in range(64)]
    assert torch.equal(attend(call), expected)
    assert len(filler) == 128


def test_a_length_outside_the_pages_is_refused_in_a_repeated_call() -> None:
    call = paged(SHAPE, 16)
    attend(call)
    call["seqused_k"].fill_(1000)
    with pytest.raises(InputError, match="seqused_k"):
        attend(call)


def test_a_result_is_new_memory_each_time_unless_out_is_given() -> None:
    call = packed(SHAPE)
    first, second = attend(call), attend(call)
    assert first.data_ptr() != second.data_ptr()
    out = torch.empty_like(first)
    for _ in range(2):
        assert attend(call, out=out) is out
        assert torch.equal(out, first)
        out.fill_(torch.nan)


def test_parameters_without_gradients_are_recognised_and_with_them_refused(looked_up: list[object]) -> None:
    call, sinks = paged(SHAPE, 16), torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        results = [attend(call, sinks=sinks) for _ in range(3)]
    assert len(looked_up) == 1
    assert torch.equal(results[0], results[2])
    with pytest.raises(InputError, match="requires a gradient"):
        attend(call, sinks=sinks)


def test_what_records_or_differentiates_is_not_passed_over(looked_up: list[object]) -> None:
    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.seen += "attention_varlen" in str(function)
            return function(*args, **(kwargs or {}))

    call = paged(SHAPE, 16)
    attend(call)
    with Counting():
        attend(call)
    assert Counting.seen == 1
    with forward_ad.dual_level(), pytest.raises(InputError, match="no forward-mode derivative"):
        attend({**call, "query": forward_ad.make_dual(call["query"], call["query"])})


def test_threads_have_calls_of_their_own(looked_up: list[object]) -> None:
    call, results = paged(SHAPE, 16), []
    for _ in range(2):
        thread = threading.Thread(target=lambda: results.extend((attend(call), attend(call))))
        thread.start()
        thread.join()
    assert len(looked_up) == 2
    assert all(torch.equal(result, results[0]) for result in results)


def test_options_that_cannot_be_hashed_are_refused_in_words() -> None:
    call = paged(SHAPE, 16)
    attend(call)
    with pytest.raises(InputError, match="window is"):
        attend(call, window=[3, 0])


def test_ten_thousand_growing_steps_make_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, their bounds, the batch and the number of pages change from step to step."""
    made: list[Problem] = []

    def prepare(problem: Problem, device: torch.device) -> Run:
        made.append(problem)
        return lambda tensors, sizes: None

    monkeypatch.setattr(launch.cpu, "prepare", prepare)
    key = torch.zeros(700, 16, 2, 32)
    query, table = torch.zeros(8, 4, 32), torch.zeros(8, 700, dtype=torch.int32)
    starts, used = torch.arange(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    for step in range(1, 10_001):
        batch, pages = step % 8 + 1, -(-step // 16)
        attention_varlen(
            query[:batch],
            key[:pages],
            key[:pages],
            cu_seqlens_q=starts[: batch + 1],
            max_seqlen_q=1,
            max_seqlen_k=step,
            block_table=table[:batch, :pages],
            seqused_k=used[:batch],
        )
    assert len(made) == 1
    assert len(launch._runs) == 1
    assert len(launch.of_thread.recent) == 1
