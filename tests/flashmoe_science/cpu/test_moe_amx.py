"""Experts' products on the matrix unit: by loops in place of its instructions, and by these where the processor can."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cpu_attention import GuardedMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_unit import UNITS, code_of, code_of_pairs
from moe_reference import Moe, assert_as_exact_as_torch, exact_moe, interleaved, make_moe, torch_moe

from flashmoe_science.cpu import library, moe_training
from flashmoe_science.cpu import moe as cpu_moe
from flashmoe_science.jit import host
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MoeTensors

BF16 = torch.bfloat16
LEAST = 5
"""MOE_AMX_LEAST_TOKENS of moe_amx.h."""


@pytest.fixture(scope="module", autouse=True, params=UNITS)
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every call of the kernel takes the code for the matrix unit."""
    load = library.load_function
    instruction_set, macros = code_of(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_moe, "_plans", {})
        patch.setattr(
            cpu_moe, "_load", lambda _: load("moe_forward", "flashmoe_moe_method", instruction_set, macros)
        )
        yield request.param


@pytest.fixture
def by_dot_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test undoes it, as on a processor without the unit."""
    load = library.load_function
    monkeypatch.setattr(cpu_moe, "_plans", {})
    monkeypatch.setattr(
        cpu_moe, "_load", lambda _: load("moe_forward", "flashmoe_moe_method", *code_of_pairs())
    )


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k"),
    [
        (0, 64, 32, 4, 2),
        (LEAST, 16, 16, 1, 1),
        (16, 32, 32, 1, 1),
        (17, 80, 48, 2, 2),
        (33, 48, 112, 3, 3),
        (65, 144, 80, 5, 2),
        (259, 32, 48, 1, 1),
        (261, 32, 48, 1, 1),
        (7, 2064, 1040, 1, 1),
    ],
)
def test_shapes(tokens: int, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
    """Whole registers and less of tokens, rows and depth; of 259 tokens 256 are on the unit, 3 by dot products."""
    moe = make_moe(tokens, hidden, intermediate, experts, top_k, dtype=BF16)
    assert_as_exact_as_torch(cpu_moe.forward(*moe.tensors), moe)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("activation", Activation, ids=lambda each: each.value)
def test_activations(activation: Activation, biased: bool) -> None:
    moe = make_moe(40, 64, 48, 4, 2, dtype=BF16, activation=activation, biased=biased)
    out = cpu_moe.forward(*moe.tensors, activation=activation, **moe.biases)
    assert_as_exact_as_torch(out, moe, activation)


@pytest.mark.parametrize("given_bias", ["w13_bias", "w2_bias"])
def test_one_bias(given_bias: str) -> None:
    moe = make_moe(40, 64, 48, 4, 2, dtype=BF16, biased=True)
    moe = replace(Moe(*moe.tensors), **{given_bias: moe.biases[given_bias]})
    assert_as_exact_as_torch(cpu_moe.forward(*moe.tensors, **moe.biases), moe)


def tensors_of(moe: Moe, *, of_pairs: bool) -> MoeTensors:
    """With the rows of w13 and its bias in pairs, or as they are."""
    if not of_pairs or moe.w13_bias is None:
        return MoeTensors(*moe.tensors, moe.w13_bias, moe.w2_bias)
    hidden_states, w13, *rest = moe.tensors
    bias = interleaved(moe.w13_bias[..., None])[..., 0]
    return MoeTensors(hidden_states, interleaved(w13), *rest, bias, moe.w2_bias)


@pytest.mark.parametrize("activation", [each for each in Activation if each.gated])
def test_interleaved_weights_give_the_same_bits(activation: Activation) -> None:
    """Also in what is kept for the backward pass, which has its columns in the order of w13's rows."""
    moe = make_moe(40, 48, 80, 3, 2, dtype=BF16, activation=activation, biased=True)
    out, z = moe_training.forward(
        tensors_of(moe, of_pairs=False), activation=activation, w13_layout=W13Layout.CONCAT, keep_z=True
    )
    of_pairs, z_of_pairs = moe_training.forward(
        tensors_of(moe, of_pairs=True), activation=activation, w13_layout=W13Layout.INTERLEAVED, keep_z=True
    )
    assert torch.equal(of_pairs, out)
    assert z is not None
    assert z_of_pairs is not None
    assert torch.equal(z_of_pairs, interleaved(z.T[None]).squeeze(0).T)


