"""Gradients of experts on the matrix unit: by loops in place of its instructions, and by these where there are any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_unit import UNITS, code_of
from moe_gradients import assert_gradients_as_exact_as_torch
from moe_reference import Moe, make_moe

from flashmoe_science.cpu import library, moe_backward, moe_training
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MoeGradients, MoeNeeds, MoeTensors

BF16 = torch.bfloat16
ALL = MoeNeeds(True, True, True, True)


@pytest.fixture(scope="module", autouse=True, params=UNITS)
def _unit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every call of the backward pass takes the code for the matrix unit."""
    instruction_set, macros = code_of(request.param)
    function = library.load_function("moe_backward", "flashmoe_moe_backward_method", instruction_set, macros)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_backward, "_load", lambda _: function)
        yield


def gradients_of(
    moe: Moe, grad_output: torch.Tensor, activation: Activation = Activation.SILU, needs: MoeNeeds = ALL
) -> MoeGradients:
    options = {"activation": activation, "w13_layout": W13Layout.CONCAT}
    _, z = moe_training.forward(MoeTensors(*moe.tensors), keep_z=True, **options)
    return moe_training.backward(grad_output, MoeTensors(*moe.tensors), z, needs=needs, **options)


def incoming(moe: Moe) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(moe.hidden_states.shape, generator=generator).to(BF16)


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k"),
    [
        (0, 64, 32, 4, 2),
        (1, 16, 16, 1, 1),
        (5, 48, 112, 4, 4),
        (37, 144, 80, 5, 2),
        (101, 32, 144, 1, 1),  # more slots than a tile has rows, and more columns than a tile has
        (300, 48, 32, 2, 2),  # several parts of the depth, where it is slots
        (3, 528, 272, 2, 1),  # and where it is a row
    ],
)
def test_shapes(tokens: int, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
    moe = make_moe(tokens, hidden, intermediate, experts, top_k, dtype=BF16)
    grad_output = incoming(moe)
    assert_gradients_as_exact_as_torch(gradients_of(moe, grad_output)[:4], moe, grad_output)


@pytest.mark.parametrize("activation", Activation, ids=lambda each: each.value)
def test_activations(activation: Activation) -> None:
    moe = make_moe(29, 64, 48, 4, 2, dtype=BF16, activation=activation)
    grad_output = incoming(moe)
    gradients = gradients_of(moe, grad_output, activation)
    assert_gradients_as_exact_as_torch(gradients[:4], moe, grad_output, activation)


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 120),
    hidden=st.integers(1, 18),
    intermediate=st.integers(1, 9),
    experts=st.integers(1, 5),
    data=st.data(),
)
def test_any_shape_and_any_routing(
    tokens: int, hidden: int, intermediate: int, experts: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    moe = make_moe(tokens, 16 * hidden, 16 * intermediate, experts, top_k, dtype=BF16)
    for index, value in enumerate(data.draw(st.lists(st.integers(-1, experts), max_size=80))):
        moe.topk_ids.view(-1)[index * 7 % moe.topk_ids.numel()] = value
    grad_output = incoming(moe)
    assert_gradients_as_exact_as_torch(gradients_of(moe, grad_output)[:4], moe, grad_output)


def test_the_matrix_unit_is_what_computes() -> None:
    """Of 2^25 + 1 - 2^25, the number in the middle second in its pair, it leaves 1; dot products of pairs lose it."""
    hidden_states = torch.tensor([-(2.0**25), 0.0, 2.0**25, 1.0]).to(BF16).view(4, 1).repeat(1, 16)
    w13, w2 = torch.ones(1, 16, 16, dtype=BF16), torch.full((1, 16, 16), 1 / 16, dtype=BF16)
    routing = torch.full((4, 1), 0.5), torch.zeros(4, 1, dtype=torch.int32)
    ones = torch.ones(4, 16, dtype=BF16)
    gradients = moe_training.backward(
        ones,
        MoeTensors(hidden_states, w13, w2, *routing),
        ones,
        activation=Activation.RELU2_NO_MUL,
        w13_layout=W13Layout.CONCAT,
        needs=ALL,
    )
    assert gradients.w13 is not None
    assert torch.equal(gradients.w13, torch.ones_like(gradients.w13))


def test_the_number_of_threads_changes_no_bit() -> None:
    moe = make_moe(150, 144, 160, 3, 2, dtype=BF16)
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


def test_nan_stays_in_its_token() -> None:
    """What a register holds beyond the tile's rows and depth reaches no gradient."""
    moe = make_moe(37, 80, 48, 1, 1, dtype=BF16)
    clean = gradients_of(moe, incoming(moe))
    grad_output = incoming(moe)
    grad_output[33, 5] = float("nan")
    gradients = gradients_of(moe, grad_output)
    assert gradients.hidden_states is not None
    assert clean.hidden_states is not None
    assert gradients.hidden_states[33].isnan().all()
    others = torch.arange(37) != 33
    assert torch.equal(gradients.hidden_states[others], clean.hidden_states[others])
