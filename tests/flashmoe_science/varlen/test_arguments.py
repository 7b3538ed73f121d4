"""What attention_varlen asks of its arguments, and what a problem is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from varlen_cases import Shape, bounds, forget_calls, packed, paged

from flashmoe_science import DeviceError, InputError, attention_varlen
from flashmoe_science.varlen import launch
from flashmoe_science.varlen.arguments import Inputs, Options, check, check_sizes, signature_of

SHAPE = Shape(queries=(3, 1, 0), keys=(5, 9, 2))
OPTIONS = Options(True, (-1, -1), 0.0, None, None, False)


@pytest.fixture(autouse=True)
def _no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which check refuses a call first depends on whether one of its signature has been made."""
    forget_calls(monkeypatch)


def inputs(call: dict[str, torch.Tensor]) -> Inputs:
    return Inputs(**{name: call.get(name) for name in Inputs._fields})  # type: ignore[arg-type]


def attend(call: dict[str, Any], **options: Any) -> Any:
    return attention_varlen(**{**bounds(SHAPE), **call, **options})


def test_a_problem_holds_no_length_and_no_number_of_sequences() -> None:
    calls = [
        paged(Shape(queries=(count,) * sequences, keys=(length,) * sequences), 16, spare_columns=count)
        for count, sequences, length in ((1, 1, 40), (2, 5, 90), (7, 2, 1))
    ]
    assert len({signature_of(inputs(call), OPTIONS) for call in calls}) == 1
    assert len({check(inputs(call), OPTIONS) for call in calls}) == 1


@pytest.mark.parametrize(
    ("causal", "window", "sides"),
    [
        (True, (-1, -1), (-1, 0)),
        (False, (-1, -1), (-1, -1)),
        (True, (4, 3), (4, 0)),
        (False, (4, 3), (4, 3)),
        (False, (0, -1), (0, -1)),
    ],
)
def test_causal_is_a_window_without_a_right_side(
    causal: bool, window: tuple[int, int], sides: tuple[int, int]
) -> None:
    problem = check(inputs(packed(SHAPE)), OPTIONS._replace(causal=causal, window=window))
    assert (problem.window_left, problem.window_right) == sides


@pytest.mark.parametrize("layout", ["NHD", "HND", "joint", "interleaved"])
def test_strides_describe_every_cache(layout: str) -> None:
    call = paged(SHAPE, 16, layout=layout)
    problem = check(inputs(call), OPTIONS)
    assert problem.key_strides == call["key"].stride()[:3]
    assert problem.value_strides == call["value"].stride()[:3]
    assert problem.page_size == 16
    assert problem.used_keys


def test_strides_that_are_never_used_are_zero() -> None:
    call = paged(Shape(queries=(1,), keys=(3,), heads=1, kv_heads=1), 1)
    problem = check(inputs(call), OPTIONS)
    assert problem.key_strides == (call["key"].stride(0), 0, 0)
    assert problem.query_strides == (call["query"].stride(0), 0)