@pytest.mark.parametrize(
    "activation", [Activation.SILU, Activation.RELU2_NO_MUL], ids=lambda each: each.value
)
def test_what_is_kept_for_the_backward_pass(activation: Activation) -> None:
    """The first product of each slot by experts, the same bits when it is computed alone, and of rounded exact sums."""
    moe = make_moe(60, 80, 48, 3, 2, dtype=BF16, activation=activation, biased=True)
    moe.topk_ids[3, 1], moe.topk_ids[7, 0] = -1, 3
    tensors = tensors_of(moe, of_pairs=False)
    out, z = moe_training.forward(tensors, activation=activation, w13_layout=W13Layout.CONCAT, keep_z=True)
    assert z is not None
    assert torch.equal(out, cpu_moe.forward(*moe.tensors, activation=activation, **moe.biases))
    alone = cpu_moe.project(*moe.tensors, moe.w13_bias, activation=activation, w13_layout=W13Layout.CONCAT)
    ids = moe.topk_ids.flatten()
    order = [slot for expert in range(3) for slot in (ids == expert).nonzero().flatten().tolist()]
    assert len(order) == 118
    assert torch.equal(alone[: len(order)], z[: len(order)])
    assert moe.w13_bias is not None
    for row, slot in enumerate(order):
        expert = int(ids[slot])
        exact = moe.w13[expert].double() @ moe.hidden_states[slot // 2].double()
        torch.testing.assert_close(
            z[row].double(), exact + moe.w13_bias[expert].double(), atol=1e-5, rtol=2**-8
        )


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 80),
    hidden=st.integers(1, 9),
    intermediate=st.integers(1, 9),
    experts=st.integers(1, 6),
    data=st.data(),
)
def test_any_shape_and_any_routing(
    tokens: int, hidden: int, intermediate: int, experts: int, data: st.DataObject
) -> None:
    """Experts with few tokens beside those with many, ids in and out of range, repeated, in both widths."""
    top_k = data.draw(st.integers(1, experts))
    wide = data.draw(st.booleans())
    moe = make_moe(tokens, 16 * hidden, 16 * intermediate, experts, top_k, dtype=BF16)
    limit = 2**40 if wide else 2**31 - 1
    strange = data.draw(st.lists(st.integers(-limit, limit) | st.just(0), max_size=80))
    ids = moe.topk_ids.to(torch.int64 if wide else torch.int32)
    for index, value in enumerate(strange):
        if ids.numel():
            ids.view(-1)[index * 7 % ids.numel()] = value
    moe = type(moe)(*moe.tensors[:4], ids)
    assert_as_exact_as_torch(cpu_moe.forward(*moe.tensors), moe)


def test_rounding_is_pytorchs_over_many_draws() -> None:
    ours, theirs = [], []
    for seed in range(20):
        moe = make_moe(12, 64, 48, 2, 2, dtype=BF16, seed=seed)
        exact = exact_moe(moe)
        scale = exact.square().mean().sqrt()
        ours.append((cpu_moe.forward(*moe.tensors).double() - exact) / scale)
        theirs.append((torch_moe(moe).double() - exact) / scale)
    error, their_error = (torch.stack(each).square().mean().sqrt() for each in (ours, theirs))
    assert error <= 1.15 * their_error


