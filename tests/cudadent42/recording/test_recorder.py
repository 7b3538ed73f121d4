"""Calls are counted, timed and described as they are, and come out as they would without a recorder."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recordings import SOURCE, only, record, ticking
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flashmoe_science
from cudadent42.recording import seen
from cudadent42.recording.clock import SharedClock
from cudadent42.recording.context import recorded
from cudadent42.recording.recorder import Recorder
from cudadent42.recording.suite import suites
from cudadent42.suites.loader import parse_suite

# ---------------------------------------------------------------- who calls, and when


def qkv(*shape: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(*(shape or (1, 2, 8, 16)), **options) for _ in range(3))  # type: ignore[return-value]


def test_time_is_the_call_s_own_and_the_recorder_s_is_told_apart() -> None:
    query, key, value = qkv()
    now = 0.0

    def clock() -> float:
        return now

    original = functional.scaled_dot_product_attention

    def slow(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal now
        now += 2.0
        return original(*arguments, **options)

    def script() -> None:
        nonlocal now
        for _ in range(3):
            functional.scaled_dot_product_attention(query, key, value)
            now += 5.0  # the rest of the script

    functional.scaled_dot_product_attention = slow
    try:
        recording, _ = record(script, clock)
    finally:
        functional.scaled_dot_product_attention = original
    group = only(recording)
    assert (recording.seconds, group.calls, group.seconds, group.squares) == (21.0, 3, 6.0, 12.0)
    assert recording.own_seconds == 0.0
    ticked, _ = record(script, ticking())
    assert ticked.own_seconds > 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=40))
def test_overlapping_calls_share_the_clock(steps: list[tuple[int, int]]) -> None:
    """Any order of beginnings and ends: together the calls take what passed while at least one ran."""
    now, busy, total = 0.0, 0.0, 0.0
    clock = SharedClock(lambda: now)
    running: dict[int, float] = {}
    for call, passes in steps:
        if call in running:
            total += clock.end(running.pop(call))
        else:
            running[call] = clock.begin()
        now += passes
        busy += passes if running else 0
    for began in running.values():
        total += clock.end(began)
    assert total == pytest.approx(busy)


def test_threads_are_all_seen() -> None:
    query, key, value = qkv()
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for _ in range(25):
            functional.scaled_dot_product_attention(query, key, value)

    def script() -> None:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    recording, _ = record(script)
    assert only(recording).calls == 100
    assert only(recording).seconds <= recording.seconds


def test_no_tensor_is_kept() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def script() -> None:
        query, key, value = qkv(requires_grad=True)
        output = functional.scaled_dot_product_attention(query, key, value)
        output.sum().backward()
        kept.extend(weakref.ref(each) for each in (query, key, value, output))

    recorder = Recorder()
    with recorded(recorder):
        script()
        gc.collect()
        assert [each() for each in kept] == [None] * 4
    assert only(recorder.recording()).backward_calls == 1


def test_a_takeover_is_seen_as_ours_and_what_it_declines_as_pytorch_s() -> None:
    query, key, value = qkv()

    def script() -> None:
        with flashmoe_science.sdpa():
            functional.scaled_dot_product_attention(query, key, value)
            functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        functional.scaled_dot_product_attention(query, key, value)

    recording, _ = record(script)
    assert sorted((group.ours, str(group.reason), group.calls) for group in recording.groups) == [
        (False, "None", 1),
        (False, "dropout", 1),
        (True, "None", 1),
    ]
    with flashmoe_science.sdpa():  # there before the recorder
        recording, _ = record(lambda: functional.scaled_dot_product_attention(query, key, value))
    assert only(recording).ours


def test_our_own_functions() -> None:
    query, key, value = qkv(requires_grad=True)

    def script() -> None:
        flashmoe_science.flash_attention(query, key, value, causal=True).sum().backward()

    group = only(record(script)[0])
    assert (group.ours, group.gradients, group.calls, group.backward_calls) == (True, True, 1, 1)
    assert group.sizes is not None
    assert group.sizes["causal"] is True


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window": (4, 0)}, "window, which a suite cannot have"),
        ({"softcap": 20.0, "sinks": torch.zeros(2)}, "softcap and sinks, which a suite cannot have"),
        ({"window": (-1, -1), "softcap": 0, "sinks": None}, None),
    ],
)
def test_options_that_no_suite_has_are_counted_with_their_name(
    options: dict[str, Any], reason: str | None
) -> None:
    query, key, value = qkv()
    expected = flashmoe_science.flash_attention(query, key, value, causal=True, **options)
    recording, results = record(
        lambda: flashmoe_science.flash_attention(query, key, value, causal=True, **options)
    )
    group = only(recording)
    assert (group.ours, group.calls, group.reason) == (True, 1, reason)
    assert torch.equal(results, expected)


@pytest.mark.parametrize("name", ["flash_attention", "fused_moe"])
def test_what_a_function_takes_it_takes_while_it_is_recorded(name: str) -> None:
    """Each option by name: a recorder that lists them itself falls behind."""
    original = getattr(flashmoe_science, name)
    parameters = inspect.signature(original).parameters.values()
    tensors = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    options = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert options
    calls: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    replacing = {"flash_attention": seen._flash_attention, "fused_moe": seen._fused_moe}[name]
    recorded_call = replacing(Recorder(), lambda *given, **named: calls.append((given, named)))
    recorded_call(*tensors, **options)
    assert calls == [(tuple(tensors), options)]


def test_a_composed_backward_pass_is_all_of_its_nodes() -> None:
    query, key, value = qkv(requires_grad=True)

    def script() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            functional.scaled_dot_product_attention(query * 2, key * 2, value * 2).sum().backward()

    recording, _ = record(script)
    group = only(recording)
    assert group.reason == "torch.nn.attention.sdpa_kernel asks for others"
    assert group.backward_calls == 1
    assert group.backward_seconds > 0


def test_checkpoints_call_again() -> None:
    query, key, value = qkv(requires_grad=True)

    def layer(query: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value).sin()

    def script() -> None:
        output = checkpoint(layer, query, use_reentrant=False)
        assert isinstance(output, torch.Tensor)
        output.sum().backward()

    group = only(record(script)[0])
    assert (group.calls, group.backward_calls) == (2, 1)


def test_autocast_s_dtype_is_the_problem_s() -> None:
    query, key, value = qkv()

    def script() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            functional.scaled_dot_product_attention(query, key, value)

    group = only(record(script)[0])
    assert (group.dtype, group.reason) == ("bf16", None)


def test_what_fails_is_not_counted_and_fails_as_before() -> None:
    query = torch.randn(1, 2, 8, 16)

    def script() -> None:
        with pytest.raises(RuntimeError):
            functional.scaled_dot_product_attention(query, query[..., :8], query)
        functional.scaled_dot_product_attention(query, query, query)

    assert sum(group.calls for group in record(script)[0].groups) == 1


def wrong_calls() -> list[Callable[[], Any]]:
    query, sdpa = torch.randn(1, 2, 8, 16), functional
    ids = torch.zeros(8, 2, dtype=torch.int64)
    return [
        lambda: sdpa.scaled_dot_product_attention(query, query, 3),  # type: ignore[arg-type]
        lambda: sdpa.scaled_dot_product_attention(None, query, query),  # type: ignore[arg-type]
        lambda: sdpa.scaled_dot_product_attention(query, query, query, [1]),  # type: ignore[arg-type]
        lambda: sdpa.scaled_dot_product_attention(query, query, query, scale="x"),  # type: ignore[arg-type]
        lambda: flashmoe_science.flash_attention(query[0], query, query),
        lambda: flashmoe_science.flash_attention(query, query, query, softmax_scale="x"),  # type: ignore[arg-type]
        lambda: flashmoe_science.fused_moe(query, query, query[0, 0], query, ids),
        lambda: flashmoe_science.fused_moe(
            query[0, 0], query[0], query[0], query[0, 0], ids, activation="no"
        ),
        lambda: flashmoe_science.fused_moe(query[0, 0], query[0], query[0], query[0, 0], None),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("number", range(len(wrong_calls())))
def test_wrong_calls_say_what_they_say_without_a_recorder(number: int) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011 whatever it is
        wrong_calls()[number]()
    recorder = Recorder()
    with recorded(recorder), pytest.raises(type(expected.value)) as raised:
        wrong_calls()[number]()
    assert str(raised.value).partition("(")[2] == str(expected.value).partition("(")[2]
    assert recorder.recording().groups == ()


@pytest.mark.parametrize("kind", ["nested", "subclass", "vmap"])
def test_tensors_that_are_not_plain(kind: str) -> None:
    query, _, _ = qkv()
    sdpa = functional.scaled_dot_product_attention

    def script() -> Any:
        if kind == "nested":
            nested = torch.nested.nested_tensor([query[0], query[0]])
            return functional.scaled_dot_product_attention(nested, nested, nested)
        if kind == "vmap":
            return torch.func.vmap(lambda each: functional.scaled_dot_product_attention(each, each, each))(
                query[None]
            )
        mine = query.as_subclass(Mine)
        return functional.scaled_dot_product_attention(mine, mine, mine)

    group = only(record(script)[0])
    assert group.reason in ("nested tensor", "a transform of torch.func", "tensor subclass")
    assert functional.scaled_dot_product_attention is sdpa


class Mine(torch.Tensor):
    pass


def test_names_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a module took, before and inside."""
    import sys

    from cudadent42.recording import recorder

    sdpa, ours = functional.scaled_dot_product_attention, flashmoe_science.flash_attention
    module = type(sys)("by_name")
    module.mine = sdpa  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "by_name", module)
    query, key, value = qkv()

    def script() -> None:
        module.mine(query, key, value)  # type: ignore[attr-defined]
        module.later = functional.scaled_dot_product_attention  # type: ignore[attr-defined]
        module.later(query, key, value)

    recording, _ = record(script)
    assert only(recording).calls == 2
    assert module.mine is module.later is functional.scaled_dot_product_attention is sdpa  # type: ignore[attr-defined]
    assert flashmoe_science.flash_attention is ours
    assert torch._C._nn.scaled_dot_product_attention is sdpa
    assert recorder.torch is torch


