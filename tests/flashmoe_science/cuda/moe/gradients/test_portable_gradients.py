"""The portable backward pass without a GPU: when it is taken, and all of its kernels' sources on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER
from emulated_launches import EmulatedLauncher, emulated_launches
from moe_gradients import (
    around_the_limits,
    assert_added_in_float32,
    assert_clamped_gradients,
    assert_gradients_as_exact_as_torch,
    assert_rounded_last,
    projected,
    whole_numbers,
)
from moe_reference import Moe, make_moe

from flashmoe_science import fused_moe
from flashmoe_science.configs.moe import backward_portable as configs
from flashmoe_science.configs.moe.backward_portable import BackwardTile, MoePortableBackward
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.moe import gradients as cuda_gradients
from flashmoe_science.cuda.moe.gradients import (
    OVERRIDE_VARIABLE,
    MoeBackwardKind,
    MoeBackwardProblem,
    bias,
    portable,
    select,
    why_composed,
    why_no_kernel,
)
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.errors import InputError, NoKernelError
from flashmoe_science.jit.limits import check_block
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MainGradients, MoeGradients, MoeNeeds
from problems import H200

__all__ = ["emulated_launches"]

BF16, FP16 = torch.bfloat16, torch.float16
ALL = MoeNeeds(hidden_states=True, w13=True, w2=True, topk_weights=True)
EVERYTHING = MoeNeeds(*[True] * 6)
PROBLEM = MoeProblem(
    tokens=4096,
    hidden=2048,
    intermediate=768,
    experts=128,
    top_k=8,
    dtype=BF16,
    activation=Activation.SILU,
    w13_layout=W13Layout.CONCAT,
    ids64=False,
)
BACKWARD = MoeBackwardProblem(PROBLEM, ALL, kept=False)
A100, L4 = (replace(H200, architecture=name) for name in ("sm_80", "sm_89"))
SMALL = BackwardTile(64, 128, 64, 2, 2, 2)
OTHERS = MoePortableBackward(SMALL, SMALL, BackwardTile(64, 128, 32, 3, 2, 4))


LARGE = replace(
    BACKWARD, forward=replace(PROBLEM, tokens=8192, hidden=2880, intermediate=2880, experts=32, top_k=4)
)
TURING = replace(H200, architecture="sm_75")


def test_which_calls_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no wgmma and experts have little work each; and where it is asked for."""
    monkeypatch.delenv(OVERRIDE_VARIABLE, raising=False)
    assert select(BACKWARD, H200).kernel is MoeBackwardKind.HOPPER
    without_shortcut = replace(BACKWARD, forward=replace(PROBLEM, activation=Activation.GELU_NO_MUL))
    assert select(without_shortcut, H200).kernel is MoeBackwardKind.PORTABLE
    for device in (A100, L4):
        assert select(BACKWARD, device).kernel is MoeBackwardKind.PORTABLE
        with pytest.raises(NoKernelError):
            select(LARGE, device)
    assert portable.why_not(LARGE, A100) == (
        "PyTorch's operations are faster where an expert has 3e+10 multiply-adds; "
        "FLASHMOE_MOE_BACKWARD=portable asks for it"
    )
    with pytest.raises(NoKernelError):
        select(BACKWARD, TURING)
    monkeypatch.setenv(OVERRIDE_VARIABLE, "portable")
    for device in (A100, L4, H200):
        for problem in (BACKWARD, LARGE):
            choice = select(problem, device)
            assert choice.kernel is MoeBackwardKind.PORTABLE
            assert choice.configuration == configs.configuration(device.architecture)
    with pytest.raises(InputError, match="cannot take"):
        select(BACKWARD, TURING)
    with pytest.raises(InputError, match="cannot take"):
        select(replace(BACKWARD, kept=True), A100)


