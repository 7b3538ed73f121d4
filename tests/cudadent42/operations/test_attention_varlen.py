"""Attention over a batch of sequences as an operation: its lengths, its inputs, its reference, and who computes it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from cudadent42.base.errors import UsageError
from cudadent42.model.implementations import Call
from cudadent42.operations import definition
from cudadent42.operations.attention.inputs import AttentionInputs
from cudadent42.operations.attention.reference import attention_float64
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
from lab_varlen_cases import CASE, VARIANTS, nothing, seen_by_nodes

each_variant = pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)


def test_lengths_follow_zipfs_law_and_the_case_alone() -> None:
    assert sorted(CASE.seqlens_k, reverse=True) == [60, 30, 20, 15, 12]
    assert sorted(replace(CASE, shortest=25).seqlens_k) == [25, 25, 25, 30, 60]
    assert CASE.seqlens_k == replace(CASE, name="other", dtype="bf16").seqlens_k
    assert len({replace(CASE, draw=draw).seqlens_k for draw in range(10)}) > 3
    assert VARIANTS["mixed"].seqlens_q == (9, 9, 1, 1, 1)
    assert VARIANTS["prompts"].seqlens_q == CASE.seqlens_k


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
    both = 16 + (case.value_dim or 16)
    assert case.flops == 2 * scores * both
    queries = case.tokens * case.num_heads * both * (2 if case.fp8_scales else 4)
    of_key = {"": 4 * both, "all": both, "head": both, "key": both + 8}[case.fp8_scales]
    assert case.bytes_min == queries + keys_seen * case.num_kv_heads * of_key


@each_variant
def test_what_memory_a_set_takes_is_counted(case: VarlenCase) -> None:
    inputs = random_inputs(case, 0, 0, "cpu")
    tensors = [inputs.query, inputs.result_like]
    for cache in inputs.caches:
        # A scale for all keys, or for a head of all, is not counted.
        tensors += [each for each in cache if each is not None and each.dim() > 1]
    assert case.memory_bytes(3) == 3 * sum(each.nbytes for each in tensors)


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
    if case.window >= 0 or case.tree or case.sinks or case.softcap or case.alibi or case.value_dim:
        pytest.skip("the reference of attention has no window, trees, sinks, cap, ALiBi or narrow values")
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


fp8_variant = pytest.mark.parametrize("case", [case for case in VARIANTS.values() if case.fp8_scales])


@fp8_variant
def test_a_cache_in_fp8_is_within_a_step_of_what_was_written(case: VarlenCase) -> None:
    inputs = random_inputs(case, 0, 0, "cpu")
    # A scale that is one for all is made for numbers up to 4, and one of 16,000 normal ones is larger.
    for cache in inputs.caches:
        shape = (len(inputs.slots), *cache.rows.shape[1:])
        rows = torch.randn(shape, dtype=torch.bfloat16).clamp(-4.0, 4.0)
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
    dims = case.head_dim, case.head_dim_v
    rows = [torch.randn(len(inputs.slots), 2, dim, dtype=torch.bfloat16) for dim in dims]
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


def test_alibi_lowers_scores_by_their_distance_in_float64() -> None:
    """Written out for the second of two queries, and by a score of one key alone, which nothing lowers."""
    case = replace(CASE, batch=1, longest=3, shortest=3, queries=2, alibi=True)
    inputs = random_inputs(case, 0, 0, "cpu")
    assert inputs.alibi_slopes is not None
    assert inputs.alibi_slopes.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    result = varlen_float64(case, inputs, nothing)
    for head in range(4):
        keys, values = (cache.exact(inputs.slots, head // 2) for cache in inputs.caches)
        scores = keys @ inputs.query[1, head].double() / 4
        scores -= inputs.alibi_slopes[head].double() * torch.tensor([2.0, 1.0, 0.0])
        torch.testing.assert_close(result[1, head], torch.softmax(scores, 0) @ values)
    alone = replace(case, longest=1, shortest=1, queries=1)
    inputs = random_inputs(alone, 0, 0, "cpu")
    torch.testing.assert_close(
        varlen_float64(alone, inputs, nothing),
        varlen_float64(alone, replace(inputs, alibi_slopes=None), nothing),
    )


def test_values_of_their_own_dim_are_those_of_as_wide_ones_cut_off() -> None:
    case = VARIANTS["narrow values"]
    inputs = random_inputs(case, 0, 0, "cpu")
    assert inputs.result_like.shape == (*inputs.query.shape[:-1], 8)
    assert inputs.buffer_shapes == (tuple(inputs.result_like.shape),)
    wide = torch.nn.functional.pad(inputs.value, (0, 8))
    as_wide = varlen_float64(replace(case, value_dim=0), replace(inputs, value=wide), nothing)
    torch.testing.assert_close(varlen_float64(case, inputs, nothing), as_wide[..., :8])


def test_the_phrase_of_a_case_and_its_cells_say_both() -> None:
    of = definition("attention_varlen")
    case = replace(CASE, value_dim=8, alibi=True)
    assert of.shape(case) == "5 × 4/2 × 1/7–60 × 16/8, pages of 8, ALiBi"
    assert of.shape(CASE) == "5 × 4/2 × 1/7–60 × 16, pages of 8"
    assert of.shape_legend([CASE, case]).endswith("head dim, of keys/values where they differ")
    assert of.shape_legend([CASE]).endswith("head dim")
    assert of.cells(case).items() >= {"value_dim": 8, "alibi": True, "hidden_dim": 16}.items()
    assert of.cells(CASE).items() >= {"value_dim": 16, "alibi": False}.items()


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
        ("varlen-cpu", "decode-alibi"),
        ("varlen-cpu", "prompts-values-128"),
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
        ('num_heads = 2, tree = "star", alibi = true', "alibi and tree are both given"),
        ("num_heads = 2, alibi = 1", "expected true or false"),
        ("num_heads = 2, value_dim = 12", "value_dim = 12; expected a multiple of 8"),
    ],
)
def test_cases_that_make_no_sense_are_refused(numbers: str, message: str) -> None:
    text = (
        'name = "unit"\noperation = "attention_varlen"\ndtypes = ["fp32"]\n'
        f'case = [{{ name = "a", batch = 1, longest = 8, head_dim = 16, {numbers} }}]\n'
    )
    with pytest.raises(UsageError, match=message):
        parse_suite(text, "unit.toml")


def test_as_wide_values_are_the_same_case_whether_said_or_not() -> None:
    text = (
        'name = "unit"\noperation = "attention_varlen"\ndtypes = ["fp32"]\n'
        "case = [{ name = 'a', batch = 1, num_heads = 2, longest = 8, head_dim = 16, value_dim = %d }]\n"
    )
    said, unsaid, other = (parse_suite(text % dim, "unit.toml").shapes for dim in (16, 0, 24))
    assert said == unsaid != other


def test_the_descriptions_of_suites_count_their_cases() -> None:
    for name in ("decode-paged", "prefill-varlen", "mixed", "varlen-cpu"):
        suite = load_suite(name)
        assert suite.description.split()[0] == str(len(suite.shapes)), name


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
    others = [replace(case, **each) for each in ({"dtype": "fp32"}, {"fp8_scales": "key"}, {"head_dim": 256})]
    for other in (*others, replace(case, value_dim=64)):
        assert definition("attention_varlen").needed(kernels, [other]) == []
