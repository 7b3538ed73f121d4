"""Attention over a batch of sequences as an operation: its lengths, its inputs, its reference, and who computes it."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudadent42.base.errors import UsageError
from cudadent42.model.implementations import Call, UnsupportedCaseError
from cudadent42.operations import definition
from cudadent42.operations.attention.inputs import AttentionInputs
from cudadent42.operations.attention.reference import attention_float64
from cudadent42.operations.attention_varlen import implementations
from cudadent42.operations.attention_varlen.caches import Cache
from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.operations.attention_varlen.implementations import ALL, prepare_sdpa
from cudadent42.operations.attention_varlen.inputs import hard_inputs, random_inputs, refresh
from cudadent42.operations.attention_varlen.reference import varlen_float64
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.stages.verify import verify
from cudadent42.suites.loader import load_suite, parse_suite
from flashmoe_science.cuda import wgmma

CASE = VarlenCase("unit", "fp32", 5, 4, 2, longest=60, shortest=7, head_dim=16, page_size=8)
VARIANTS = {
    "decode": CASE,
    "packed": replace(CASE, page_size=0),
    "prompts": replace(CASE, queries=0),
    "full": replace(CASE, queries=0, causal=False),
    "mixed": replace(CASE, chunks=2, chunk=9),
    "window": replace(CASE, queries=3, window=5),
    "more queries": replace(CASE, queries=70),
    "fp8, one scale": replace(CASE, dtype="bf16", fp8_scales="all"),
    "fp8, scales of heads": replace(CASE, dtype="bf16", fp8_scales="head", queries=3),
    "fp8, scales of keys": replace(CASE, dtype="bf16", fp8_scales="key"),
    "random trees": replace(CASE, queries=6, tree="random"),
    "chains": replace(CASE, queries=8, tree="chain", page_size=0),
    "stars": replace(CASE, queries=4, tree="star", causal=False),
    "trees beside prompts": replace(CASE, queries=5, tree="random", chunks=2, chunk=70),
    "more nodes than keys": replace(CASE, queries=30, tree="random"),
    "a soft cap": replace(CASE, queries=3, softcap=2.0),
    "a soft cap, prompts": replace(CASE, queries=0, softcap=2.0, page_size=0),
    "a soft cap, a window, sinks": replace(CASE, queries=0, softcap=2.0, window=5, sinks=True),
    "a soft cap over fp8": replace(CASE, dtype="bf16", fp8_scales="head", softcap=2.0),
    "sinks": replace(CASE, queries=3, sinks=True),
    "sinks and a window": replace(CASE, window=5, sinks=True, page_size=0),
    "sinks, prompts": replace(CASE, queries=0, sinks=True),
    "sinks, more queries": replace(CASE, queries=70, sinks=True),
    "sinks over fp8": replace(CASE, dtype="bf16", fp8_scales="key", sinks=True),
    "fp8, packed": replace(CASE, dtype="bf16", fp8_scales="key", page_size=0),
}
each_variant = pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)


def nothing() -> None:
    return


def test_lengths_follow_zipfs_law_and_the_case_alone() -> None:
    assert sorted(CASE.seqlens_k, reverse=True) == [60, 30, 20, 15, 12]
    assert sorted(replace(CASE, shortest=25).seqlens_k) == [25, 25, 25, 30, 60]
    assert CASE.seqlens_k == replace(CASE, name="other", dtype="bf16").seqlens_k
    assert len({replace(CASE, draw=draw).seqlens_k for draw in range(10)}) > 3
    assert VARIANTS["mixed"].seqlens_q == (9, 9, 1, 1, 1)
    assert VARIANTS["prompts"].seqlens_q == CASE.seqlens_k


def seen_by_nodes(case: VarlenCase, index: int, queries: int, keys: int) -> torch.Tensor:
    """(queries, keys) booleans, bit by bit."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    for row, word in enumerate(case.words(index)):
        for node in range(queries):
            if keys - queries + node >= 0:
                seen[row, keys - queries + node] = bool(word >> node & 1)
    return seen


