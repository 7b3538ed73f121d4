from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_reference import Moe, assert_as_exact_as_torch, exact_moe, interleaved, make_moe, torch_moe
from sanitizers import output_under_sanitizers

from flashmoe_science.cpu import moe as cpu_moe
from flashmoe_science.cpu.library import SOURCES
from flashmoe_science.errors import InputError
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Activation, W13Layout
from instruction_sets import any_instruction_set, each_instruction_set

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@each_instruction_set
@each_dtype
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k"),
    [
        (0, 64, 32, 4, 2),
        (1, 16, 16, 1, 1),
        (1, 80, 48, 8, 3),
        (5, 48, 112, 4, 4),
        (37, 144, 80, 5, 2),
        (70, 32, 64, 2, 1),
        (3, 2064, 1040, 2, 1),
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
    assert_as_exact_as_torch(cpu_moe.forward(*moe.tensors, instruction_set=instruction_set), moe)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("activation", Activation, ids=lambda each: each.value)
def test_activations(activation: Activation, dtype: torch.dtype, instruction_set: InstructionSet) -> None:
    moe = make_moe(9, 64, 48, 4, 2, dtype=dtype, activation=activation)
    out = cpu_moe.forward(*moe.tensors, activation=activation, instruction_set=instruction_set)
    assert_as_exact_as_torch(out, moe, activation)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("given_biases", ["both", "w13_bias", "w2_bias"])
def test_biases(given_biases: str, dtype: torch.dtype, instruction_set: InstructionSet) -> None:
    moe = make_moe(9, 64, 48, 4, 2, dtype=dtype, activation=Activation.SWIGLU_OAI, biased=True)
    if given_biases != "both":
        moe = replace(Moe(*moe.tensors), **{given_biases: moe.biases[given_biases]})
    moe.topk_ids[2, 0], moe.topk_ids[5, 1] = -1, 4
    out = cpu_moe.forward(
        *moe.tensors, activation=Activation.SWIGLU_OAI, instruction_set=instruction_set, **moe.biases
    )
    assert_as_exact_as_torch(out, moe, Activation.SWIGLU_OAI)


def test_calls_with_biases_are_checked_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those without: decode steps of GPT-OSS. Other biases are checked where the same shapes have run."""
    moe = make_moe(2, 64, 48, 4, 2, activation=Activation.SWIGLU_OAI, biased=True)
    options = {"activation": Activation.SWIGLU_OAI, **moe.biases}
    first = cpu_moe.forward(*moe.tensors, **options)
    checks = []
    check = cpu_moe.check_moe_arguments
    monkeypatch.setattr(
        cpu_moe, "check_moe_arguments", lambda *given: (checks.append(given), check(*given))[1]
    )
    assert torch.equal(cpu_moe.forward(*moe.tensors, **options), first)
    assert checks == []
    w13_bias = moe.biases["w13_bias"]
    for wrong, message in (
        (w13_bias[:, :48], "w13_bias"),
        (w13_bias.half(), "w13_bias"),
        (w13_bias.t().contiguous().t(), "w13_bias is not contiguous"),
        (w13_bias.to("meta"), "w13_bias is on meta"),
    ):
        with pytest.raises(InputError, match=message):
            cpu_moe.forward(*moe.tensors, **{**options, "w13_bias": wrong})
    assert len(checks) == 4
    assert torch.equal(cpu_moe.forward(*moe.tensors, **options), first)
    assert not torch.equal(cpu_moe.forward(*moe.tensors, **{**options, "w2_bias": None}), first)


@each_instruction_set
@pytest.mark.parametrize("activation", Activation, ids=lambda each: each.value)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_activations_from_tiny_to_large_arguments(
    activation: Activation, scale: float, instruction_set: InstructionSet
) -> None:
    moe = make_moe(20, 64, 48, 4, 1, activation=activation)
    moe.hidden_states.mul_(scale)
    out = cpu_moe.forward(*moe.tensors, activation=activation, instruction_set=instruction_set)
    assert_as_exact_as_torch(out, moe, activation)


@pytest.mark.parametrize("activation", [each for each in Activation if each.gated])
@each_dtype
def test_interleaved_weights_give_the_same_bits(activation: Activation, dtype: torch.dtype) -> None:
    moe = make_moe(11, 32, 48, 3, 2, dtype=dtype, activation=activation)
    concat = cpu_moe.forward(*moe.tensors, activation=activation)
    hidden_states, w13, *rest = moe.tensors
    out = cpu_moe.forward(
        hidden_states,
        interleaved(w13),
        *rest,
        activation=activation,
        w13_layout=W13Layout.INTERLEAVED,
    )
    assert torch.equal(out, concat)


@settings(max_examples=50)
@given(
    tokens=st.integers(0, 20),
    hidden=st.integers(1, 9),
    intermediate=st.integers(1, 9),
    experts=st.integers(1, 12),
    data=st.data(),
)
def test_any_shape_and_any_routing(
    tokens: int, hidden: int, intermediate: int, experts: int, data: st.DataObject
) -> None:
    """Ids in and out of range, repeated, in both widths."""
    dtype = data.draw(st.sampled_from(DTYPES))
    top_k = data.draw(st.integers(1, experts))
    wide = data.draw(st.booleans())
    instruction_set = data.draw(any_instruction_set())
    moe = make_moe(tokens, 16 * hidden, 16 * intermediate, experts, top_k, dtype=dtype)
    limit = 2**40 if wide else 2**31 - 1
    strange = data.draw(st.lists(st.integers(-limit, limit), max_size=8))
    ids = moe.topk_ids.to(torch.int64 if wide else torch.int32)
    for index, value in enumerate(strange):
        if ids.numel():
            ids.view(-1)[index * 7 % ids.numel()] = value
    moe = type(moe)(*moe.tensors[:4], ids)
    assert_as_exact_as_torch(cpu_moe.forward(*moe.tensors, instruction_set=instruction_set), moe)


@each_instruction_set
def test_rounding_of_one_token_is_pytorchs_over_many_draws(instruction_set: InstructionSet) -> None:
    """What one draw of 16 numbers says is chance, on either side."""
    ours, theirs = [], []
    for seed in range(100):
        moe = make_moe(1, 16, 16, 4, 3, seed=seed)
        exact = exact_moe(moe)
        out = cpu_moe.forward(*moe.tensors, instruction_set=instruction_set)
        assert_as_exact_as_torch(out, moe, exact=exact)
        ours.append((out.double() - exact) / exact.square().mean().sqrt())
        theirs.append((torch_moe(moe).double() - exact) / exact.square().mean().sqrt())
    error, their_error = (torch.stack(each).square().mean().sqrt() for each in (ours, theirs))
    assert error <= 1.15 * their_error


@each_instruction_set
def test_an_activation_is_as_exact_as_pytorchs(instruction_set: InstructionSet) -> None:
    """With weights of the identity: what is left is silu, from its tail to its straight part."""
    x = torch.linspace(-80, 20, 4096).view(256, 16)
    eye = torch.eye(16).unsqueeze(0)
    arguments = x, eye, eye, torch.ones(256, 1), torch.zeros(256, 1, dtype=torch.int32)
    out = cpu_moe.forward(*arguments, activation=Activation.SILU_NO_MUL, instruction_set=instruction_set)
    exact = torch.nn.functional.silu(x.double())
    error = ((out.double() - exact) / exact).abs()
    theirs = ((torch.nn.functional.silu(x).double() - exact) / exact).abs()
    assert error.max() <= 2 * theirs.max()
    assert error.square().mean() <= 2 * theirs.square().mean()


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_ids_out_of_range_contribute_nothing(ids: torch.dtype) -> None:
    moe = make_moe(6, 32, 32, 4, 2, ids=ids)
    moe.topk_ids[0] = -1
    moe.topk_ids[1, 0] = 4
    out = cpu_moe.forward(*moe.tensors)
    assert torch.equal(out[0], torch.zeros(32))
    torch.testing.assert_close(out.double(), exact_moe(moe), atol=1e-5, rtol=1e-5)


def test_ids_are_not_cut_to_32_bits() -> None:
    moe = make_moe(3, 32, 32, 4, 1, ids=torch.int64)
    moe.topk_ids[1] += 1 << 32
    assert torch.equal(cpu_moe.forward(*moe.tensors)[1], torch.zeros(32))


@each_dtype
def test_nan_stays_in_its_token(dtype: torch.dtype) -> None:
    moe = make_moe(70, 64, 32, 4, 2, dtype=dtype)
    clean = cpu_moe.forward(*moe.tensors)
    moe.hidden_states[33, 5] = float("nan")
    out = cpu_moe.forward(*moe.tensors)
    assert out[33].isnan().all()
    others = torch.arange(70) != 33
    assert torch.equal(out[others], clean[others])


def test_an_expert_that_nobody_chose_is_not_read() -> None:
    moe = make_moe(9, 64, 32, 5, 2)
    moe.topk_ids[moe.topk_ids == 3] = 0
    moe.w13[3], moe.w2[3] = float("nan"), float("nan")
    assert cpu_moe.forward(*moe.tensors).isfinite().all()


def test_the_number_of_threads_changes_no_bit() -> None:
    moe = make_moe(300, 128, 96, 6, 3)
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
    """Two experts, so a chunk is as small as it gets: about 32 MB of intermediate values and results."""
    moe = make_moe(6000, 2048, 16, 2, 2, dtype=torch.bfloat16)
    out = cpu_moe.forward(*moe.tensors)
    for part in (slice(0, 20), slice(4050, 4080), slice(5980, 6000)):
        hidden_states, w13, w2, weights, ids = moe.tensors
        again = cpu_moe.forward(hidden_states[part], w13, w2, weights[part], ids[part])
        assert torch.equal(out[part], again)


def test_out_is_written_and_returned() -> None:
    moe = make_moe(5, 32, 32, 4, 2)
    out = torch.full((5, 32), float("nan"))
    assert cpu_moe.forward(*moe.tensors, out=out) is out
    assert torch.equal(out, cpu_moe.forward(*moe.tensors))


# ---------------------------------------------------------------- the library


def test_no_undefined_behaviour_under_the_sanitizers() -> None:
    calls = Path(__file__).with_name("sanitized_moe_calls.py")
    assert "passed" in output_under_sanitizers(SOURCES / "moe_forward.cpp", calls)


def test_without_memory_there_is_an_error() -> None:
    """A scratch buffer that cannot be had; nothing is written."""
    library = host.load(
        host.build(
            SOURCES / "moe_forward.cpp",
            "moe_forward",
            host.choose_instruction_set(),
        )
    )
    launch = library.flashmoe_moe_forward
    launch.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int]
    huge = (ctypes.c_int64 * 11)(0, 1, 2**56, 16, 1, 1, 0, 0, 0, 0, 0)
    address = ctypes.addressof(huge)
    assert launch(address, *[address] * 11, 1) == 1
    empty = (ctypes.c_int64 * 11)(0, 1, 16, 16, 1, 1, 0, 0, 0, 0, 0)
    assert launch(ctypes.addressof(empty), *[None] * 11, 1) == 2