def test_nothing_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = replace(PROBLEM, keeps=True)
    monkeypatch.delenv(OVERRIDE_VARIABLE, raising=False)
    assert why_no_kernel(keeping, H200) is None
    assert why_no_kernel(keeping, A100) is not None
    monkeypatch.setenv(OVERRIDE_VARIABLE, "portable")
    reason = why_no_kernel(keeping, H200)
    assert reason == "FLASHMOE_MOE_BACKWARD asks for portable, for which nothing is kept"


@pytest.mark.parametrize("named", ["", "portable", "hopper", "composed"])
def test_what_is_composed(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, named)
    assert (why_composed(PROBLEM, A100) is None) == (named in ("", "portable"))
    assert (why_composed(LARGE.forward, A100) is None) == (named == "portable")
    assert (why_composed(PROBLEM, H200) is None) == (named != "composed")
    assert why_composed(PROBLEM, TURING) is not None
    if named == "composed":
        assert why_composed(PROBLEM, H200) == (
            "FLASHMOE_MOE_BACKWARD asks for composed, for which nothing is kept; "
            "not portable: FLASHMOE_MOE_BACKWARD asks for composed"
        )


def test_a_name_of_no_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "portabel")
    assert portable.why_not(BACKWARD, A100) is None
    with pytest.raises(InputError, match="'portabel' names no kernel; expected one of hopper, portable"):
        select(BACKWARD, A100)


def test_what_it_refuses() -> None:
    with pytest.raises(InputError, match="take a MoePortableBackward, not 3"):
        portable.check(BACKWARD, 3)
    huge = replace(PROBLEM, experts=1 << 14, hidden=1 << 16, intermediate=1 << 16)
    with pytest.raises(InputError, match="it cannot count"):
        portable.check(replace(BACKWARD, forward=huge), configs.configuration("sm_80"))


@pytest.mark.parametrize("architecture", configs.tuned_architectures())
def test_everything_fits_and_is_built_ahead(architecture: str) -> None:
    built = {kernel.label: kernel for kernel in portable.kernels(architecture)}
    for kernel in built.values():
        check_block(kernel.label, architecture, kernel.threads_per_block, kernel.dynamic_shared_bytes)
    for kernel in (
        portable.first_kernel(
            configs.configuration(architecture).first, Activation.GELU_NO_MUL, FP16, architecture
        ),
        bias.kernel(BF16, second=True, architecture=architecture),
        bias.parts_kernel(True, architecture=architecture),
    ):
        assert kernel.label in built
    assert portable.kernels("sm_75") == []


def heaviest(architecture: str) -> list[CudaKernel]:
    tiles = configs.configuration(architecture)
    return [
        *(
            portable.first_kernel(tiles.first, activation, BF16, architecture)
            for activation in (Activation.GELU, Activation.SWIGLU_OAI, Activation.RELU2_NO_MUL)
        ),
        portable.second_kernel(tiles.second, FP16, architecture),
        portable.weights_kernel(tiles.weights, BF16, architecture, second=True, accumulates=False),
        portable.weights_kernel(tiles.weights, BF16, architecture, second=False, accumulates=True),
        bias.kernel(BF16, second=True, architecture=architecture),
        bias.routing_kernel(BF16, True, architecture=architecture),
    ]


@each_architecture(["sm_80", "sm_86", "sm_89", "sm_90"])
@pytest.mark.usefixtures("nvrtc")
def test_the_largest_kernels_compile_without_spills(architecture: str) -> None:
    """Spills and a stack frame raise."""
    for kernel in heaviest(architecture):
        resources = compile_kernel(kernel).resources
        assert resources is not None
        assert resources.stack_bytes == 0
        assert resources.blocks_per_sm >= 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.usefixtures("nvrtc")
def test_all_kernels_compile_without_spills(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "portable")
    for kernel in portable.kernels(architecture):
        compile_kernel(kernel)