@each_variant
def test_what_is_visible_is_counted(case: VarlenCase) -> None:
    scores = keys_seen = 0
    for index, (queries, keys) in enumerate(zip(case.seqlens_q, case.seqlens_k, strict=True)):
        position = torch.arange(queries)[:, None] + keys - queries
        column = torch.arange(keys)
        seen = (column <= position) | (not case.causal)
        if case.window >= 0:
            seen &= column >= position - case.window
        seen &= seen_by_nodes(case, index, queries, keys)
        scores += int(seen.sum()) * case.num_heads
        keys_seen += int(seen.any(0).sum())
    assert case.scores == scores
    queries = 2 * case.tokens * case.num_heads * 16 * (2 if case.fp8_scales else 4)
    of_key = {"": 4 * 16, "all": 16, "head": 16, "key": 16 + 4}[case.fp8_scales]
    assert case.bytes_min == queries + 2 * keys_seen * case.num_kv_heads * of_key


@each_variant
def test_every_slot_without_a_key_is_nan_also_after_a_refresh(case: VarlenCase) -> None:
    inputs = random_inputs(case, 0, 0, "cpu")
    again = random_inputs(case, 0, 0, "cpu")
    assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(inputs.tensors, again.tensors, strict=True))
    for _ in range(2):
        for cache in inputs.caches:
            scales = () if cache.scale is None or cache.scale.dim() < 2 else (cache.scale.view(-1, 2, 1),)
            for rows in (cache.rows.float(), cache.wide_rows, *scales):
                assert rows[inputs.slots].isfinite().all()
                assert int(rows.isnan().all(-1).all(-1).sum()) == len(rows) - sum(case.seqlens_k)
        written = {tensor.data_ptr() for tensor in refresh(case, inputs, 3)}
        assert written >= {tensor.data_ptr() for tensor in inputs.tensors}
    assert not torch.equal(inputs.query, again.query)
    if inputs.block_table is not None:
        assert (inputs.block_table[:, -2:] == -1).all()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@each_variant
def test_float64_is_that_of_each_sequence(case: VarlenCase) -> None:
    if case.window >= 0 or case.tree or case.sinks or case.softcap:
        pytest.skip("the reference of attention has no window, no trees, no sinks and no cap")
    inputs = random_inputs(case, 0, 0, "cpu")
    result = varlen_float64(case, inputs, nothing)
    token = first = 0
    for queries, keys in zip(case.seqlens_q, case.seqlens_k, strict=True):
        slots = inputs.slots[first : first + keys]
        key, value = (
            torch.stack([cache.exact(slots, head) for head in range(2)])[None] for cache in inputs.caches
        )
        query = inputs.query[token : token + queries].transpose(0, 1)[None]
        alone = attention_float64(AttentionInputs(query, key, value), case.causal)
        torch.testing.assert_close(result[token : token + queries], alone[0].transpose(0, 1))
        token += queries
        first += keys


@each_variant
def test_ours_and_pytorch_agree_with_float64(case: VarlenCase) -> None:
    inputs = random_inputs(case, 1, 0, "cpu")
    exact = varlen_float64(case, inputs, nothing)
    ours: Call = next(each for each in ALL if each.name == "cudadent42").prepare(case, inputs)
    tolerance = 1e-5 if case.dtype == "fp32" else 2e-2
    for call in (ours, prepare_sdpa(case, inputs)):
        torch.testing.assert_close(call().double(), exact, rtol=tolerance, atol=tolerance)


def test_a_chain_is_causal_in_float64() -> None:
    chain = VARIANTS["chains"]
    inputs = random_inputs(chain, 0, 0, "cpu")
    assert torch.equal(
        varlen_float64(chain, inputs, nothing), varlen_float64(replace(chain, tree=""), inputs, nothing)
    )


def test_trees_are_drawn_from_the_case_alone_and_see_the_way_from_the_root() -> None:
    case = VARIANTS["random trees"]
    assert case.words(0) == replace(case, name="other").words(0)
    assert len({tuple(replace(case, draw=draw).words(0)) for draw in range(10)}) > 5
    assert replace(case, tree="star").words(1) == [1, 3, 5, 9, 17, 33]
    assert replace(case, tree="chain").words(1) == [1, 3, 7, 15, 31, 63]
    assert [len(VARIANTS["trees beside prompts"].words(index)) for index in range(5)] == [0, 0, 5, 5, 5]
    for index in range(5):
        for node, word in enumerate(case.words(index)):
            assert word >> node == 1
            below = word ^ 1 << node
            assert below == 0 or case.words(index)[below.bit_length() - 1] == below


