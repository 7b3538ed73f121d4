"""The backward pass of a mixture of experts on a GPU: gradients against float64, for every shape and routing."""

from __future__ import annotations

import pytest
import torch
from moe_gradients import (
    assert_added_in_float32,
    assert_gradients_as_exact_as_composed,
    assert_gradients_as_exact_as_torch,
    assert_rounded_last,
    whole_numbers,
)
from moe_reference import Moe, composed_moe, interleaved, make_moe

from flashmoe_science import fused_moe
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.moe import hopper
from flashmoe_science.cuda.moe.forward import asked, forward, problem_of
from flashmoe_science.cuda.moe.gradients import backward, explain, forward_keeping
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_composition import backward as composed_backward
from flashmoe_science.moe_gradients import MainGradients, MoeGradients, MoeNeeds, MoeTensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]

ALL = MoeNeeds(hidden_states=True, w13=True, w2=True, topk_weights=True)
BF16 = torch.bfloat16


def on_gpu(moe: Moe) -> Moe:
    return Moe(*(tensor.cuda() for tensor in moe.tensors))


def gradients_of(
    moe: Moe,
    grad_output: torch.Tensor,
    activation: Activation = Activation.SILU,
    layout: W13Layout = W13Layout.CONCAT,
    *,
    kept: bool = True,
    needs: MoeNeeds = ALL,
    main: MainGradients | None = None,
) -> MoeGradients:
    """Through memory that holds NaN; the output has the bits of a call of the same kernels that keeps nothing."""
    given = on_gpu(moe)
    junk = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(4)]
    del junk
    output, z = forward_keeping(*given.tensors, activation=activation, w13_layout=layout)
    choice = hopper.choose(*asked(given.tensors, activation, layout, None))
    plain = forward(*given.tensors, activation=activation, w13_layout=layout, choice=choice)
    assert torch.equal(output, plain)
    return backward(
        grad_output.cuda(),
        *given.tensors,
        z if kept else None,
        activation=activation,
        w13_layout=layout,
        needs=needs,
        main=main,
    )


def assert_right(
    moe: Moe,
    activation: Activation = Activation.SILU,
    layout: W13Layout = W13Layout.CONCAT,
    *,
    kept: bool = True,
) -> None:
    generator = torch.Generator().manual_seed(1)
    grad_output = torch.randn(moe.hidden_states.shape, generator=generator).to(moe.hidden_states.dtype)
    gradients = gradients_of(moe, grad_output, activation, layout, kept=kept)
    on_cpu = tuple(None if gradient is None else gradient.cpu() for gradient in gradients[:4])
    assert_gradients_as_exact_as_torch(on_cpu, moe, grad_output, activation, layout)


@pytest.mark.parametrize("layout", list(W13Layout))
# gelu_no_mul is refused: it would spill.
@pytest.mark.parametrize("activation", [each for each in Activation if each is not Activation.GELU_NO_MUL])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_activations(dtype: torch.dtype, activation: Activation, layout: W13Layout) -> None:
    assert_right(make_moe(100, 144, 80, 4, 2, dtype=dtype, activation=activation), activation, layout)


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k"),
    [
        (1, 16, 16, 1, 1),
        (7, 48, 80, 5, 5),
        (33, 272, 528, 3, 2),
        (193, 1040, 144, 4, 1),
        (300, 256, 384, 3, 1),
    ],
)
def test_sizes(tokens: int, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
    assert_right(make_moe(tokens, hidden, intermediate, experts, top_k, dtype=BF16))


def in_pairs(dtype: torch.dtype, layout: W13Layout, *, strange: bool) -> Moe:
    """So many rows of an expert in the mean that blocks share weights in pairs, forward and backward.

    ``strange``: with ids that are no expert, and an expert that nobody chose. The other has five tiles of rows, so that
    the second block of its last pair has none.
    """
    moe = make_moe(1100, 272, 144, 2, 1, dtype=dtype)
    if strange:
        moe.topk_ids.fill_(0)
        moe.topk_ids[::5], moe.topk_ids[3::40] = -1, 1 << 20
    hidden_states, w13, w2, _, ids = on_gpu(moe).tensors
    choice = explain(hidden_states, w13, w2, ids, w13_layout=layout)
    assert choice.configuration.second.cluster == 2
    assert "pairs of blocks share the second product's weights" in choice.reason
    problem = problem_of(hidden_states, w13, w2, ids, Activation.SILU, layout, keeps=True)
    keeping = hopper.choose(problem, device_of(torch.cuda.current_device()))
    assert keeping is not None
    assert keeping.configuration.cluster == 2
    return moe


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("dtype", "layout", "strange"),
    [(BF16, W13Layout.CONCAT, False), (torch.float16, W13Layout.INTERLEAVED, True)],
)
def test_pairs_of_blocks(dtype: torch.dtype, layout: W13Layout, strange: bool, kept: bool) -> None:
    moe = in_pairs(dtype, layout, strange=strange)
    grad_output = torch.randn(moe.hidden_states.shape).to(dtype)
    gradients = gradients_of(moe, grad_output, layout=layout, kept=kept)
    on_cpu = tuple(gradient.cpu() for gradient in gradients[:4] if gradient is not None)
    assert_gradients_as_exact_as_composed(on_cpu, moe, grad_output, layout=layout)


