from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_gradients import assert_gradients_as_exact_as_torch
from moe_reference import Moe, interleaved, make_moe
from sanitizers import output_under_sanitizers

from flashmoe_science import InputError, moe_composition
from flashmoe_science.cpu import moe_training
from flashmoe_science.cpu.library import SOURCES
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MoeGradients, MoeNeeds, MoeTensors
from instruction_sets import each_instruction_set

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = MoeNeeds(True, True, True, True)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def gradients_of(
    moe: Moe,
    grad_output: torch.Tensor,
    activation: Activation = Activation.SILU,
    layout: W13Layout = W13Layout.CONCAT,
    needs: MoeNeeds = ALL,
    **options: Any,
) -> MoeGradients:
    _, z = moe_training.forward(
        MoeTensors(*moe.tensors), activation=activation, w13_layout=layout, keep_z=True
    )
    return moe_training.backward(
        grad_output,
        MoeTensors(*moe.tensors),
        z,
        activation=activation,
        w13_layout=layout,
        needs=needs,
        **options,
    )


def incoming(moe: Moe, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(moe.hidden_states.shape, generator=generator).to(moe.hidden_states.dtype)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k"),
    [
        (0, 64, 32, 4, 2),
        (1, 16, 16, 1, 1),
        (5, 48, 112, 4, 4),
        (37, 144, 80, 5, 2),
        (101, 32, 144, 1, 1),  # more slots than a tile has rows, and more columns than a tile has
        (3, 528, 272, 2, 1),  # several parts of the depth
    ],
)
def test_shapes_on_every_instruction_set(
    instruction_set: InstructionSet,
    dtype: torch.dtype,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
) -> None:
    moe = make_moe(tokens, hidden, intermediate, experts, top_k, dtype=dtype)
    grad_output = incoming(moe)
    gradients = gradients_of(moe, grad_output, instruction_set=instruction_set)
    assert_gradients_as_exact_as_torch(gradients[:4], moe, grad_output)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("activation", Activation, ids=lambda each: each.value)
def test_activations(activation: Activation, dtype: torch.dtype, instruction_set: InstructionSet) -> None:
    moe = make_moe(9, 64, 48, 4, 2, dtype=dtype, activation=activation)
    grad_output = incoming(moe)
    gradients = gradients_of(moe, grad_output, activation, instruction_set=instruction_set)
    assert_gradients_as_exact_as_torch(gradients[:4], moe, grad_output, activation)


@each_instruction_set
@pytest.mark.parametrize("activation", Activation, ids=lambda each: each.value)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_activations_from_tiny_to_large_arguments(
    activation: Activation, scale: float, instruction_set: InstructionSet
) -> None:
    """From projections of float64: at a gate near zero among large ones the forward's rounding would be judged."""
    moe = make_moe(20, 64, 48, 4, 1, activation=activation)
    moe.hidden_states.mul_(scale)
    grad_output = incoming(moe)
    order, _ = moe_composition.slots_by_expert(moe.topk_ids, 4)
    experts = moe.topk_ids.flatten()[order]
    z = torch.einsum("th,trh->tr", moe.hidden_states[order].double(), moe.w13[experts].double()).float()
    gradients = moe_training.backward(
        grad_output,
        MoeTensors(*moe.tensors),
        z,
        activation=activation,
        w13_layout=W13Layout.CONCAT,
        needs=ALL,
        instruction_set=instruction_set,
    )
    assert_gradients_as_exact_as_torch(gradients[:4], moe, grad_output, activation)


@each_dtype
@pytest.mark.parametrize("activation", [each for each in Activation if each.gated])
def test_interleaved_weights_give_the_same_bits(activation: Activation, dtype: torch.dtype) -> None:
    moe = make_moe(11, 32, 144, 3, 2, dtype=dtype, activation=activation)
    other = replace(moe, w13=interleaved(moe.w13))
    grad_output = incoming(moe)
    concat = gradients_of(moe, grad_output, activation)
    mixed = gradients_of(other, grad_output, activation, W13Layout.INTERLEAVED)
    assert concat.w13 is not None
    assert mixed.w13 is not None
    assert torch.equal(interleaved(concat.w13), mixed.w13)
    for name in ("w2", "topk_weights"):
        assert torch.equal(getattr(concat, name), getattr(mixed, name))
    # The rows of w13 are summed in another order.
    exactness = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(
        concat.hidden_states, mixed.hidden_states, atol=exactness, rtol=exactness, check_dtype=True
    )