def test_the_matrix_unit_is_what_computes() -> None:
    """From as many tokens on as the header says.

    It adds 1 to 2^24, where it is lost, before 2^24 is taken away; dot products do so in other lanes.
    """
    for tokens, sum_of_row in ((LEAST - 1, 1.0), (LEAST, 0.0), (40, 0.0)):
        hidden_states = torch.zeros(tokens, 64, dtype=BF16)
        hidden_states[:, 0], hidden_states[:, 2], hidden_states[:, 32] = 2.0**24, 1.0, -(2.0**24)
        w13, w2 = torch.ones(1, 16, 64, dtype=BF16), torch.full((1, 64, 16), 1 / 16, dtype=BF16)
        routing = torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int32)
        out = cpu_moe.forward(hidden_states, w13, w2, *routing, activation=Activation.RELU2_NO_MUL)
        assert torch.equal(out, torch.full_like(out, sum_of_row))


@pytest.mark.usefixtures("by_dot_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_other_types_have_the_bits_of_processors_without_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = make_moe(40, 144, 80, 2, 2, dtype=dtype)
    without = cpu_moe.forward(*moe.tensors)
    monkeypatch.undo()
    assert torch.equal(cpu_moe.forward(*moe.tensors), without)


def test_nan_and_infinity_stay_in_their_tokens() -> None:
    moe = make_moe(70, 80, 48, 2, 1, dtype=BF16)
    clean = cpu_moe.forward(*moe.tensors)
    moe.hidden_states[33, 5], moe.hidden_states[40, 79] = float("nan"), float("inf")
    out = cpu_moe.forward(*moe.tensors)
    assert out[33].isnan().all()
    assert not out[40].isfinite().any()
    others = [token for token in range(70) if token not in (33, 40)]
    assert torch.equal(out[others], clean[others])


def test_an_expert_that_nobody_chose_is_not_read() -> None:
    moe = make_moe(40, 64, 32, 5, 2, dtype=BF16)
    moe.topk_ids[moe.topk_ids == 3] = 0
    moe.w13[3], moe.w2[3] = float("nan"), float("nan")
    assert cpu_moe.forward(*moe.tensors).isfinite().all()


def test_the_number_of_threads_changes_no_bit() -> None:
    moe = make_moe(300, 80, 112, 6, 3, dtype=BF16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(cpu_moe.forward(*moe.tensors))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_more_tokens_than_one_chunk_holds() -> None:
    moe = make_moe(6000, 2048, 16, 2, 2, dtype=BF16)
    out = cpu_moe.forward(*moe.tensors)
    for part in (slice(0, 20), slice(4050, 4080), slice(5980, 6000)):
        hidden_states, w13, w2, weights, ids = moe.tensors
        again = cpu_moe.forward(hidden_states[part], w13, w2, weights[part], ids[part])
        assert torch.equal(out[part], again)


@pytest.mark.parametrize("at_end", [False, True], ids=["start", "end"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"), [(LEAST, 16, 16), (16, 64, 32), (37, 80, 112), (70, 48, 16)]
)
def test_nothing_outside_the_tensors_is_read(
    tokens: int, hidden: int, intermediate: int, at_end: bool
) -> None:
    """Sanitizers and valgrind do not see what the unit's own instructions read; a page that is not there does."""
    moe = make_moe(tokens, hidden, intermediate, 1, 1, dtype=BF16, biased=True)
    guarded = [GuardedMemory(each, at_end).tensor for each in moe.tensors]
    biases = {name: GuardedMemory(each, at_end).tensor for name, each in moe.biases.items()}
    assert torch.equal(cpu_moe.forward(*guarded, **biases), cpu_moe.forward(*moe.tensors, **moe.biases))


def test_without_memory_there_is_an_error(unit: str) -> None:
    """For a thread's packed tokens; nothing is written."""
    instruction_set, macros = code_of(unit)
    built = host.build(library.SOURCES / "moe_forward.cpp", "moe_forward", instruction_set, macros=macros)
    launch = host.load(built).flashmoe_moe_forward
    launch.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int]
    huge = (ctypes.c_int64 * 11)(1, LEAST, 2**50, 16, 1, 1, 1, 0, 0, 0, 0)
    address = ctypes.addressof(huge)
    assert launch(address, *[address] * 11, 1) == 1