@pytest.mark.parametrize("kept", [True, False])
def test_main_gradients_of_pairs_of_blocks(kept: bool) -> None:
    layout = W13Layout.INTERLEAVED
    moe = in_pairs(torch.float16, layout, strange=True)
    grad_output = torch.randn(moe.hidden_states.shape).half()
    main = MainGradients(torch.zeros(moe.w13.shape, device="cuda"), torch.zeros(moe.w2.shape, device="cuda"))
    added = gradients_of(moe, grad_output, layout=layout, kept=kept, main=main)
    gradients = gradients_of(moe, grad_output, layout=layout, kept=kept)
    assert_rounded_last(main, gradients[1:3])
    for one, other in ((added.hidden_states, gradients.hidden_states), (added.w13, None), (added.w2, None)):
        assert one is other or torch.equal(one, other)
    assert torch.equal(added.topk_weights, gradients.topk_weights)


def test_all_on_one_expert() -> None:
    moe = make_moe(400, 128, 96, 4, 1, dtype=BF16)
    moe.topk_ids.fill_(2)
    assert_right(moe)


def test_ids_that_are_no_expert() -> None:
    moe = make_moe(200, 128, 96, 4, 2, dtype=BF16, ids=torch.int64)
    moe.topk_ids[::3, 0] = -1
    moe.topk_ids[1::5] = 1 << 40
    assert_right(moe)
    moe.topk_ids.fill_(-1)
    gradients = gradients_of(moe, torch.ones_like(moe.hidden_states))
    for gradient in gradients[:4]:
        assert gradient is not None
        assert not gradient.any()


def test_z_is_computed_again() -> None:
    assert_right(make_moe(200, 128, 96, 4, 2, dtype=BF16), kept=False)


@pytest.mark.parametrize("layout", list(W13Layout))
def test_main_gradients(layout: W13Layout) -> None:
    moe = make_moe(200, 144, 80, 4, 2, dtype=BF16)
    moe.topk_ids[moe.topk_ids == 1] = 0
    grad_output = torch.randn(moe.hidden_states.shape).to(BF16)
    main = MainGradients(
        torch.ones(moe.w13.shape, device="cuda"), torch.full(moe.w2.shape, 2.0, device="cuda")
    )
    gradients = gradients_of(moe, grad_output, layout=layout, main=main)
    assert (gradients.w13, gradients.w2) == (None, None)
    assert main.w13 is not None
    assert main.w2 is not None
    added = ((main.w13 - 1).to(BF16).cpu(), (main.w2 - 2).to(BF16).cpu())
    assert_gradients_as_exact_as_torch((None, *added, None), moe, grad_output, layout=layout)
    assert (main.w13[1] == 1).all()
    assert (main.w2[1] == 2).all()
    zeros = MainGradients(torch.zeros_like(main.w13), torch.zeros_like(main.w2))
    gradients_of(moe, grad_output, layout=layout, main=zeros)
    assert_rounded_last(zeros, gradients_of(moe, grad_output, layout=layout)[1:3])


@pytest.mark.parametrize("kept", [True, False])
def test_exact_sums_are_added_to_main_gradients(kept: bool) -> None:
    moe, grad_output = whole_numbers(200, 144, 80, 4, 2, dtype=BF16)
    starts = [torch.randint(-99, 99, weight.shape, device="cuda").float() for weight in (moe.w13, moe.w2)]
    main = MainGradients(*(start.clone() for start in starts))
    gradients_of(moe, grad_output, Activation.RELU2_NO_MUL, kept=kept, main=main)
    assert_added_in_float32(main, starts, moe, grad_output)


def test_main_gradients_of_autograd() -> None:
    moe = on_gpu(make_moe(200, 144, 80, 4, 2, dtype=BF16))
    leaves = [tensor.requires_grad_() for tensor in moe.tensors[:4]]
    incoming = torch.randn_like(moe.hidden_states)
    expected = torch.autograd.grad(fused_moe(*leaves, moe.topk_ids), leaves, incoming)
    buffers = torch.zeros(moe.w13.shape, device="cuda"), torch.zeros(moe.w2.shape, device="cuda")
    fused_moe(*leaves, moe.topk_ids, main_gradients=buffers).backward(incoming)
    assert leaves[1].grad is None
    assert leaves[2].grad is None
    assert_rounded_last(buffers, expected[1:3])