def test_words_of_64_nodes_are_signed() -> None:
    case = replace(CASE, batch=1, longest=70, shortest=70, queries=64, tree="chain")
    mask = random_inputs(case, 0, 0, "cpu").tree_mask
    assert mask is not None
    assert mask[62:].tolist() == [2**63 - 1, -1]


def test_flash_attention_3_is_not_raced_on_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", _FlashAttention3)  # type: ignore[arg-type]
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


class _FlashInferWrapper:
    def __init__(self, workspace: torch.Tensor, layout: str, **options: object) -> None:
        self.planned: dict[str, Any] = {}

    def plan(self, *lengths: object, **options: Any) -> None:
        self.planned = options

    def run(self, *tensors: object) -> dict[str, Any]:
        return self.planned


class _FlashInfer:
    """What FlashInfer is told when it plans."""

    BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper = _FlashInferWrapper
    BatchDecodeWithPagedKVCacheWrapper = _FlashInferWrapper


fp8_variant = pytest.mark.parametrize("case", [case for case in VARIANTS.values() if case.fp8_scales])


@fp8_variant
def test_a_cache_in_fp8_is_within_a_step_of_what_was_written(case: VarlenCase) -> None:
    inputs = random_inputs(case, 0, 0, "cpu")
    # A scale that is one for all is made for numbers up to 4, and one of 16,000 normal ones is larger.
    rows = torch.randn(len(inputs.slots), 2, 16, dtype=torch.bfloat16).clamp(-4.0, 4.0)
    for cache in inputs.caches:
        before = [tensor.clone() for tensor in _tensors(cache)]
        assert len(cache.write(inputs.slots, rows)) == (3 if case.fp8_scales == "key" else 2)
        assert any(not torch.equal(_bits(a), _bits(b)) for a, b in zip(before, _tensors(cache), strict=True))
        for head in range(2):
            exact = cache.exact(inputs.slots, head)
            written = rows[:, head].double()
            assert ((exact - written).abs() <= written.abs() / 15 + 1e-3).all()
            torch.testing.assert_close(
                cache.wide_rows[inputs.slots, head].double(), exact, rtol=2**-8, atol=0.0
            )


@fp8_variant
def test_the_error_over_fp8_is_that_of_an_ideal_kernel(case: VarlenCase) -> None:
    """At most a tenth more, beside float64 over the keys that were quantised."""
    inputs = random_inputs(case, 2, 0, "cpu")
    rows = [torch.randn(len(inputs.slots), 2, 16, dtype=torch.bfloat16) for _ in range(2)]
    for cache, each in zip(inputs.caches, rows, strict=True):
        cache.write(inputs.slots, each)
    key, value = (Cache.of(replace(case, fp8_scales=""), each, inputs.slots) for each in rows)
    unquantised = replace(
        inputs,
        key=key.stored,
        value=value.stored,
        key_scale=None,
        value_scale=None,
        wide_key=None,
        wide_value=None,
    )
    right = varlen_float64(case, unquantised, nothing)
    ideal = varlen_float64(case, inputs, nothing).to(torch.bfloat16).double()
    ours = next(each for each in ALL if each.name == "cudadent42").prepare(case, inputs)().double()
    assert (ours - right).square().mean().sqrt() <= 1.1 * (ideal - right).square().mean().sqrt()


def test_the_same_keys_in_16_bits_are_raced_where_the_cache_is_in_fp8() -> None:
    wide = next(each for each in ALL if each.name == "cudadent42_16bit")
    case = VARIANTS["fp8, scales of keys"]
    inputs = random_inputs(case, 1, 0, "cpu")
    exact = varlen_float64(case, inputs, nothing)
    torch.testing.assert_close(wide.prepare(case, inputs)().double(), exact, rtol=2e-2, atol=2e-2)
    with pytest.raises(UnsupportedCaseError, match="16 bits already"):
        wide.prepare(CASE, random_inputs(CASE, 1, 0, "cpu"))


