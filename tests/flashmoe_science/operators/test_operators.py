"""The operators by themselves: PyTorch's own checks, transforms, counters, checkpointing, export."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_reference import make_moe
from operator_calls import attention_tensors, differentiable, random
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flashmoe_science import InputError, flash_attention, fused_moe, operators, topk_routing
from flashmoe_science.checkpoint import context_fn, save_list
from flashmoe_science.cpu import attention as cpu_attention

FORWARD = operators.attention.FORWARD
BACKWARD = operators.attention.BACKWARD
FUSED_MOE = operators.moe.FUSED_MOE
TRAINING, MOE_BACKWARD = operators.moe_training.TRAINING, operators.moe_training.BACKWARD
TOPK_ROUTING = operators.routing.TOPK_ROUTING
WITHOUT_TRACING = ("test_schema", "test_autograd_registration", "test_faketensor")
"""The checks of `opcheck` that take milliseconds; the fourth compiles."""


# ---------------------------------------------------------------- PyTorch's checks


@pytest.mark.parametrize("needed", [(False, False, False), (True, True, True), (False, True, False)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_forward_operator_passes_all_checks(needed: tuple[bool, ...], causal: bool) -> None:
    opcheck(FORWARD, (*differentiable(attention_tensors(), needed), causal, 0.3))


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False)])
def test_the_backward_operator_passes_all_checks(needs: tuple[bool, ...]) -> None:
    tensors = attention_tensors()
    out, lse = FORWARD(*tensors)
    grad_lse = random(2, 4, 20) if all(needs) else None
    opcheck(BACKWARD, (random(*out.shape), *tensors, out, lse, grad_lse, False, None, needs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad_output": random(2, 4, 3, 16)}, "grad_output is \\(2, 4, 3, 16\\)"),
        ({"output": random(2, 4, 20, 8)}, "output is \\(2, 4, 20, 8\\)"),
        ({"lse": random(2, 4, 3)}, "lse is \\(2, 4, 3\\)"),
        ({"lse": random(2, 4, 20, dtype=torch.float64)}, "lse is .* torch.float64"),
        ({"grad_lse": random(2, 1, 20)}, "grad_lse is \\(2, 1, 20\\)"),
        ({"key": random(2, 4, 24, 8)}, "head"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_backward_operator_refuses_what_does_not_fit(
    change: dict[str, torch.Tensor], message: str
) -> None:
    tensors = attention_tensors()
    out, lse = FORWARD(*tensors)
    arguments = dict(zip(("query", "key", "value"), tensors, strict=True))
    arguments |= {"grad_output": random(*out.shape), "output": out, "lse": lse}
    BACKWARD(**arguments)
    with pytest.raises(InputError, match=message):
        BACKWARD(**arguments | change)


def test_the_operators_of_experts_pass_all_checks() -> None:
    moe = make_moe(5, 32, 48, 4, 2)
    opcheck(FUSED_MOE, tuple(moe.tensors))
    *floats, ids = moe.tensors
    opcheck(FUSED_MOE, (*differentiable(floats, (True, False, True, True)), ids, "gelu", "interleaved"))
    opcheck(TOPK_ROUTING, (random(5, 8), 3, "sigmoid", False, random(8), 2.5))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "sequence before heads": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "heads before batch": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    "a slice of rows": lambda tensor: torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]],
    "a slice of sequences": lambda tensor: torch.cat([tensor, tensor], 2)[:, :, : tensor.shape[2]],
    "one head for all": lambda tensor: tensor[:, :1].expand(tensor.shape),
    "one batch for all": lambda tensor: tensor[:1].expand(tensor.shape),
}


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    seqlen_q=st.integers(1, 20),
    seqlen_k=st.integers(1, 20),
    head_dim=st.sampled_from([8, 24, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    causal=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
)
def test_fake_results_have_the_strides_of_real_ones(
    batch: int,
    group: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    layouts: tuple[str, str, str],
) -> None:
    plain = attention_tensors(batch, group * kv_heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype)
    tensors = [LAYOUTS[name](tensor) for name, tensor in zip(layouts, plain, strict=True)]
    check_without_tracing(*tensors, causal=causal)


def check_without_tracing(*tensors: torch.Tensor, causal: bool) -> None:
    opcheck(FORWARD, (*tensors, causal), test_utils=WITHOUT_TRACING)
    out, lse = FORWARD(*tensors, causal)
    opcheck(BACKWARD, (torch.ones_like(out), *tensors, out, lse, None, causal), test_utils=WITHOUT_TRACING)


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_the_operators_take_empty_tensors(empty: str) -> None:
    check_without_tracing(*attention_tensors(**{empty: 0}), causal=True)


# ---------------------------------------------------------------- transforms of torch.func


def test_operator_and_function_agree() -> None:
    tensors = attention_tensors()
    out, lse = flash_attention(*tensors, causal=True, softmax_scale=0.2, return_lse=True)
    mine, mine_lse = FORWARD(*tensors, True, 0.2)
    assert torch.equal(mine, out)
    assert torch.equal(mine_lse, lse)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (1, None, None), (None, 0, 2), (-1, 3, 4)], ids=str)
def test_vmap_of_attention(mapped: tuple[int | None, ...]) -> None:
    tensors = attention_tensors()
    size = 3
    stacks = [
        tensor
        if dimension is None
        else torch.stack([tensor * (1 + index) for index in range(size)], dimension)
        for tensor, dimension in zip(tensors, mapped, strict=True)
    ]

    def call(*tensors: torch.Tensor) -> Any:
        return flash_attention(*tensors, causal=True, return_lse=True)

    results = torch.func.vmap(call, in_dims=mapped)(*stacks)
    for index in range(size):
        one = [
            tensor if dimension is None else tensor.select(dimension, index).contiguous()
            for tensor, dimension in zip(stacks, mapped, strict=True)
        ]
        for result, expected in zip(results, call(*one), strict=True):
            assert torch.equal(result[index], expected)


def loss(*tensors: torch.Tensor) -> torch.Tensor:
    out, lse = flash_attention(*tensors, causal=True, return_lse=True)
    return out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()


def test_gradients_by_torch_func() -> None:
    tensors = attention_tensors()
    leaves = differentiable(tensors)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    gradients = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    _, pullback = torch.func.vjp(loss, *tensors)
    for one, other, third in zip(gradients, pullback(torch.ones(())), expected, strict=True):
        assert torch.equal(one, third)
        assert torch.equal(other, third)


def test_gradients_of_each_sample() -> None:
    stacks = [torch.stack([tensor, tensor * 2]) for tensor in attention_tensors()]
    gradients = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacks)
    for index in range(2):
        leaves = differentiable(tuple(stack[index] for stack in stacks))
        for mine, expected in zip(gradients, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            assert torch.equal(mine[index], expected)


def test_gradients_through_vmap() -> None:
    stacks = differentiable(tuple(torch.stack([tensor, tensor * 2]) for tensor in attention_tensors()))
    gradients = torch.autograd.grad(torch.func.vmap(loss)(*stacks).sum(), stacks)
    apart = differentiable(tuple(stack.detach() for stack in stacks))
    expected = torch.autograd.grad(sum(loss(*(each[index] for each in apart)) for index in range(2)), apart)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(
    "transform", [torch.func.hessian, lambda f: torch.func.grad(lambda x: torch.func.jacrev(f)(x).sum())]
)
def test_second_derivatives_and_forward_mode_are_refused_inside_transforms(transform: Any) -> None:
    query, key, value = attention_tensors(1, 1, 1, 2, 2, 8)
    with pytest.raises(InputError, match=r"first derivatives only|no forward-mode derivative") as raised:
        transform(lambda query: flash_attention(query, key, value).square().sum())(query)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("which", ["tokens", "experts", "ids", "all"])
def test_vmap_of_experts(which: str) -> None:
    moe = make_moe(5, 32, 48, 4, 2)
    hidden, w13, w2, weights, ids = moe.tensors
    ids = ids.clone()
    ids[0, 0], ids[1, 1] = -1, 4  # of no expert here
    mapped = {
        "tokens": (0, None, None, None, None),
        "experts": (None, 1, 0, None, None),
        "ids": (None, None, None, 0, 1),
        "all": (1, 0, 2, 0, 0),
    }[which]
    size = 3
    variants = [
        (hidden * (1 + index), w13 * (1 + index), w2 - index, weights + index, (ids + index) % 5 - 1)
        for index in range(size)
    ]
    stacks = [
        tensors[0] if dimension is None else torch.stack(tensors, dimension)
        for dimension, tensors in zip(mapped, zip(*variants, strict=True), strict=True)
    ]
    results = torch.func.vmap(fused_moe, in_dims=mapped)(*stacks)
    for index in range(size):
        one = [
            stack if dimension is None else stack.select(dimension, index).contiguous()
            for stack, dimension in zip(stacks, mapped, strict=True)
        ]
        assert torch.equal(results[index], fused_moe(*one))


def test_the_operators_of_experts_that_train_pass_all_checks() -> None:
    *floats, ids = make_moe(5, 32, 48, 4, 2).tensors
    for keep_z in (True, False):
        opcheck(TRAINING, (*differentiable(floats, (True,) * 4), ids, None, None, "silu", "concat", keep_z))
    output, z = TRAINING(*floats, ids)
    needs = (True, False, True, True, False, False)
    opcheck(MOE_BACKWARD, (random(*output.shape), *floats, ids, z, None, None, "silu", "concat", needs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad_output": random(3, 32)}, "grad_output is \\(3, 32\\)"),
        ({"grad_output": random(5, 32, dtype=torch.bfloat16)}, "grad_output is .* torch.bfloat16"),
        ({"z": random(10, 16)}, "z is \\(10, 16\\)"),
        ({"w13_bias": random(2, 96)}, "w13_bias is \\(2, 96\\)"),
        ({"w2_bias": random(4, 16)}, "w2_bias is \\(4, 16\\)"),
        ({"topk_weights": random(5, 1)}, "topk_weights .* differ in shape"),
        ({"w2": random(4, 16, 48)}, "hidden size 32 but w2 has 16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_backward_operator_of_experts_refuses_what_does_not_fit(
    change: dict[str, torch.Tensor], message: str
) -> None:
    names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
    arguments = dict(zip(names, make_moe(5, 32, 48, 4, 2).tensors, strict=True))
    arguments |= {"grad_output": random(5, 32), "z": random(10, 96)}
    MOE_BACKWARD(**arguments)
    with pytest.raises(InputError, match=message):
        MOE_BACKWARD(**arguments | change)


def test_the_operators_of_experts_take_biases() -> None:
    made = make_moe(5, 32, 48, 4, 2, biased=True)
    expected = fused_moe(*made.tensors, **made.biases)
    assert torch.equal(TRAINING(*made.tensors, made.w13_bias, made.w2_bias)[0], expected)
    assert torch.equal(torch.ops.flashmoe_science.fused_moe(*made.tensors, **made.biases), expected)
    compiled = torch.compile(fused_moe, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*made.tensors, **made.biases), expected)
    assert not torch.allclose(fused_moe(*made.tensors), expected)
    with pytest.raises(InputError, match=r"w2_bias is \(4, 96\) torch.float32; expected \(4, 32\)"):
        fused_moe(*made.tensors, w2_bias=made.w13_bias)


@pytest.mark.parametrize("mapped", [(1, None), (None, 0), (0, 1)], ids=str)
def test_vmap_of_biases(mapped: tuple[int | None, int | None]) -> None:
    made = make_moe(5, 32, 48, 4, 2, biased=True)
    biases = [
        bias if dimension is None else torch.stack([bias, -bias, 2 * bias], dim=dimension)
        for bias, dimension in zip(made.biases.values(), mapped, strict=True)
    ]

    def call(w13_bias: torch.Tensor, w2_bias: torch.Tensor) -> torch.Tensor:
        return fused_moe(*made.tensors, w13_bias=w13_bias, w2_bias=w2_bias)

    results = torch.func.vmap(call, in_dims=mapped)(*biases)
    for index in range(3):
        one = [
            bias if dimension is None else bias.select(dimension, index).contiguous()
            for bias, dimension in zip(biases, mapped, strict=True)
        ]
        assert torch.equal(results[index], call(*one))


def test_gradients_of_each_sample_of_experts() -> None:
    hidden, w13, w2, weights, ids = make_moe(5, 32, 48, 4, 2).tensors

    def loss(w13: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return fused_moe(hidden, w13, w2, weights, ids).square().sum()

    samples = torch.stack([hidden, 2 * hidden, -hidden])
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w13, samples)
    for index in range(3):
        assert torch.equal(each[index], torch.func.grad(loss)(w13, samples[index]))


@pytest.mark.parametrize("mapped", [(0, None), (1, 0), (None, 1)], ids=str)
def test_vmap_of_routing(mapped: tuple[int | None, int | None]) -> None:
    logits, bias = random(3, 5, 8), random(3, 8, seed=1)
    one = logits[0] if mapped[0] is None else logits.movedim(0, mapped[0])
    other = bias[0] if mapped[1] is None else bias.movedim(0, mapped[1])

    def call(logits: torch.Tensor, bias: torch.Tensor) -> Any:
        return topk_routing(logits, 2, scores="sigmoid", correction_bias=bias)

    weights, ids = torch.func.vmap(call, in_dims=mapped)(one, other)
    for index in range(3):
        expected = call(logits[0 if mapped[0] is None else index], bias[0 if mapped[1] is None else index])
        # PyTorch's softmax rounds by how many rows it is given.
        torch.testing.assert_close(weights[index], expected[0])
        assert torch.equal(ids[index], expected[1])


# ---------------------------------------------------------------- counting and checkpointing


def test_operations_are_counted_as_pytorch_counts_its_own() -> None:
    tensors = differentiable(attention_tensors())
    with FlopCounterMode(display=False) as counter:
        flash_attention(*tensors, causal=True).sum().backward()  # type: ignore[union-attr]
    product = 2 * 2 * 4 * 20 * 30 * 32
    assert counter.get_total_flops() == 2 * product + 5 * product
    with FlopCounterMode(display=False) as counter:
        flash_attention(*differentiable(attention_tensors(), (False, False, True))).sum().backward()  # type: ignore[union-attr]
    assert counter.get_total_flops() == 2 * product + 2 * product
    moe = make_moe(5, 32, 48, 4, 2)
    with FlopCounterMode(display=False) as counter:
        fused_moe(*moe.tensors)
    forward = 6 * 5 * 2 * 32 * 48
    assert counter.get_total_flops() == forward
    *floats, ids = moe.tensors
    for needed, recompute, products in (
        ((True, True, True, True), False, 18),
        ((True, True, True, True), True, 22),
        ((False, False, False, True), False, 8),
    ):
        leaves = differentiable(floats, needed)
        with FlopCounterMode(display=False) as counter:
            fused_moe(*leaves, ids, recompute=recompute).sum().backward()
        assert counter.get_total_flops() == products * forward // 6


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each forward pass of attention."""
    calls: list[int] = []
    forward = cpu_attention.forward

    def counted(*tensors: torch.Tensor, **options: Any) -> Any:
        calls.append(1)
        return forward(*tensors, **options)

    monkeypatch.setattr(cpu_attention, "forward", counted)
    return calls


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_selective_checkpointing_keeps_attention(compiled: bool, forwards: list[int]) -> None:
    def block(*tensors: torch.Tensor) -> torch.Tensor:
        out = flash_attention(tensors[0].sin(), *tensors[1:])
        assert isinstance(out, torch.Tensor)
        return out.sin()

    def selective(*tensors: torch.Tensor) -> torch.Tensor:
        out = checkpoint(block, *tensors, use_reentrant=False, context_fn=context_fn)
        assert isinstance(out, torch.Tensor)
        return out

    tensors = differentiable(attention_tensors())
    expected = torch.autograd.grad(block(*tensors).sum(), tensors)
    call = torch.compile(selective, backend="aot_eager", fullgraph=True) if compiled else selective
    forwards.clear()
    gradients = torch.autograd.grad(call(*tensors).sum(), tensors)
    assert len(forwards) == 1
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    plain = checkpoint(block, *tensors, use_reentrant=False)
    assert isinstance(plain, torch.Tensor)
    forwards.clear()
    plain.sum().backward()
    assert len(forwards) == 1  # in the backward pass, once more