@settings(max_examples=40)
@given(
    tokens=st.integers(0, 20),
    hidden=st.integers(1, 9),
    intermediate=st.integers(1, 9),
    experts=st.integers(1, 12),
    data=st.data(),
)
def test_any_shape_any_routing_and_any_needs(
    tokens: int, hidden: int, intermediate: int, experts: int, data: st.DataObject
) -> None:
    """Where there are few numbers PyTorch may be exact by luck, so values that miss a bound are drawn once more."""
    top_k = data.draw(st.integers(1, experts))
    dtype = data.draw(st.sampled_from(DTYPES))
    moe, other = (
        make_moe(tokens, 16 * hidden, 16 * intermediate, experts, top_k, dtype=dtype, seed=seed)
        for seed in (0, 1)
    )
    choices = st.one_of(st.integers(0, experts - 1), st.sampled_from([-1, experts, 2**31 - 1, -(2**31)]))
    drawn = data.draw(st.lists(choices, min_size=tokens * top_k, max_size=tokens * top_k))
    moe = replace(moe, topk_ids=torch.tensor(drawn, dtype=torch.int64).view(tokens, top_k))
    needs = MoeNeeds(*data.draw(st.tuples(*[st.booleans()] * 4).filter(any)))
    grad_output = incoming(moe)
    gradients = gradients_of(moe, grad_output, needs=needs)
    assert [gradient is not None for gradient in gradients] == list(needs)
    try:
        assert_gradients_as_exact_as_torch(gradients[:4], moe, grad_output)
    except AssertionError:
        other = replace(other, topk_ids=moe.topk_ids)
        again = gradients_of(other, incoming(other, 2), needs=needs)
        assert_gradients_as_exact_as_torch(again[:4], other, incoming(other, 2))
    every = gradients_of(moe, grad_output)
    for gradient, whole in zip(gradients, every, strict=True):
        assert gradient is None or (whole is not None and torch.equal(gradient, whole))


@each_instruction_set
@each_dtype
def test_biases(dtype: torch.dtype, instruction_set: InstructionSet) -> None:
    """Against the composition in float64, which is checked by differences: z has the first bias in it."""
    moe = make_moe(30, 48, 144, 5, 2, dtype=dtype)
    z = torch.randn(60, 288).to(dtype)
    w13_bias, w2_bias = torch.randn(5, 288).to(dtype), torch.randn(5, 48).to(dtype)
    grad_output = incoming(moe)
    options: Any = {
        "activation": Activation.SILU,
        "w13_layout": W13Layout.CONCAT,
        "needs": MoeNeeds(*[True] * 6),
    }
    given_tensors = (grad_output, *moe.tensors[:4], z, w13_bias, w2_bias)
    of, w13, w2, weights, kept, first, second = (tensor.double() for tensor in given_tensors[1:])
    exact = moe_composition.backward(
        grad_output.double(),
        MoeTensors(of, w13, w2, weights, moe.topk_ids, first, second),
        kept,
        **options,
    )
    gradients = moe_training.backward(
        grad_output,
        MoeTensors(*moe.tensors, w13_bias, w2_bias),
        z,
        instruction_set=instruction_set,
        **options,
    )
    composed = moe_composition.backward(
        grad_output, MoeTensors(*moe.tensors, w13_bias, w2_bias), z, **options
    )
    for ours, true, theirs in zip(gradients, exact, composed, strict=True):
        assert ours is not None
        assert true is not None
        assert theirs is not None
        rounding = torch.finfo(dtype).eps * true.square().mean().sqrt()
        of_torch = (theirs.double() - true).square().mean().sqrt()
        assert (ours.double() - true).square().mean().sqrt() <= 2 * of_torch + rounding


@each_dtype
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    moe = make_moe(150, 144, 160, 3, 2, dtype=dtype)
    grad_output = incoming(moe)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(gradients_of(moe, grad_output))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for ours, theirs in zip(results[0][:4], other[:4], strict=True):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours, theirs)


@each_dtype
def test_projections_that_are_computed_again_have_the_same_bits(dtype: torch.dtype) -> None:
    moe = make_moe(40, 64, 48, 5, 2, dtype=dtype, biased=True)
    moe.topk_ids[3, 1], moe.topk_ids[0, 0] = -1, 5
    grad_output = incoming(moe)
    kept = gradients_of(moe, grad_output)
    again = moe_training.backward(
        grad_output,
        MoeTensors(*moe.tensors),
        None,
        activation=Activation.SILU,
        w13_layout=W13Layout.CONCAT,
        needs=ALL,
    )
    for ours, theirs in zip(kept[:4], again[:4], strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def test_a_tensor_without_memory_is_named() -> None:
    moe = make_moe(4, 32, 16, 3, 2)
    grad_output = incoming(moe)
    _, z = moe_training.forward(
        MoeTensors(*moe.tensors), activation=Activation.SILU, w13_layout=W13Layout.CONCAT, keep_z=True
    )
    assert z is not None
    z.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="z has no memory"):
        moe_training.backward(
            grad_output,
            MoeTensors(*moe.tensors),
            z,
            activation=Activation.SILU,
            w13_layout=W13Layout.CONCAT,
            needs=ALL,
        )


def test_no_undefined_behaviour_under_the_sanitizers() -> None:
    calls = Path(__file__).with_name("sanitized_moe_backward_calls.py")
    assert "passed" in output_under_sanitizers(SOURCES / "moe_backward.cpp", calls)


def test_without_memory_there_is_an_error() -> None:
    """A scratch buffer that cannot be had; nothing is written."""
    build = host.build(SOURCES / "moe_backward.cpp", "moe_backward", host.choose_instruction_set())
    launch = host.load(build).flashmoe_moe_backward
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    huge = (ctypes.c_int64 * 10)(0, 2**40, 16, 2**20, 1, 1, 1, 0, 0, 64)
    address = ctypes.addressof(huge)
    tensors = (ctypes.c_void_p * 14)(*[address] * 14)
    assert launch(address, ctypes.addressof(tensors), 1) == 1
    nothing = (ctypes.c_void_p * 14)()
    assert launch(address, ctypes.addressof(nothing), 1) == 2
