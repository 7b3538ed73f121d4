"""attention_varlen with trees of draft tokens on the CPU: against float64, and against each branch alone."""

from __future__ import annotations

import pytest
import torch
from cpu_attention import each_dtype, each_instruction_set
from tree_cases import path_to, random_tree, tree_mask, words_of
from varlen_cases import NAN, Call, Shape, bounds, forget_calls, packed, paged
from varlen_reference import assert_as_exact_as_pytorch, exact_varlen

from flashmoe_science import InputError, attention_varlen
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet

BF16_LSE_ATOL = 4e-3
"""See test_varlen.py."""
NODES = (1, 5, 8, 13, 64)
KEYS = (40, 5, 130, 400, 64)


def call_of(shape: Shape, page_size: int) -> Call:
    return paged(shape, page_size) if page_size else packed(shape)


def mask_of(shape: Shape, seed: int = 0) -> torch.Tensor:
    return tree_mask([random_tree(nodes, seed + index) for index, nodes in enumerate(shape.queries)])


@each_dtype
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("heads", [2, 4, 16])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"split_keys": 128, "softcap": 3.0}],
    ids=["causal", "full", "cut"],
)
def test_as_exact_as_pytorch(
    options: dict[str, object], heads: int, page_size: int, dtype: torch.dtype
) -> None:
    shape = Shape(NODES, KEYS, heads=heads, dtype=dtype)
    call = {**call_of(shape, page_size), "tree_mask": mask_of(shape)}
    result = attention_varlen(**call, **bounds(shape), **options, return_lse=True)  # type: ignore[arg-type]
    atol = BF16_LSE_ATOL if dtype == torch.bfloat16 else 2e-5
    assert_as_exact_as_pytorch(*result, call, lse_atol=atol, **bounds(shape), **options)