def changed(call: dict[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
    return {**call, **changes}


PACKED = packed(SHAPE)
PAGED = paged(SHAPE, 4)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (changed(PACKED, query=[1]), {}, "query is a list; expected a torch.Tensor"),
        (changed(PACKED, cu_seqlens_q=None), {}, "cu_seqlens_q is a NoneType"),
        (
            changed(PACKED, query=PACKED["query"][None]),
            {},
            r"query has shape .*expected \(tokens, heads, head_dim\)",
        ),
        (
            changed(PAGED, key=PAGED["key"][0]),
            {},
            r"key has shape .*expected \(pages, page_size, kv_heads, head_dim\)",
        ),
        (changed(PACKED, query=PACKED["query"].double()), {}, "query has dtype torch.float64"),
        (changed(PACKED, key=PACKED["key"].half()), {}, "key is torch.float16 but query is torch.float32"),
        (
            changed(PACKED, query=PACKED["query"].mT.contiguous().mT),
            {},
            "last dimension of query is not contiguous",
        ),
        (changed(PACKED, cu_seqlens_k=None), {}, "neither cu_seqlens_k nor block_table is given"),
        (changed(PAGED, cu_seqlens_k=PACKED["cu_seqlens_k"]), {}, "are both given"),
        (changed(PAGED, seqused_k=None), {}, "block_table is given without seqused_k"),
        (changed(PAGED, key=PAGED["key"][:, :0]), {}, "pages of key hold 0 tokens"),
        (
            changed(PAGED, seqused_k=PAGED["seqused_k"].long()),
            {},
            "seqused_k has dtype torch.int64; expected int32",
        ),
        (changed(PAGED, seqused_k=PAGED["seqused_k"][:2]), {}, r"seqused_k has shape \(2,\).*expected 3"),
        (changed(PAGED, seqused_k=PAGED["seqused_k"][:, None]), {}, r"expected \(batch,\)"),
        (changed(PAGED, block_table=PAGED["block_table"][0]), {}, r"expected \(batch, pages\)"),
        (
            changed(PAGED, block_table=PAGED["block_table"].T.contiguous().T),
            {},
            "of block_table is not contiguous",
        ),
        (changed(PAGED, cu_seqlens_q=PAGED["cu_seqlens_q"][:0]), {}, "cu_seqlens_q is empty"),
        (
            changed(PACKED, value=PACKED["value"][1:]),
            {},
            r"key .* and value .* differ before their last dimension",
        ),
        (
            changed(PACKED, key=PACKED["key"][:, :0], value=PACKED["value"][:, :0]),
            {},
            "cannot share 0 key/value heads",
        ),
        (changed(PACKED, query=PACKED["query"][:, :3]), {}, "3 query heads cannot share 2"),
        (changed(PACKED, key=PACKED["key"][..., :16]), {}, "head_dim 32 but key has 16"),
        (
            changed(PACKED, value=PACKED["value"][..., :12]),
            {},
            "value_dim is 12; expected a multiple of 8 up to 512: pad with zeros",
        ),
        (
            changed(PACKED, value=PACKED["value"].repeat(1, 1, 17)[..., :520]),
            {},
            "value_dim is 520; expected a multiple of 8 up to 512: compose ",
        ),
        (PACKED, {"max_seqlen_q": -1}, "max_seqlen_q is -1"),
        (PACKED, {"max_seqlen_k": PACKED["cu_seqlens_k"][1]}, "max_seqlen_k is a Tensor"),
        (PACKED, {"causal": 1}, "causal is 1"),
        (PACKED, {"window": 4}, "window is 4"),
        (PACKED, {"window": (-2, 0)}, r"window is \(-2, 0\)"),
        (PACKED, {"softcap": -1.0}, "softcap is -1.0"),
        (PACKED, {"softcap": float("nan")}, "softcap is nan"),
        (PACKED, {"softmax_scale": 0.0}, "softmax_scale is 0.0"),
        (PACKED, {"split_keys": 100}, "split_keys is 100; expected a multiple of 128"),
        (PACKED, {"sinks": torch.zeros(3)}, r"sinks has shape \(3,\); expected \(4,\)"),
        (PACKED, {"sinks": torch.zeros(4).half()}, "sinks has dtype torch.float16"),
        (PACKED, {"alibi_slopes": torch.zeros(2, 4)}, r"alibi_slopes has shape \(2, 4\).*expected 3"),
        (PACKED, {"out": torch.zeros(4, 4, 32).half()}, "out is torch.float16"),
        (PACKED, {"out": torch.zeros(5, 4, 32)}, r"out has shape \(5, 4, 32\), but query has 4"),
        (PACKED, {"out": torch.zeros(4, 32, 4).mT}, "last dimension of out is not contiguous"),
        (PACKED, {"out": torch.zeros(1, 1, 32).expand(4, 4, 32)}, "several rows lie in the same memory"),
        (changed(PAGED, seqused_k=torch.tensor(5, dtype=torch.int32)), {}, r"expected \(batch,\)"),
        (changed(PACKED, cu_seqlens_q=torch.tensor(0, dtype=torch.int32)), {}, r"expected \(batch \+ 1,\)"),
        (changed(PACKED, query=PACKED["query"].clone().requires_grad_()), {}, "requires a gradient"),
        (PACKED, {"sinks": torch.zeros(4, requires_grad=True)}, "requires a gradient"),
        (PACKED, {"alibi_slopes": torch.zeros(4, requires_grad=True)}, "requires a gradient"),
        (PACKED, {"out": torch.zeros(4, 4, 32, requires_grad=True)}, "requires a gradient"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    call: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        attend(call, **options)
    assert "\n" not in str(refusal.value)


def test_other_devices_are_refused() -> None:
    call = {name: tensor.to("meta") for name, tensor in PACKED.items()}
    with pytest.raises(DeviceError, match="no kernel of attention_varlen for meta"):
        attend(call)
    with pytest.raises(InputError, match="key is on cpu but query is on meta"):
        attend(changed(call, key=PACKED["key"]))


def test_sizes_are_what_the_host_knows() -> None:
    assert check_sizes(inputs(PAGED), 3, 100) == (3, 3, 100)


def test_gradients_are_refused_after_a_call_without_them() -> None:
    sinks = torch.zeros(4)
    attend(PACKED, sinks=sinks)
    with pytest.raises(InputError, match="requires a gradient"):
        attend(PACKED, sinks=sinks.requires_grad_())
    with torch.no_grad():
        attend(PACKED, sinks=sinks)


@pytest.mark.parametrize("side", [2**31, 2**63 - 1, 2**64 + 1])
@pytest.mark.parametrize("call", [PACKED, PAGED], ids=["packed", "paged"])
def test_no_window_is_too_wide(call: dict[str, torch.Tensor], side: int) -> None:
    expected = attend(call, causal=False)
    assert torch.equal(attend(call, causal=False, window=(side, side)), expected)


def test_without_heads_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def prepare(problem: Any, device: torch.device) -> Any:
            def run(tensors: Any, sizes: Any) -> None:
                raise AssertionError("launched")

            return run

    monkeypatch.setitem(launch._BACKENDS, "cpu", Refusing)
    forget_calls(monkeypatch)
    out, lse = attend(changed(PACKED, query=PACKED["query"][:, :0]), return_lse=True)
    assert (out.shape, lse.shape) == ((4, 0, 32), (4, 0))


def test_what_pytorch_keeps_beside_sinks_is_not_missed() -> None:
    sinks = torch._neg_view(torch.ones(4))
    assert torch.equal(attend(PACKED, sinks=sinks), attend(PACKED, sinks=-torch.ones(4)))
    with forward_ad.dual_level(), pytest.raises(InputError, match="no forward-mode derivative"):
        attend(PACKED, sinks=forward_ad.make_dual(torch.ones(4), torch.ones(4)))