def test_the_list_of_operators_to_save_names_what_a_policy_sees() -> None:
    assert {each.name() for each in save_list()} == {
        "flashmoe_science::flash_attention_forward",
        "flashmoe_science::flash_attention_with_options",
        "flashmoe_science::fused_moe",
        "flashmoe_science::fused_moe_training",
        "flashmoe_science::topk_routing",
    }


# ---------------------------------------------------------------- export


class Layer(torch.nn.Module):
    """Attention, then experts over its output."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(32, 4, bias=False)
        self.w13 = torch.nn.Parameter(random(4, 2 * 48, 32, seed=5) / 6)
        self.w2 = torch.nn.Parameter(random(4, 32, 48, seed=6) / 7)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mixed = flash_attention(query, key, value, causal=True)
        assert isinstance(mixed, torch.Tensor)
        rows = mixed.transpose(1, 2).reshape(-1, 32)
        weights, ids = topk_routing(self.router(rows), 2)
        return fused_moe(rows, self.w13, self.w2, weights, ids)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_saved_loaded_and_takes_other_sizes(strict: bool) -> None:
    layer = Layer().eval().requires_grad_(False)
    batch, seqlen = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("seqlen", min=2, max=4096)
    shapes = tuple({0: batch, 2: seqlen} for _ in range(3))
    program = torch.export.export(
        layer, attention_tensors(2, 4, 2, 20, 20), dynamic_shapes=shapes, strict=strict
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {name for name in names if name.startswith("flashmoe_science")} == {
        "flashmoe_science.flash_attention_forward.default",
        "flashmoe_science.fused_moe.default",
        "flashmoe_science.topk_routing.default",
    }
    for sizes in ((2, 4, 2, 20, 20), (5, 4, 2, 33, 33)):
        tensors = attention_tensors(*sizes)
        assert torch.equal(loaded(*tensors), layer(*tensors))


def test_compiled_autograd_of_an_eager_call_has_no_graph_break() -> None:
    tensors = differentiable(attention_tensors())
    expected = torch.autograd.grad(loss(*tensors), tensors)
    backend: Any = torch.compile(backend="aot_eager", fullgraph=True)
    result = loss(*tensors)
    with torch._dynamo.compiled_autograd._enable(backend):
        result.backward()
    for tensor, gradient in zip(tensors, expected, strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, gradient)


@pytest.mark.parametrize("needed", list(itertools.product((True, False), repeat=3))[:-1], ids=str)
def test_only_needed_gradients_are_asked_of_the_operator(needed: tuple[bool, ...]) -> None:
    tensors = differentiable(attention_tensors(), needed)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    expected = torch.autograd.grad(loss(*tensors), leaves)
    out, lse = FORWARD(*tensors, True)
    value = out.square().sum() + lse.sum()
    for mine, theirs in zip(torch.autograd.grad(value, leaves), expected, strict=True):
        assert torch.equal(mine, theirs)