def test_what_is_explained_is_the_function_itself() -> None:
    query, key, value = qkv()
    expected = flashmoe_science.explain(flashmoe_science.flash_attention, query, key, value)
    _, explained = record(
        lambda: flashmoe_science.explain(flashmoe_science.flash_attention, query, key, value)
    )
    assert explained == expected


def test_graphs_of_torch_compile_are_named_and_still_right() -> None:
    query, key, value = qkv()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value) + 1

    expected = attend(query, key, value)

    def script() -> torch.Tensor:
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        for _ in range(3):
            output = compiled(query, key, value)
        return output

    recording, output = record(script)
    torch._dynamo.reset()
    assert torch.equal(expected, output)
    assert recording.traced >= 1
    assert any("traced by torch.compile" in note for note in suites([recording], SOURCE, "x").notes)


def test_a_script_that_is_scripted() -> None:
    query, key, value = qkv()

    def script() -> torch.Tensor:
        return torch.jit.script(scriptable)(query, key, value)

    assert torch.equal(record(script)[1], scriptable(query, key, value))


def test_what_was_registered_for_scripts_is_taken_back() -> None:
    before = dict(torch.jit._builtins._get_builtin_table())
    record(lambda: None)
    assert torch.jit._builtins._get_builtin_table() == before


def test_calls_that_differ_in_what_a_suite_cannot_have_are_told_apart() -> None:
    from flashmoe_science.quantized import quantized

    tokens, w13, w2 = torch.randn(2, 32), torch.randn(4, 64, 32), torch.randn(4, 32, 32)
    weights, ids = torch.rand(2, 2), torch.zeros(2, 2, dtype=torch.int32)
    (narrow13, scales13), (narrow2, scales2) = (quantized(each, bits=8, group=32) for each in (w13, w2))

    def script() -> None:
        flashmoe_science.fused_moe(tokens, w13, w2, weights, ids)
        flashmoe_science.fused_moe(tokens, w13, w2, weights, ids, w13_layout="interleaved")
        flashmoe_science.fused_moe(tokens, w13, w2, weights, ids, w2_bias=torch.ones(4, 32))
        flashmoe_science.fused_moe(
            tokens, narrow13, narrow2, weights, ids, w13_scales=scales13, w2_scales=scales2
        )

    recording, _ = record(script)
    assert {str(group.reason).partition(",")[0] for group in recording.groups} == {
        "None",
        "interleaved weights",
        "biases of experts",
        "quantised weights",
    }


def scriptable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("empty", ["attention", "experts"])
def test_an_empty_tensor_leaves_the_rest_of_the_suite_usable(empty: str) -> None:
    query, key, value = qkv()
    tokens, ids = torch.randn(0, 32), torch.zeros(0, 2, dtype=torch.int32)

    def script() -> None:
        functional.scaled_dot_product_attention(query, key, value)
        if empty == "attention":
            functional.scaled_dot_product_attention(query[:, :, :0], key, value)
        else:
            w13, w2 = torch.randn(4, 64, 32), torch.randn(4, 32, 32)
            flashmoe_science.fused_moe(tokens, w13, w2, ids.float(), ids)

    recording, _ = record(script)
    assert sorted(str(group.reason) for group in recording.groups) == ["None", "an empty tensor"]
    (text,) = suites([recording], SOURCE, "x").texts.values()
    assert len(parse_suite(text, "x").shapes) == 1