class _FlashAttention3:
    """What FlashAttention-3 is given for a cache in FP8."""

    @staticmethod
    def flash_attn_with_kvcache(query: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
        assert {query.dtype, given["k_cache"].dtype, given["v_cache"].dtype} == {torch.float8_e4m3fn}
        assert {given[f"{name}_descale"].shape for name in "qkv"} == {(5, 2)}
        assert int(given["page_table"].min()) >= 0
        return query.to(torch.bfloat16), None


def test_flash_attention_3_gets_queries_in_fp8_and_a_scale_for_each_sequence_and_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", _FlashAttention3)  # type: ignore[arg-type]
    peer = next(each for each in ALL if each.name == "flash_attn_3")
    for name in ("fp8, one scale", "fp8, scales of heads"):
        case = VARIANTS[name]
        result = peer.prepare(case, random_inputs(case, 0, 0, "cpu"))()
        assert result.dtype == torch.bfloat16
    for name in ("fp8, scales of keys", "fp8, packed"):
        with pytest.raises(UnsupportedCaseError):
            peer.prepare(VARIANTS[name], random_inputs(VARIANTS[name], 0, 0, "cpu"))


def _tensors(cache: Cache) -> list[torch.Tensor]:
    return [tensor for tensor in cache if tensor is not None]


def test_a_window_hides_keys_in_float64() -> None:
    case = replace(CASE, batch=1, longest=20, shortest=20, window=0, queries=3)
    inputs = random_inputs(case, 0, 0, "cpu")
    own = inputs.rows_of_keys[1][inputs.slots[-3:]].repeat_interleave(2, 1).double()
    torch.testing.assert_close(varlen_float64(case, inputs, nothing), own)


def test_a_sink_is_a_key_more_without_a_value() -> None:
    case = replace(CASE, queries=2, sinks=True)
    inputs = random_inputs(case, 0, 0, "cpu")
    assert inputs.sinks is not None
    assert inputs.sinks.shape == (4,)
    without = varlen_float64(case, replace(inputs, sinks=None), nothing)
    none = torch.full_like(inputs.sinks, -torch.inf)
    torch.testing.assert_close(varlen_float64(case, replace(inputs, sinks=none), nothing), without)
    # One key: its weight is exp(score) / (exp(score) + exp(sink)).
    alone = replace(CASE, batch=1, longest=1, shortest=1, sinks=True)
    inputs = random_inputs(alone, 0, 0, "cpu")
    assert inputs.sinks is not None
    key, value = (cache.exact(inputs.slots, 0)[0] for cache in inputs.caches)
    score = inputs.query[0, 0].double() @ key / 4
    weight = torch.sigmoid(score - inputs.sinks[0].double())
    torch.testing.assert_close(varlen_float64(alone, inputs, nothing)[0, 0], weight * value)


def test_a_cap_bends_scores_in_float64() -> None:
    case = replace(CASE, batch=1, longest=2, shortest=2, softcap=0.5)
    inputs = random_inputs(case, 0, 0, "cpu")
    keys, values = (cache.exact(inputs.slots, 0) for cache in inputs.caches)
    scores = keys @ inputs.query[0, 0].double() / 4
    expected = torch.softmax(0.5 * torch.tanh(2 * scores), 0) @ values
    torch.testing.assert_close(varlen_float64(case, inputs, nothing)[0, 0], expected)


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
    over_fp8 = replace(case, fp8_scales="all")
    for prepare, unsupported in (
        (implementations._prepare_flash_attn_3, packed),
        (implementations._prepare_flash_attn_3, over_fp8),
        (implementations._prepare_flashinfer, case),
        (implementations.prepare_flex, packed),
    ):
        with pytest.raises(UnsupportedCaseError, match="sinks"):
            prepare(unsupported, random_inputs(unsupported, 0, 0, "cpu"))


def test_every_hard_input_can_be_made_and_has_a_reference() -> None:
    for hard in hard_inputs("fp32"):
        inputs = hard.make(0, "cpu")
        result = varlen_float64(hard.case, inputs, nothing)  # type: ignore[arg-type]
        assert result.isnan().any() == hard.kind.startswith("nan")


@pytest.mark.parametrize(
    ("suite", "case"),
    [
        ("varlen-cpu", "mixed"),
        ("varlen-cpu", "decode-window-sinks"),
        ("varlen-cpu", "prompts-softcap"),
        ("decode-fp8-cpu", "ragged-16"),
        ("decode-tree-cpu", "star-4-ragged"),
    ],
)
def test_verification_passes_ours(suite: str, case: str) -> None:
    choices = Choices(suite=suite, implementations=("cudadent42",), cases=(case,), dtypes=("bf16",))
    report = verify(make_plan(choices, "cpu", registry), emit=lambda event: None)
    judged = [each for each in report.cases if each.implementation == "cudadent42"]
    assert len(judged) > 20
    assert [each for each in judged if not each.passed] == []


@pytest.mark.parametrize(
    "name",
    [
        *("decode-paged", "prefill-varlen", "mixed", "varlen-cpu", "decode-fp8", "decode-fp8-cpu"),
        *("decode-tree", "decode-tree-cpu"),
    ],
)
def test_suites_have_cases_with_names_of_their_own(name: str) -> None:
    suite = load_suite(name)
    assert suite.operation == "attention_varlen"
    shapes = [(replace(case, name=""), case.seqlens_k) for case in suite.shapes]  # type: ignore[type-var, attr-defined]
    assert len(set(shapes)) == len(shapes)


def test_hidden_cases_are_small_and_others() -> None:
    cases = [case for case in load_suite("decode-paged").shapes if isinstance(case, VarlenCase)]
    unplanned = definition("attention_varlen").unplanned
    assert unplanned is not None
    for case in unplanned(cases, Random(0), 20):
        assert isinstance(case, VarlenCase)
        assert case.longest <= 1024
        assert case.longest not in {each.longest for each in cases}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ("num_heads = 3, num_kv_heads = 2", "num_heads = 3 is not a multiple"),
        ("num_heads = 2, shortest = 9", "shortest"),
        ("num_heads = 2, softcap = -1", "softcap = -1; expected a number from 0 to 10000"),
        ("num_heads = 2, chunks = 2", "chunks"),
        ('num_heads = 2, fp8_scales = "page"', "expected one of all, head, key"),
        ('num_heads = 2, fp8_scales = "head"', "fp16 or bf16, not fp32"),
        ('num_heads = 2, tree = "oak"', "expected one of chain, star, random"),
        ('num_heads = 2, tree = "star", queries = 65', "expected 1 to 64 with a tree"),
        ('num_heads = 2, tree = "star", queries = 0', "expected 1 to 64 with a tree"),
        ('num_heads = 2, tree = "star", window = 3', "window and tree are both given"),
    ],
)
def test_cases_that_make_no_sense_are_refused(numbers: str, message: str) -> None:
    text = (
        'name = "unit"\noperation = "attention_varlen"\ndtypes = ["fp32"]\n'
        f'case = [{{ name = "a", batch = 1, longest = 8, head_dim = 16, {numbers} }}]\n'
    )
    with pytest.raises(UsageError, match=message):
        parse_suite(text, "unit.toml")


def test_its_kernels_are_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "nvrtc_version", lambda: (13, 0))
    kernels = definition("attention_varlen").cuda_kernels(["sm_80", "sm_90a"])
    functions = {kernel.function for kernel in kernels}
    assert functions == {
        *("attention_varlen", "attention_decode", "attention_decode_hopper", "attention_hopper_varlen"),
        *("attention_mixed_hopper", "paged_append"),
    }
    case = replace(CASE, dtype="bf16", head_dim=128, page_size=16)
    needed = definition("attention_varlen").needed(kernels, [case])
    assert {kernel.function for kernel in needed} == functions - {"attention_mixed_hopper", "paged_append"}
    assert {kernel.macros["HEAD_DIM"] for kernel in needed} == {128}
    assert {kernel.macros.get("PAGED", 1) for kernel in needed} == {1}
    packed = definition("attention_varlen").needed(kernels, [replace(case, page_size=0)])
    assert {kernel.macros["PAGED"] for kernel in packed if "PAGED" in kernel.macros} == {0}
    for other in (replace(case, dtype="fp32"), replace(case, fp8_scales="key"), replace(case, head_dim=256)):
        assert definition("attention_varlen").needed(kernels, [other]) == []