@pytest.mark.parametrize("needed", range(4))
def test_what_is_not_needed_is_not_computed(needed: int) -> None:
    moe = make_moe(100, 128, 96, 4, 2, dtype=BF16)
    grad_output = torch.randn(moe.hidden_states.shape).to(BF16)
    all_of_them = gradients_of(moe, grad_output)
    one = gradients_of(moe, grad_output, needs=MoeNeeds(*(index == needed for index in range(4))))
    for index, (gradient, of_all) in enumerate(zip(one[:4], all_of_them[:4], strict=True)):
        assert of_all is not None
        assert gradient is None if index != needed else torch.equal(gradient, of_all)


def test_the_same_bits_in_a_graph_and_outside() -> None:
    moe = on_gpu(make_moe(500, 256, 128, 6, 2, dtype=BF16))
    grad_output = torch.randn_like(moe.hidden_states)

    def step() -> MoeGradients:
        _, z = forward_keeping(*moe.tensors, activation=Activation.SILU, w13_layout=W13Layout.CONCAT)
        return backward(
            grad_output,
            *moe.tensors,
            z,
            activation=Activation.SILU,
            w13_layout=W13Layout.CONCAT,
            needs=ALL,
        )

    eager = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        graph.replay()
        for gradient, expected in zip(captured[:4], eager[:4], strict=True):
            assert torch.equal(gradient, expected)


def test_autograd_takes_the_kernels() -> None:
    moe = make_moe(100, 128, 96, 4, 2, dtype=BF16)
    leaves = [tensor.cuda().requires_grad_() for tensor in moe.tensors[:4]]
    output = fused_moe(*leaves, moe.topk_ids.cuda(), w13_layout="interleaved")
    grad_output = torch.randn(moe.hidden_states.shape).to(BF16)
    output.backward(grad_output.cuda())
    gradients = gradients_of(moe, grad_output, layout=W13Layout.INTERLEAVED)
    for leaf, gradient in zip(leaves, gradients[:4], strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("kernel", ["hopper", "portable"])
@pytest.mark.parametrize("layout", list(W13Layout))
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gpt_oss_experts(
    dtype: torch.dtype, layout: W13Layout, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases and the clamped activation by both ways of the forward pass, against the composition in float64.

    Gates and ups stay below the limits: where the derivative jumps, a rounded projection has another one.
    """
    monkeypatch.setenv("FLASHMOE_MOE_KERNEL", kernel)
    activation = Activation.SWIGLU_OAI
    made = make_moe(150, 144, 80, 5, 2, dtype=dtype, activation=activation, biased=True)
    made.topk_ids[made.topk_ids == 3] = -1
    names = ("hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias")
    leaves = {name: getattr(made, name).cuda().requires_grad_() for name in names}
    ids = made.topk_ids.cuda()
    options = {"activation": activation.value, "w13_layout": layout.value}
    output = fused_moe(topk_ids=ids, **leaves, **options)
    with torch.no_grad():
        plain = fused_moe(topk_ids=ids, **leaves, **options)
    exact = {name: leaf.detach().double() for name, leaf in leaves.items()}
    on_cpu = Moe(topk_ids=made.topk_ids, **{name: tensor.cpu() for name, tensor in exact.items()})
    right = composed_moe(on_cpu, activation, layout, torch.float64)
    eps = torch.finfo(dtype).eps
    for result in (output, plain):
        error = (result.detach().cpu().double() - right).norm() / right.norm()
        assert error < eps
    incoming = torch.randn_like(output)
    gradients = torch.autograd.grad(output, tuple(leaves.values()), incoming)
    again = torch.autograd.grad(
        fused_moe(topk_ids=ids, **leaves, **options), tuple(leaves.values()), incoming
    )
    expected = composed_backward(
        incoming.double(),
        MoeTensors(*(exact[name] for name in names[:4]), ids, exact["w13_bias"], exact["w2_bias"]),
        None,
        activation=activation,
        w13_layout=layout,
        needs=MoeNeeds(*[True] * 6),
    )
    for name, ours, same, true in zip(names, gradients, again, expected, strict=True):
        assert true is not None
        assert torch.equal(ours, same), name
        assert (ours.double() - true).norm() / true.norm() < 1.5 * eps, name


def test_gradients_of_any_strides() -> None:
    moe = make_moe(64, 64, 32, 3, 2, dtype=BF16)
    ones = gradients_of(moe, torch.ones_like(moe.hidden_states))
    expanded = gradients_of(moe, torch.ones((), dtype=BF16).expand(moe.hidden_states.shape))
    for one, other in zip(ones[:4], expanded[:4], strict=True):
        assert torch.equal(one, other)


def test_layouts_agree() -> None:
    moe = make_moe(128, 128, 64, 4, 2, dtype=BF16)
    grad_output = torch.randn(moe.hidden_states.shape).to(BF16)
    concat = gradients_of(moe, grad_output)
    turned = Moe(moe.hidden_states, interleaved(moe.w13), *moe.tensors[2:])
    other = gradients_of(turned, grad_output, layout=W13Layout.INTERLEAVED)
    assert concat.w13 is not None
    assert other.w13 is not None
    assert torch.equal(interleaved(concat.w13.cpu()), other.w13.cpu())
    assert torch.equal(concat.hidden_states, other.hidden_states)