@each_instruction_set
@pytest.mark.parametrize("nodes", [3, 8, 20, 64])
def test_a_tree_is_each_of_its_branches_alone(
    instruction_set: InstructionSet, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "choose_instruction_set", lambda: instruction_set)
    forget_calls(monkeypatch)
    prefix = 70
    for seed in range(3):
        parents = random_tree(nodes, seed)
        shape = Shape((nodes,), (prefix + nodes,), heads=4, kv_heads=2)
        call = packed(shape, seed)
        whole = attention_varlen(**call, **bounds(shape), tree_mask=tree_mask([parents]))  # type: ignore[arg-type]
        for node in range(nodes):
            path = path_to(parents, node)
            keys = torch.tensor([*range(prefix), *(prefix + at for at in path)])
            branch = {
                "query": call["query"][node : node + 1],
                "key": call["key"][keys],
                "value": call["value"][keys],
                "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
                "cu_seqlens_k": torch.tensor([0, len(keys)], dtype=torch.int32),
            }
            alone = attention_varlen(**branch, max_seqlen_q=1, max_seqlen_k=len(keys))  # type: ignore[arg-type]
            torch.testing.assert_close(whole[node], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nodes", [4, 30])
@each_dtype
def test_other_branches_have_no_effect_whatever_they_hold(dtype: torch.dtype, nodes: int) -> None:
    parents = [-1, *([0] * (nodes - 1))]
    shape = Shape((nodes,), (90 + nodes,), dtype=dtype)
    call = {**packed(shape), "tree_mask": tree_mask([parents])}
    clean = attention_varlen(**call, **bounds(shape))  # type: ignore[arg-type]
    call["key"][-1], call["value"][-1] = NAN, NAN
    call["value"][-2] = float("inf")
    out = attention_varlen(**call, **bounds(shape))  # type: ignore[arg-type]
    assert out[-1].isnan().all()
    torch.testing.assert_close(out[:-2], clean[:-2], rtol=2e-2, atol=2e-2)


def test_rows_that_see_nothing_are_zero() -> None:
    shape = Shape((3, 2), (3, 1))
    call = {**packed(shape), "tree_mask": torch.tensor([0, 2, 7, 1, 0])}
    exact, exact_lse = exact_varlen(**call)
    out, lse = attention_varlen(**call, **bounds(shape), return_lse=True)  # type: ignore[arg-type]
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert not out[[0, 3, 4]].any()
    assert lse[[0, 3, 4]].isneginf().all()


def test_a_prompt_beside_trees_has_no_tree() -> None:
    shape = Shape((65, 4), (80, 50))
    call = packed(shape)
    mask = torch.cat([torch.zeros(65, dtype=torch.int64), tree_mask([random_tree(4, 1)])])
    out = attention_varlen(**call, **bounds(shape), tree_mask=mask)  # type: ignore[arg-type]
    exact, _ = exact_varlen(**call, tree_mask=mask)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    causal = attention_varlen(**call, **bounds(shape))  # type: ignore[arg-type]
    assert torch.equal(out[:65], causal[:65])
    assert not torch.equal(out[65:], causal[65:])


def test_a_call_with_another_tree_is_not_taken_for_the_last_one() -> None:
    shape = Shape((6,), (30,))
    call = packed(shape)
    for seed in (1, 2, None, 3):
        mask = None if seed is None else mask_of(shape, seed)
        out = attention_varlen(**call, **bounds(shape), tree_mask=mask)  # type: ignore[arg-type]
        exact, _ = exact_varlen(**call, tree_mask=mask)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_operator_takes_trees() -> None:
    shape = Shape((6,), (30,))
    call = {**packed(shape), "tree_mask": mask_of(shape)}
    eager = attention_varlen(**call, **bounds(shape))  # type: ignore[arg-type]
    compiled = torch.compile(attention_varlen, backend="eager", fullgraph=True)(**call, **bounds(shape))
    assert torch.equal(compiled, eager)


def test_words_have_a_bit_for_each_node_on_the_way() -> None:
    assert words_of([-1, 0, 0, 1]) == [1, 3, 5, 11]
    assert words_of([-1] * 64)[63] == -(2**63)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree_mask": torch.zeros(4, dtype=torch.int32)}, "tree_mask is torch.int32"),
        ({"tree_mask": torch.zeros(4, 1, dtype=torch.int64)}, "a bit for each query"),
        ({"tree_mask": torch.zeros(5, dtype=torch.int64)}, "tree_mask has shape"),
        ({"tree_mask": torch.zeros(8, dtype=torch.int64)[::2]}, "not contiguous"),
        ({"window": (3, 0)}, "tree_mask is given with window"),
        ({"chunk": 16}, "tree_mask is given with chunk"),
        ({"alibi_slopes": torch.ones(4)}, "tree_mask is given with alibi_slopes"),
    ],
)
def test_what_is_no_tree_is_refused(changes: dict[str, object], message: str) -> None:
    shape = Shape((4,), (9,))
    given = {**packed(shape), **bounds(shape), "tree_mask": mask_of(shape), **changes}
    with pytest.raises(InputError, match=message):
        attention_varlen(**given)  # type: ignore[arg-type]


def test_a_tree_on_another_device_than_the_query_is_refused() -> None:
    shape = Shape((4,), (9,))
    call = {**packed(shape), "tree_mask": mask_of(shape).to("meta")}
    with pytest.raises(InputError, match="tree_mask is on meta but query is on cpu"):
        attention_varlen(**call, **bounds(shape))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "tree_mask"])
def test_what_is_given_without_memory_is_refused(name: str) -> None:
    """A kernel would take it for nothing given."""
    shape = Shape((4,), (9,), heads=2)
    given = {"sinks": torch.zeros(2), "alibi_slopes": torch.ones(2), "tree_mask": mask_of(shape)}[name]
    call = {**call_of(shape, 0), name: given}
    attention_varlen(**call, **bounds(shape))  # type: ignore[arg-type]
    given.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(InputError, match=f"{name} has no memory"):
            attention_varlen(**call, **bounds(shape))  # type: ignore[arg-type]