def differentiate(
    moe: Moe,
    grad_output: torch.Tensor,
    activation: Activation = Activation.SILU,
    layout: W13Layout = W13Layout.CONCAT,
    *,
    needs: MoeNeeds = ALL,
    buffers: tuple[torch.Tensor, ...] = (),
    tiles: MoePortableBackward | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """A call on the CPU: memory that nobody wrote is full of NaN."""
    tokens, hidden = moe.hidden_states.shape
    experts, _, intermediate = moe.w2.shape
    biases = moe.w13_bias, moe.w2_bias
    problem = MoeBackwardProblem(
        MoeProblem(
            *(tokens, hidden, intermediate, experts, moe.topk_ids.shape[1]),
            *(moe.hidden_states.dtype, activation, layout),
            ids64=moe.topk_ids.dtype == torch.int64,
            w13_biased=biases[0] is not None,
            w2_biased=biases[1] is not None,
        ),
        needs,
        kept=False,
        accumulates_w13=bool(buffers),
        accumulates_w2=bool(buffers),
    )
    device = replace(H200, multiprocessors=2)
    planned = portable.plan(problem, tiles or configs.configuration("sm_90"), device)
    gradients: list[torch.Tensor | None] = [
        torch.full_like(tensor, torch.nan) if needed and tensor is not None else None
        for tensor, needed in zip((*moe.tensors[:4], *biases), needs, strict=True)
    ]
    if buffers:
        gradients[1:3] = buffers
    workspace = torch.full((planned.workspace_bytes + 256,), 0xFF, dtype=torch.uint8)  # NaN, in every type
    given = (grad_output, *moe.tensors, None, *biases, *gradients)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
    planned.launch(*addresses, -(-workspace.data_ptr() // 256) * 256, 0)
    return tuple(gradients)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize(("copies_late", "tiles"), [(True, None), (False, OTHERS)])
def test_gradients_of_swiglu(
    copies_late: bool, tiles: MoePortableBackward | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a stage of rows, and sizes that fill no tile."""
    monkeypatch.setattr(EmulatedLauncher, "copies_late", copies_late)
    torch.manual_seed(3)
    moe = make_moe(70, 80, 48, 3, 2, dtype=BF16)
    grad_output = torch.randn(70, 80).bfloat16()
    gradients = differentiate(moe, grad_output, layout=W13Layout.INTERLEAVED, tiles=tiles)[:4]
    # The input's gradient is there before the weights' begin, for a pipeline that waits for it.
    order = EmulatedLauncher.order
    assert order.index("moe_combine") < order.index("moe_backward_portable_weights")
    assert order.count("moe_backward_portable_weights") == 2
    assert_gradients_as_exact_as_torch(gradients, moe, grad_output, Activation.SILU, W13Layout.INTERLEAVED)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
def test_more_tiles_than_one_of_everything() -> None:
    """Columns, and an expert with more rows than a tile has."""
    torch.manual_seed(4)
    ids = torch.zeros(150, 1, dtype=torch.int32)
    ids[::9] = 1
    moe = replace(make_moe(150, 144, 272, 2, 1, dtype=BF16), topk_ids=ids)
    grad_output = torch.randn(150, 144).bfloat16()
    gradients = differentiate(moe, grad_output)[:4]
    assert_gradients_as_exact_as_torch(gradients, moe, grad_output)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize("activation", [Activation.RELU2_NO_MUL, Activation.GELU_NO_MUL])
def test_gradients_without_a_gate_and_experts_without_rows(activation: Activation) -> None:
    """Ids that are no expert, in int64; an expert that nobody chose, and one that a token chose twice."""
    torch.manual_seed(5)
    ids = torch.tensor([[0, 3], [3, -1], [9, 0], [3, 3], [1 << 40, -5]] * 8)
    moe = replace(make_moe(40, 64, 80, 4, 2, dtype=FP16, activation=activation), topk_ids=ids)
    grad_output = torch.randn(40, 64).half()
    gradients = differentiate(moe, grad_output, activation)[:4]
    assert_gradients_as_exact_as_torch(gradients, moe, grad_output, activation)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
def test_fewer_experts_than_choices() -> None:
    """A rank has two of a layer's experts; most choices are of others."""
    torch.manual_seed(10)
    ids = torch.rand(20, 9).argsort(dim=1)[:, :5].int() - 4
    moe = make_moe(20, 48, 32, 5, 5, dtype=BF16)
    moe = replace(moe, w13=moe.w13[:2].clone(), w2=moe.w2[:2].clone(), topk_ids=ids)
    grad_output = torch.randn(20, 48).bfloat16()
    gradients = differentiate(moe, grad_output)[:4]
    assert_gradients_as_exact_as_torch(gradients, moe, grad_output)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize("layout", W13Layout)
def test_gradients_of_biases_and_the_clamped_activation(layout: W13Layout) -> None:
    """Against the composition in float64, with projections on both sides of every limit."""
    torch.manual_seed(6)
    activation = Activation.SWIGLU_OAI
    ids = torch.tensor([[0, 3], [3, -1], [2, 0], [0, 3], [4, 2]] * 8, dtype=torch.int32)
    moe = replace(make_moe(40, 80, 48, 4, 2, dtype=BF16, activation=activation, biased=True), topk_ids=ids)
    moe = around_the_limits(moe, layout)
    grad_output = torch.randn(40, 80).bfloat16()
    gradients = differentiate(moe, grad_output, activation, layout, needs=EVERYTHING)
    assert_clamped_gradients(gradients, moe, grad_output, projected(moe, layout), layout)
    for name, gradient in zip(MoeNeeds._fields, gradients, strict=True):
        assert gradient is not None
        assert not name.startswith("w") or not gradient[1].any(), name  # nobody chose this expert


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
def test_weights_gradients_are_added_to_buffers_and_the_rest_is_left_out() -> None:
    torch.manual_seed(7)
    moe = make_moe(70, 80, 48, 3, 2, dtype=BF16)
    grad_output = torch.randn(70, 80).bfloat16()
    buffers = tuple(torch.randn(tensor.shape) for tensor in (moe.w13, moe.w2))
    before = [buffer.clone() for buffer in buffers]
    needs = ALL._replace(hidden_states=False)
    gradients = differentiate(moe, grad_output, needs=needs, buffers=buffers)[:4]
    added = tuple((after - start).bfloat16() for after, start in zip(buffers, before, strict=True))
    assert_gradients_as_exact_as_torch((None, *added, gradients[3]), moe, grad_output)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize("layout", W13Layout)
def test_weights_gradients_are_added_to_buffers_before_they_are_rounded(layout: W13Layout) -> None:
    torch.manual_seed(11)
    moe = make_moe(70, 80, 48, 3, 2, dtype=BF16)
    grad_output = torch.randn(70, 80).bfloat16()
    gradients = differentiate(moe, grad_output, layout=layout)
    buffers = tuple(torch.zeros(tensor.shape) for tensor in (moe.w13, moe.w2))
    differentiate(moe, grad_output, layout=layout, buffers=buffers)
    assert_rounded_last(buffers, gradients[1:3])


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
def test_exact_sums_are_added_to_buffers() -> None:
    moe, grad_output = whole_numbers(70, 80, 48, 3, 2, dtype=BF16)
    starts = tuple(torch.randint(-99, 99, tensor.shape).float() for tensor in (moe.w13, moe.w2))
    buffers = tuple(start.clone() for start in starts)
    differentiate(moe, grad_output, Activation.RELU2_NO_MUL, buffers=buffers)
    assert_added_in_float32(buffers, starts, moe, grad_output)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
def test_what_is_not_a_number_stays_in_its_rows_and_experts() -> None:
    """The last slice of an expert's rows ends in the next one's."""
    torch.manual_seed(8)
    ids = torch.arange(40, dtype=torch.int32)[:, None] % 3
    moe = replace(make_moe(40, 80, 48, 3, 1, dtype=BF16), topk_ids=ids)
    grad_output = torch.randn(40, 80).bfloat16()
    grad_output[4] = torch.nan
    hidden_states, w13, w2, topk_weights = differentiate(moe, grad_output)[:4]
    assert hidden_states is not None
    assert topk_weights is not None
    assert hidden_states.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [4]
    assert topk_weights.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [4]
    for weight in (w13, w2):
        assert weight is not None
        assert weight.isfinite().flatten(1).all(1).tolist() == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_on_a_gpu(activation: Activation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through autograd: as exact as PyTorch's operations, the same bits each time, and in a graph's replay."""
    monkeypatch.setenv(OVERRIDE_VARIABLE, "portable")
    torch.manual_seed(9)
    for layout in W13Layout if activation.gated else (W13Layout.CONCAT,):
        moe = make_moe(300, 272, 208, 6, 3, dtype=dtype, activation=activation)
        moe.topk_ids[::7, 0], moe.topk_ids[1::11] = -1, 1 << 20
        moe.topk_ids[moe.topk_ids == 5] = 4
        on_gpu = Moe(*(tensor.cuda() for tensor in moe.tensors))
        described = on_gpu.hidden_states, on_gpu.w13, on_gpu.w2, on_gpu.topk_ids
        assert cuda_gradients.can_project_again(*described, activation=activation, w13_layout=layout)
        grad_output = torch.randn(300, 272).to(dtype)
        incoming = grad_output.cuda()
        leaves = [tensor.detach().clone().requires_grad_() for tensor in on_gpu.tensors[:4]]

        def step(
            leaves: list[torch.Tensor] = leaves,
            ids: torch.Tensor = on_gpu.topk_ids,
            incoming: torch.Tensor = incoming,
            layout: W13Layout = layout,
        ) -> tuple[torch.Tensor, ...]:
            out = fused_moe(*leaves, ids, activation=activation.value, w13_layout=layout.value)
            return torch.autograd.grad(out, leaves, incoming)

        first, second = step(), step()
        assert all(map(torch.equal, first, second))
        assert_gradients_as_exact_as_torch(
            tuple(each.cpu() for each in first), moe, grad_output, activation, layout
        )
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, first))


@pytest.mark.gpu
def test_exact_sums_are_added_to_main_gradients_on_a_gpu() -> None:
    """And of a layer with a gate they are what is rounded where there are no buffers."""
    tiles = configs.configuration(device_of(torch.cuda.current_device()).architecture)
    choice = Choice(MoeBackwardKind.PORTABLE, tiles, "asked for")

    def add(
        moe: Moe, incoming: torch.Tensor, activation: Activation, main: MainGradients | None
    ) -> MoeGradients:
        return cuda_gradients.backward(
            *(each.cuda() for each in (incoming, *moe.tensors)),
            None,
            activation=activation,
            w13_layout=W13Layout.CONCAT,
            needs=ALL,
            main=main,
            choice=choice,
        )

    moe, incoming = whole_numbers(200, 144, 80, 4, 2, dtype=BF16)
    starts = [torch.randint(-99, 99, weight.shape, device="cuda").float() for weight in (moe.w13, moe.w2)]
    main = MainGradients(*(start.clone() for start in starts))
    add(moe, incoming, Activation.RELU2_NO_MUL, main)
    assert_added_in_float32(main, starts, moe, incoming)

    moe, incoming = make_moe(200, 144, 80, 4, 2, dtype=BF16), torch.randn(200, 144).bfloat16()
    zeros = MainGradients(*(torch.zeros(weight.shape, device="cuda") for weight in (moe.w13, moe.w2)))
    add(moe, incoming, Activation.SILU, zeros)
    assert_rounded_last(zeros, add(moe, incoming, Activation.SILU, None)[1:3])
