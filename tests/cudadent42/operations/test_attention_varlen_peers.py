"""Who else computes attention over a batch of sequences: what they are given, and what they are not asked for."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudadent42.model.implementations import Planned, UnsupportedCaseError
from cudadent42.operations.attention_varlen import implementations
from cudadent42.operations.attention_varlen.implementations import ALL
from cudadent42.operations.attention_varlen.inputs import random_inputs
from cudadent42.operations.attention_varlen.reference import varlen_float64
from lab_varlen_cases import CASE, VARIANTS, nothing, seen_by_nodes


def test_flash_attention_3_is_not_raced_on_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace())
    peer = next(each for each in ALL if each.name == "flash_attn_3")
    with pytest.raises(UnsupportedCaseError, match="takes no trees"):
        peer.prepare(VARIANTS["stars"], random_inputs(VARIANTS["stars"], 0, 0, "cpu"))


def test_flashinfer_gets_what_each_query_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", _FlashInfer)  # type: ignore[arg-type]
    monkeypatch.setattr(implementations, "_WORKSPACE_BYTES", 1)
    peer = next(each for each in ALL if each.name == "flashinfer")
    for name in ("random trees", "chains"):
        case = VARIANTS[name]
        planned = peer.prepare(case, random_inputs(case, 0, 0, "cpu"))()
        expected = [
            seen_by_nodes(case, index, queries, keys).tril(keys - queries).flatten()
            for index, (queries, keys) in enumerate(zip(case.seqlens_q, case.seqlens_k, strict=True))
        ]
        assert torch.equal(planned["custom_mask"], torch.cat(expected))
    assert "custom_mask" not in peer.prepare(CASE, random_inputs(CASE, 0, 0, "cpu"))()


def test_flashinfer_decodes_with_its_wrapper_for_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", _FlashInfer)  # type: ignore[arg-type]
    monkeypatch.setattr(implementations, "_WORKSPACE_BYTES", 1)
    peer = next(each for each in ALL if each.name == "flashinfer")
    step = replace(CASE, batch=3, longest=40, shortest=9, queries=4, page_size=16, chunks=0, window=-1)
    for case, decodes in (
        (step, True),
        (replace(step, queries=1), True),
        (replace(step, queries=9), False),
        (replace(step, longest=9, shortest=3), False),  # fewer keys than queries
        (replace(step, chunks=1, chunk=2), False),
        (replace(step, causal=False), False),
        (replace(step, tree="chain"), False),
    ):
        planned = peer.prepare(case, random_inputs(case, 0, 0, "cpu"))()
        assert planned.get("q_len_per_req") == (case.queries if decodes else None), case
        assert ("causal" in planned) is not decodes


@pytest.mark.parametrize("name", ["decode", "packed", "prompts"])
def test_flashinfer_has_planned_and_can_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", _FlashInfer)  # type: ignore[arg-type]
    monkeypatch.setattr(implementations, "_WORKSPACE_BYTES", 1)
    call = implementations._prepare_flashinfer(VARIANTS[name], random_inputs(VARIANTS[name], 0, 0, "cpu"))
    assert isinstance(call, Planned)
    before: dict[str, Any] = call()  # type: ignore[assignment]
    wrapper = call.call.func.__self__  # type: ignore[attr-defined]
    assert wrapper.times == 1
    call.plan()
    assert wrapper.times == 2
    assert call() == before


class _FlashInferWrapper:
    def __init__(self, workspace: torch.Tensor, layout: str, **options: object) -> None:
        self.planned: dict[str, Any] = {}
        self.times = 0

    def plan(self, *lengths: object, **options: Any) -> None:
        self.planned = options
        self.times += 1

    def run(self, *tensors: object) -> dict[str, Any]:
        return self.planned


class _FlashInfer:
    """What FlashInfer is told when it plans."""

    BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper = _FlashInferWrapper
    BatchDecodeWithPagedKVCacheWrapper = _FlashInferWrapper


def test_the_same_keys_in_16_bits_are_raced_where_the_cache_is_in_fp8() -> None:
    wide = next(each for each in ALL if each.name == "cudadent42_16bit")
    case = VARIANTS["fp8, scales of keys"]
    inputs = random_inputs(case, 1, 0, "cpu")
    exact = varlen_float64(case, inputs, nothing)
    torch.testing.assert_close(wide.prepare(case, inputs)().double(), exact, rtol=2e-2, atol=2e-2)
    with pytest.raises(UnsupportedCaseError, match="16 bits already"):
        wide.prepare(CASE, random_inputs(CASE, 1, 0, "cpu"))


_NO_SOFTCAP = (
    "mha_fwd, /src/hopper/flash_api_stable.cpp:1232, "
    "This flash attention build does not support tanh softcapping."
)


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        (
            _NO_SOFTCAP,
            UnsupportedCaseError,
            "FlashAttention-3: This flash attention build does not support tanh softcapping",
        ),
        (
            "This flash attention build does not support local attention.\nException raised from mha_fwd",
            UnsupportedCaseError,
            "FlashAttention-3: This flash attention build does not support local attention",
        ),
        ("CUDA error: an illegal memory access", RuntimeError, "CUDA error: an illegal memory access"),
    ],
)
@pytest.mark.parametrize("name", ["a soft cap", "a soft cap, prompts"])
def test_what_a_build_of_flash_attention_3_lacks_is_not_supported_and_its_faults_are_faults(
    name: str, said: str, kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*tensors: object, **options: object) -> None:
        raise RuntimeError(said)

    functions = {"flash_attn_varlen_func": refuse, "flash_attn_with_kvcache": refuse}
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(**functions))
    with pytest.raises(kind) as refused:
        implementations._prepare_flash_attn_3(VARIANTS[name], random_inputs(VARIANTS[name], 0, 0, "cpu"))
    assert type(refused.value) is kind
    assert str(refused.value) == told


@pytest.mark.parametrize(
    "name", ["fp8, one scale", "fp8, scales of heads", "fp8, scales of keys", "fp8, packed"]
)
def test_flash_attention_3_is_not_asked_for_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace())
    with pytest.raises(UnsupportedCaseError, match="rounds queries and weights to FP8, too"):
        implementations._prepare_flash_attn_3(VARIANTS[name], random_inputs(VARIANTS[name], 0, 0, "cpu"))


@pytest.mark.parametrize("numbers", [{}, {"queries": 0}, {"queries": 0, "page_size": 0}])
def test_flashinfer_gets_a_scale_for_all_keys_and_one_for_all_values(
    numbers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(VARIANTS["fp8, one scale"], **numbers)
    inputs = random_inputs(case, 0, 0, "cpu")
    assert inputs.key_scale is not None
    assert inputs.value_scale is not None
    inputs = replace(inputs, key_scale=inputs.key_scale * 3, value_scale=inputs.value_scale / 2)

    class Widening(_FlashInferWrapper):
        def run(self, query: torch.Tensor, *caches: Any, k_scale: float = 1, v_scale: float = 1) -> Any:
            key, value = caches if case.page_size == 0 else caches[0]
            assert {type(k_scale), type(v_scale)} == {float}, "a tensor would be read in each call"
            assert (self.planned["q_data_type"], self.planned["kv_data_type"]) == (query.dtype, key.dtype)
            wide = {"key": key.double() * k_scale, "value": value.double() * v_scale}
            unscaled = replace(inputs, query=query, key_scale=None, value_scale=None, **wide)
            return varlen_float64(case, unscaled, nothing)

    wrappers = (
        "BatchPrefillWithRaggedKVCache",
        "BatchPrefillWithPagedKVCache",
        "BatchDecodeWithPagedKVCache",
    )
    module = SimpleNamespace(**{f"{name}Wrapper": Widening for name in wrappers})
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(implementations, "_WORKSPACE_BYTES", 1)
    result = implementations._prepare_flashinfer(case, inputs)()
    assert torch.equal(result, varlen_float64(case, inputs, nothing))


@pytest.mark.parametrize("name", ["fp8, scales of heads", "fp8, scales of keys", "fp8, packed"])
def test_flashinfer_is_not_asked_for_more_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    with pytest.raises(UnsupportedCaseError, match="one scale for a whole tensor"):
        implementations._prepare_flashinfer(VARIANTS[name], random_inputs(VARIANTS[name], 0, 0, "cpu"))


def test_peers_are_told_of_alibi_and_of_values_dims_or_say_that_they_are_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", _FlashInfer)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace())
    monkeypatch.setattr(implementations, "_WORKSPACE_BYTES", 1)
    for name in ("narrow values", "wide values, prompts"):
        case = VARIANTS[name]
        planned = implementations._prepare_flashinfer(case, random_inputs(case, 0, 0, "cpu"))()
        assert planned["head_dim_vo"] == case.value_dim  # type: ignore[call-overload]
        assert "q_len_per_req" not in planned, "its wrapper for decode steps has one head dim"
    for prepare, case, why in (
        (implementations._prepare_flashinfer, VARIANTS["ALiBi"], "flashinfer takes no ALiBi slopes"),
        (implementations._prepare_flash_attn_3, VARIANTS["ALiBi"], "FlashAttention-3 takes no ALiBi slopes"),
    ):
        with pytest.raises(UnsupportedCaseError, match=why):
            prepare(case, random_inputs(case, 0, 0, "cpu"))


def test_peers_get_sinks_or_say_that_they_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict[str, Any]()
    monkeypatch.setitem(
        sys.modules,
        "flash_attn_interface",
        SimpleNamespace(flash_attn_with_kvcache=lambda *tensors, **options: given.update(options)),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    case = replace(CASE, dtype="bf16", window=5, sinks=True)
    inputs = random_inputs(case, 0, 0, "cpu")
    implementations._prepare_flash_attn_3(case, inputs)()
    assert inputs.sinks is not None
    assert torch.equal(given["sinks"], inputs.sinks.bfloat16())
    assert given["softcap"] == 0
    capped = replace(CASE, dtype="bf16", softcap=2.0)
    implementations._prepare_flash_attn_3(capped, random_inputs(capped, 0, 0, "cpu"))()
    assert given["softcap"] == 2
    packed = replace(case, page_size=0)
    for prepare, unsupported in (
        (implementations._prepare_flash_attn_3, packed),
        (implementations._prepare_flashinfer, case),
        (implementations._prepare_flashinfer, replace(case, fp8_scales="all")),
        (implementations.prepare_flex, packed),
    ):
        with pytest.raises(UnsupportedCaseError, match="sinks"):
            prepare(unsupported, random_inputs(unsupported, 0, 0, "cpu"))
