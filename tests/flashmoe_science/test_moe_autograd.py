"""What autograd makes of experts: with a backend in float64 for differences, and with the CPU's kernels."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_gradients import NAMES, ReferenceBackend, assert_gradients_as_exact_as_torch, gradients_by_autograd
from moe_reference import Moe, composed_moe, interleaved, make_moe
from torch.utils.checkpoint import checkpoint

from flashmoe_science import InputError, fused_moe
from flashmoe_science.checkpoint import context_fn
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_autograd import differentiable_moe
from flashmoe_science.moe_gradients import MoeGradients, MoeNeeds, MoeTensors

Leaves = tuple[torch.Tensor, ...]

STRANGE_IDS = torch.tensor([[0, 1], [2, -1], [5, -(2**31)], [2, 2], [0, 5], [2, 0]], dtype=torch.int32)
"""Of five experts: some that are none, one that is chosen twice, a token without any, and experts without tokens."""


def strange_moe(dtype: torch.dtype = torch.float32, activation: Activation = Activation.SILU) -> Moe:
    made = make_moe(6, 32, 16, 5, 2, dtype=dtype, activation=activation)
    return Moe(*made.tensors[:4], STRANGE_IDS)


def leaves_of(moe: Moe, needed: str = "xuds") -> Leaves:
    """hidden_states, w13, w2 and topk_weights; of these require a gradient x, u, d and s."""
    return tuple(
        tensor.detach().clone().requires_grad_(letter in needed)
        for letter, tensor in zip("xuds", moe.tensors[:4], strict=True)
    )


def float64_moe(activation: Activation) -> tuple[Leaves, torch.Tensor]:
    made = make_moe(5, 4, 3, 4, 2, activation=activation)
    ids = made.topk_ids.clone()
    ids[0, 1], ids[1, 0], ids[2, 0] = -1, 4, ids[2, 1]
    return tuple(tensor.double().requires_grad_() for tensor in made.tensors[:4]), ids


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", W13Layout)
@pytest.mark.parametrize("activation", Activation)
def test_gradients_by_differences(activation: Activation, layout: W13Layout, recompute: bool) -> None:
    leaves, ids = float64_moe(activation)
    options = {"activation": activation, "w13_layout": layout, "recompute": recompute}
    assert torch.autograd.gradcheck(
        lambda *each: differentiable_moe(ReferenceBackend(), *each, ids, **options), leaves
    )


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_by_differences_with_biases(recompute: bool) -> None:
    leaves, ids = float64_moe(Activation.SILU)
    w13_bias = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    w2_bias = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def call(*each: torch.Tensor) -> torch.Tensor:
        *floats, first, second = each
        return differentiable_moe(
            ReferenceBackend(),
            *floats,
            ids,
            first,
            second,
            activation=Activation.SILU,
            w13_layout=W13Layout.CONCAT,
            recompute=recompute,
        )

    assert torch.autograd.gradcheck(call, (*leaves, w13_bias, w2_bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", Activation)
def test_gradients_are_as_exact_as_those_of_pytorch(activation: Activation, dtype: torch.dtype) -> None:
    moe = strange_moe(dtype, activation)
    grad_output = torch.randn(6, 32).to(dtype)
    for layout in W13Layout if activation.gated else (W13Layout.CONCAT,):
        ours = moe
        if layout is W13Layout.INTERLEAVED:
            ours = Moe(moe.hidden_states, interleaved(moe.w13), *moe.tensors[2:])
        leaves = leaves_of(ours)
        options = {"activation": activation.value, "w13_layout": layout.value}
        out = fused_moe(*leaves, ours.topk_ids, **options)
        gradients = torch.autograd.grad(out, leaves, grad_output)
        assert_gradients_as_exact_as_torch(gradients, ours, grad_output, activation, layout)


@pytest.mark.parametrize("layout", W13Layout)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_of_gpt_oss_experts(recompute: bool, layout: W13Layout) -> None:
    """Biases and the clamped activation, on both sides of its limits, against autograd through the formula."""
    made = make_moe(12, 48, 32, 5, 2, activation=Activation.SWIGLU_OAI, biased=True)
    made = replace(made, hidden_states=made.hidden_states * 5)
    made.topk_ids[1, 0], made.topk_ids[4] = -1, 5
    if layout is W13Layout.INTERLEAVED:
        made = replace(made, w13=interleaved(made.w13), w13_bias=interleaved(made.biases["w13_bias"]))
    names = ("hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias")
    leaves = {name: getattr(made, name).clone().requires_grad_() for name in names}
    options = {"activation": "swigluoai", "w13_layout": layout.value, "recompute": recompute}
    output = fused_moe(topk_ids=made.topk_ids, **leaves, **options)
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    right = composed_moe(Moe(topk_ids=made.topk_ids, **exact), Activation.SWIGLU_OAI, layout, torch.float64)
    torch.testing.assert_close(output.double(), right, rtol=1e-5, atol=1e-5)
    incoming = torch.randn_like(output)
    ours = torch.autograd.grad(output, tuple(leaves.values()), incoming)
    theirs = torch.autograd.grad(right, tuple(exact.values()), incoming.double())
    for name, our, true in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(
            our.double(), true, rtol=1e-5, atol=1e-5 * true.abs().max().item(), msg=name
        )


def test_a_gradient_at_and_beyond_the_limits_of_the_clamped_activation() -> None:
    gates, ups = torch.tensor([6.9, 7.0, 7.1, 0.0, 0.0]), torch.tensor([0.5, 0.5, 0.5, -7.0, 7.1])
    hidden_states = torch.eye(16)[:1]
    w13 = torch.zeros(1, 32, 16)
    w13[0, :5, 0], w13[0, 16:21, 0] = gates, ups
    leaf = w13.requires_grad_()
    out = fused_moe(
        hidden_states,
        leaf,
        torch.ones(1, 16, 16),
        torch.ones(1, 1),
        torch.zeros(1, 1).int(),
        activation="swigluoai",
    )
    gradient = torch.autograd.grad(out.sum(), leaf)[0][0, :, 0]
    assert (gradient[:5] != 0).tolist() == [True, True, False, True, True]
    assert (gradient[16:21] != 0).tolist() == [True, True, True, False, False]  # a gate of 0 gives none
    assert gradient[21:].count_nonzero() == 0


@pytest.mark.parametrize("needed", ["x", "u", "d", "s", "xs", "ud", "uds"])
def test_only_what_is_needed_is_computed(needed: str) -> None:
    asked = []

    class Watching(ReferenceBackend):
        @staticmethod
        def backward(*arguments: Any, **options: Any) -> MoeGradients:
            asked.append(options["needs"])
            return ReferenceBackend.backward(*arguments, **options)

    moe = strange_moe()
    leaves = leaves_of(moe, needed)
    out = differentiable_moe(
        Watching(), *leaves, moe.topk_ids, activation=Activation.SILU, w13_layout=W13Layout.CONCAT
    )
    out.sum().backward()
    assert asked == [(*(letter in needed for letter in "xuds"), False, False)]
    every = gradients_by_autograd(moe, torch.ones_like(out))
    for letter, leaf, exact in zip("xuds", leaves, every, strict=True):
        assert (leaf.grad is not None) == (letter in needed)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, exact.to(leaf.dtype))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_what_is_kept_is_the_arguments_and_the_projections(recompute: bool) -> None:
    moe = make_moe(7, 32, 48, 5, 2, dtype=torch.bfloat16)
    leaves = leaves_of(moe)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused_moe(*leaves, moe.topk_ids, recompute=recompute)
    arguments = [tensor.data_ptr() for tensor in (*leaves, moe.topk_ids)]
    others = [tensor for tensor in packed if tensor.data_ptr() not in arguments]
    assert len(packed) == len(arguments) + len(others)
    assert [(tuple(each.shape), each.dtype) for each in others] == (
        [] if recompute else [((14, 96), torch.bfloat16)]
    )


def test_an_expert_without_tokens_gets_zeros_and_no_weights_of_it_are_read() -> None:
    moe = make_moe(4, 32, 16, 3, 1)
    moe.w13[1], moe.w2[1] = torch.nan, torch.inf
    leaves = leaves_of(moe)
    out = fused_moe(*leaves, torch.tensor([[0], [2], [2], [0]]))
    gradients = torch.autograd.grad(out.sum(), leaves)
    for gradient in gradients:
        assert gradient.isfinite().all()
    assert not gradients[1][1].any()
    assert not gradients[2][1].any()


def test_a_nan_stays_in_the_tokens_and_experts_that_meet_it() -> None:
    moe = make_moe(4, 32, 16, 3, 1)
    moe.hidden_states[1] = torch.nan
    leaves = leaves_of(moe)
    gradients = torch.autograd.grad(fused_moe(*leaves, torch.tensor([[0], [2], [1], [0]])).sum(), leaves)
    for name, gradient, theirs in zip(NAMES, gradients, ([1], [2], [2], [1]), strict=True):
        assert gradient[theirs].isnan().any(), name
        rest = [index for index in range(len(gradient)) if index not in theirs]
        assert gradient[rest].isfinite().all(), name


def test_no_tokens() -> None:
    moe = make_moe(0, 32, 16, 3, 2)
    leaves = leaves_of(moe)
    gradients = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids).sum(), leaves)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


@pytest.mark.parametrize("expert", [0, 3, -1])
def test_all_tokens_on_one_expert_or_on_none(expert: int) -> None:
    moe = make_moe(40, 32, 16, 4, 2)
    one = Moe(*moe.tensors[:4], torch.full((40, 2), expert))
    leaves = leaves_of(one)
    grad_output = torch.randn(40, 32)
    gradients = torch.autograd.grad(fused_moe(*leaves, one.topk_ids), leaves, grad_output)
    assert_gradients_as_exact_as_torch(gradients, one, grad_output)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_extreme_weights(size: float) -> None:
    moe = make_moe(9, 32, 16, 4, 2)
    extreme = Moe(*moe.tensors[:3], moe.topk_weights * size, moe.topk_ids)
    leaves = leaves_of(extreme)
    grad_output = torch.randn(9, 32)
    gradients = torch.autograd.grad(fused_moe(*leaves, extreme.topk_ids), leaves, grad_output)
    assert_gradients_as_exact_as_torch(gradients, extreme, grad_output)


def test_the_same_bits_in_every_call_and_for_any_strides_of_the_incoming_gradient() -> None:
    moe = make_moe(70, 64, 48, 4, 2, dtype=torch.bfloat16)
    leaves = leaves_of(moe)
    incoming = torch.randn(64, 70).bfloat16().t()
    expected = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids), leaves, incoming)
    for again in (incoming, incoming.contiguous()):
        gradients = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids), leaves, again)
        assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    ones = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids).sum(), leaves)  # strides of 0
    full = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids), leaves, torch.ones(70, 64).bfloat16())
    assert all(torch.equal(*pair) for pair in zip(ones, full, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant: bool) -> None:
    moe = strange_moe()
    leaves = leaves_of(moe)
    expected = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids).sum(), leaves)
    checkpoint(fused_moe, *leaves, moe.topk_ids, use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)


def test_selective_checkpointing_keeps_the_projections() -> None:
    moe = strange_moe()
    leaves = leaves_of(moe)

    def block(hidden_states: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return fused_moe(hidden_states.sin(), *others).sin()

    expected = torch.autograd.grad(block(*leaves, moe.topk_ids).sum(), leaves)
    out = checkpoint(block, *leaves, moe.topk_ids, use_reentrant=False, context_fn=context_fn)
    assert isinstance(out, torch.Tensor)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_second_derivatives_are_refused_in_one_line() -> None:
    moe = strange_moe()
    leaves = leaves_of(moe)
    out = fused_moe(*leaves, moe.topk_ids)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(InputError, match="fused_moe has first derivatives only") as raised:
        gradient.square().sum().backward()
    assert "\n" not in str(raised.value)


def test_a_saved_tensor_that_is_overwritten_is_noticed() -> None:
    moe = strange_moe()
    leaves = leaves_of(moe)
    out = fused_moe(leaves[0], leaves[1] * 1, *leaves[2:], moe.topk_ids)
    with torch.no_grad():
        leaves[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_autograd_is_off(mode: Any) -> None:
    moe = strange_moe()
    leaves = leaves_of(moe)
    with mode():
        out = fused_moe(*leaves, moe.topk_ids)
    assert not out.requires_grad
    assert torch.equal(out, fused_moe(*leaves, moe.topk_ids))


def test_autocast_takes_gradients_back_to_each_tensors_dtype() -> None:
    moe = strange_moe()
    leaves = leaves_of(moe)
    with torch.autocast("cpu", torch.bfloat16):
        out = fused_moe(*leaves, moe.topk_ids)
    assert out.dtype is torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), leaves)
    narrow = leaves_of(Moe(*(each.bfloat16() for each in moe.tensors[:3]), *moe.tensors[3:]))
    expected = torch.autograd.grad(fused_moe(*narrow, moe.topk_ids).float().sum(), narrow)
    for gradient, leaf, rounded in zip(gradients, leaves, expected, strict=True):
        assert gradient.dtype is leaf.dtype
        assert torch.equal(gradient, rounded.to(leaf.dtype))


def test_backward_passes_from_several_threads() -> None:
    moe = make_moe(20, 32, 48, 4, 2)
    leaves = leaves_of(moe)
    expected = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids).sum(), leaves)
    wrong = []

    def work() -> None:
        mine = leaves_of(moe)
        for _ in range(5):
            gradients = torch.autograd.grad(fused_moe(*mine, moe.topk_ids).sum(), mine)
            if not all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True)):
                wrong.append(gradients)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_tokens_whose_projections_are_kept_chunk_by_chunk() -> None:
    """The forward pass takes tokens in chunks; the sorted order is of the whole call."""
    moe = make_moe(4500, 1024, 16, 3, 2)
    leaves = leaves_of(moe)
    grad_output = torch.randn(4500, 1024)
    kept = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids), leaves, grad_output)
    again = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids, recompute=True), leaves, grad_output)
    for ours, other in zip(kept, again, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-3, rtol=1e-4)


def test_a_composed_backward_pass_is_no_matter_of_autocast() -> None:
    moe = strange_moe()
    grad_output = torch.randn(6, 32)

    def gradients() -> MoeGradients:
        return ReferenceBackend.backward(
            grad_output,
            MoeTensors(*moe.tensors),
            None,
            activation=Activation.SILU,
            w13_layout=W13Layout.CONCAT,
            needs=MoeNeeds(True, True, True, True),
        )

    outside = gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gradients()
    for one, other in zip(outside[:4], inside[:4], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_gradients_are_added_to(dtype: torch.dtype, recompute: bool) -> None:
    moe = strange_moe(dtype)
    leaves = leaves_of(moe)
    incoming = torch.randn(6, 32).to(dtype)
    expected = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids), leaves, incoming)
    buffers = torch.ones(moe.w13.shape), torch.full(moe.w2.shape, 2.0)
    output = fused_moe(*leaves, moe.topk_ids, recompute=recompute, main_gradients=buffers)
    output.backward(incoming, retain_graph=True)
    assert leaves[1].grad is None
    assert leaves[2].grad is None
    for leaf, gradient in ((leaves[0], expected[0]), (leaves[3], expected[3])):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)
    for buffer, first, gradient in zip(buffers, (1, 2), expected[1:3], strict=True):
        assert torch.equal(buffer, first + gradient.float())
    output.backward(incoming)  # and again
    assert torch.equal(buffers[0], 1 + expected[1].float() + expected[1].float())


class _Subclass(torch.Tensor):
    pass


def test_recompute_is_a_flag() -> None:
    moe = strange_moe()
    leaves = leaves_of(moe)
    with pytest.raises(InputError, match="recompute is 'no'; expected True or False"):
        fused_moe(*leaves, moe.topk_ids, recompute="no")  # type: ignore[arg-type]


def test_main_gradients_that_do_not_fit_are_refused() -> None:
    moe = strange_moe(torch.bfloat16)
    leaves = leaves_of(moe)
    with pytest.raises(InputError, match=r"main gradient of w13 is .* torch.bfloat16 on cpu; expected"):
        fused_moe(*leaves, moe.topk_ids, main_gradients=(torch.empty_like(moe.w13), None))
    with pytest.raises(InputError, match="main_gradients is Tensor; expected a pair of buffers"):
        fused_moe(*leaves, moe.topk_ids, main_gradients=moe.w13)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="without autocast"):
        fused_moe(*leaves, moe.topk_ids, main_gradients=(moe.w13.float(), None))
    strange = torch.zeros(moe.w13.shape[:2], dtype=torch.bfloat16).as_subclass(_Subclass)
    with pytest.raises(InputError, match="main_gradients are for eager code"):
        fused_moe(*leaves, moe.topk_ids, w13_bias=strange, main_gradients=(moe.w13.float(), None))
    scales = torch.ones(1, 1, 1)
    with pytest.raises(InputError, match="leave main_gradients out, or the scales"):
        fused_moe(*leaves, moe.topk_ids, w13_scales=scales, main_gradients=(moe.w13.float(), None))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("needed", ["xuds", "us"])
def test_several_gradients_at_a_time(needed: str, create_graph: bool) -> None:
    moe = strange_moe()
    leaves = leaves_of(moe, needed)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    output, incoming = fused_moe(*leaves, moe.topk_ids), torch.randn(3, 6, 32)
    together = torch.autograd.grad(
        output, wanted, incoming, is_grads_batched=True, retain_graph=True, create_graph=create_graph
    )
    for index, given in enumerate(incoming):
        alone = torch.autograd.grad(output, wanted, given, retain_graph=True)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[index], other)
    output = fused_moe(*leaves, moe.topk_ids, main_gradients=(moe.w13.float(), None))
    with pytest.raises(InputError, match="main_gradients take one gradient of the output at a time"):
        torch.autograd.grad(output, wanted[-1:], incoming, is_grads_batched=True)
