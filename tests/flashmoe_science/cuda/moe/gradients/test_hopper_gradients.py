"""The backward pass on Hopper without a GPU: what is chosen and refused, and all of its kernels' sources on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
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
from moe_reference import Moe, composed_moe, make_moe

from flashmoe_science.configs.moe import backward_hopper as configs
from flashmoe_science.configs.moe import hopper as forward_configs
from flashmoe_science.configs.moe.backward_hopper import MoeHopperBackward
from flashmoe_science.configs.moe.hopper import MoeHopperConfiguration
from flashmoe_science.cuda import wgmma
from flashmoe_science.cuda.moe import hopper as forward
from flashmoe_science.cuda.moe.gradients import (
    MoeBackwardKind,
    MoeBackwardProblem,
    hopper,
    select,
    why_no_kernel,
)
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.errors import InputError, NoKernelError
from flashmoe_science.jit.limits import check_block
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_composition import join_projections
from flashmoe_science.moe_gradients import MoeNeeds
from problems import H200

__all__ = ["emulated_launches"]

ALL = MoeNeeds(hidden_states=True, w13=True, w2=True, topk_weights=True)
PROBLEM = MoeProblem(
    tokens=4096,
    hidden=2048,
    intermediate=768,
    experts=128,
    top_k=8,
    dtype=torch.bfloat16,
    activation=Activation.SILU,
    w13_layout=W13Layout.CONCAT,
    ids64=False,
    keeps=True,
)
BACKWARD = MoeBackwardProblem(PROBLEM, ALL, kept=True)


def test_takes_what_the_forward_kernels_take() -> None:
    choice = select(BACKWARD, H200)
    assert (choice.kernel, choice.configuration) == (MoeBackwardKind.HOPPER, configs.WIDE)
    for device in (replace(H200, architecture="sm_80"), replace(H200, nvrtc=(12, 8))):
        with pytest.raises(NoKernelError, match="no mixture-of-experts kernel of the backward pass takes"):
            select(BACKWARD, device)


@pytest.mark.parametrize(
    ("change", "tiles"),
    [
        ({"tokens": 8192, "intermediate": 4096}, configs.PAIRS),
        ({"tokens": 8192, "intermediate": 4112}, configs.WIDE),  # mixtral's 14,336 was slower in pairs
        ({"tokens": 8191}, configs.WIDE),
        ({"tokens": 8192, "activation": Activation.RELU2_NO_MUL}, configs.WIDE),
    ],
)
def test_pairs_of_blocks_where_they_were_raced_and_won(
    change: dict[str, object], tiles: MoeHopperBackward
) -> None:
    changed = replace(PROBLEM, **change)  # type: ignore[arg-type]
    choice = hopper.choose(replace(BACKWARD, forward=changed), H200)
    assert choice is not None
    assert choice.configuration == tiles
    assert ("pairs of blocks" in choice.reason) == (tiles == configs.PAIRS)


def test_autograd_takes_it_where_it_was_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_kernel(PROBLEM, H200) is None
    monkeypatch.setenv("FLASHMOE_MOE_KERNEL", "portable")
    assert why_no_kernel(PROBLEM, H200) == "FLASHMOE_MOE_KERNEL asks for portable, which keeps nothing"


def test_what_it_refuses() -> None:
    with pytest.raises(InputError, match="take a MoeHopperBackward, not 3"):
        hopper.check(BACKWARD, 3)
    for product in ("first", "weights"):
        pairs = replace(getattr(configs.WIDE, product), cluster=2)
        with pytest.raises(InputError, match="for the second product of the backward pass alone"):
            hopper.check(BACKWARD, replace(configs.WIDE, **{product: pairs}))
    for tokens, step in ((144, 48), (96, 96), (80, 16)):
        first = replace(configs.WIDE.first, tokens=tokens, step=step)
        with pytest.raises(InputError, match=f"at most 64, not {tokens} and {step}"):
            hopper.check(BACKWARD, replace(configs.WIDE, first=first))
    huge = replace(PROBLEM, experts=30000, hidden=1 << 20, intermediate=1 << 18)
    assert hopper.choose(replace(BACKWARD, forward=huge), H200) is None


def test_everything_is_built_ahead_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "nvrtc_version", lambda: (13, 0))  # whether or not one is installed here
    built = {kernel.label: kernel for kernel in hopper.kernels("sm_90a")}
    for kernel in built.values():
        check_block(kernel.label, "sm_90", kernel.threads_per_block, kernel.dynamic_shared_bytes)
    for activation in set(Activation) - {Activation.GELU_NO_MUL}:  # refused: it would spill
        problem = replace(PROBLEM, activation=activation)
        for each in (problem, replace(problem, tokens=2048), replace(problem, tokens=64)):
            choice = hopper.choose(replace(BACKWARD, forward=each), H200)
            assert choice is not None
            for kernel in (
                hopper.first_kernel(choice.configuration, activation, torch.float16),
                hopper.second_kernel(choice.configuration, activation.gated, torch.float16),
                hopper.weights_kernel(choice.configuration, torch.float16, second=True, accumulates=False),
                forward.kernel(forward.configuration(each), activation, torch.bfloat16, keeps=True),
            ):
                assert kernel.label in built
    assert hopper.kernels("sm_80") == []


def test_what_would_spill_is_refused() -> None:
    problem = replace(BACKWARD, forward=replace(PROBLEM, activation=Activation.GELU_NO_MUL))
    assert hopper.why_not(problem, H200) == "its forward pass would spill registers with gelu_no_mul"


NARROW = MoeHopperBackward(
    first=MoeHopperConfiguration(tokens=128, step=32, stages=4),
    second=MoeHopperConfiguration(tokens=128, step=32, stages=4),
    weights=MoeHopperConfiguration(tokens=128, step=16, stages=4),
)
"""Tiles that a table of tuned configurations may name."""
TILES = [pytest.param(configs.WIDE, id="wide"), pytest.param(NARROW, id="narrow", marks=pytest.mark.slow)]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("tiles", TILES)
def test_the_gradients_of_products_compile(tiles: MoeHopperBackward) -> None:
    """Spills and serialised wgmma raise."""
    compile_kernel(hopper.first_kernel(tiles, Activation.SILU, torch.bfloat16))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.slow
def test_the_second_product_compiles_in_pairs() -> None:
    """Spills and serialised wgmma raise."""
    compile_kernel(hopper.second_kernel(configs.PAIRS, True, torch.bfloat16))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("accumulates", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("tiles", TILES)
def test_the_gradients_of_weights_compile(tiles: MoeHopperBackward, second: bool, accumulates: bool) -> None:
    """Spills and serialised wgmma raise."""
    compile_kernel(hopper.weights_kernel(tiles, torch.float16, second=second, accumulates=accumulates))


class Emulated:
    """A call on the CPU: memory that nobody wrote is full of NaN."""

    def __init__(self, moe: Moe, problem: MoeProblem, blocks: int = 2) -> None:
        self.moe = moe
        self.problem = problem
        self._device = replace(H200, multiprocessors=blocks)
        self.output = torch.full_like(moe.hidden_states, torch.nan)
        self.z = torch.full((problem.slots, problem.w13_rows), torch.nan, dtype=problem.dtype)

    def forward(self, tile: MoeHopperConfiguration = forward_configs.NARROW) -> torch.Tensor:
        planned = forward.plan(self.problem, tile, self._device)
        tensors = (*self.moe.tensors, *self.moe.biases.values(), self.output, self.z)
        with_workspace(planned.workspace_bytes, planned.launch, *tensors)
        return self.output

    def backward(
        self,
        grad_output: torch.Tensor,
        problem: MoeBackwardProblem,
        buffers: tuple[torch.Tensor, ...] = (),
        tiles: MoeHopperBackward = configs.WIDE,
    ) -> tuple[torch.Tensor | None, ...]:
        planned = hopper.plan(problem, tiles, self._device)
        biases = self.moe.w13_bias, self.moe.w2_bias
        gradients: list[torch.Tensor | None] = [
            torch.full_like(tensor, torch.nan) if needed and tensor is not None else None
            for tensor, needed in zip((*self.moe.tensors[:4], *biases), problem.needs, strict=True)
        ]
        if buffers:
            gradients[1:3] = buffers
        z = self.z if problem.kept else None
        tensors = (grad_output, *self.moe.tensors, z, *biases, *gradients)
        with_workspace(planned.workspace_bytes, planned.launch, *tensors)
        return tuple(gradients)


def with_workspace(size: int, launch: object, *tensors: torch.Tensor | None) -> None:
    workspace = torch.full((size + 256,), 0xFF, dtype=torch.uint8)  # NaN, in every type
    start = -(-workspace.data_ptr() // 256) * 256
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    launch(*addresses, start, 0)  # type: ignore[operator]


def emulate(
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    activation: Activation = Activation.SILU,
    layout: W13Layout = W13Layout.CONCAT,
    ids: torch.Tensor | None = None,
    biased: bool = False,
) -> tuple[Emulated, torch.Tensor]:
    """After the forward pass, and a gradient of its output. With biases projections are around every limit."""
    torch.manual_seed(3)
    moe = make_moe(
        tokens, hidden, intermediate, experts, top_k, dtype=dtype, activation=activation, biased=biased
    )
    if ids is not None:
        moe = replace(moe, topk_ids=ids)
    if biased:
        moe = around_the_limits(moe, layout)
    problem = MoeProblem(
        tokens,
        hidden,
        intermediate,
        experts,
        top_k,
        dtype,
        activation,
        layout,
        ids64=moe.topk_ids.dtype == torch.int64,
        w13_biased=biased,
        w2_biased=biased,
        keeps=True,
    )
    emulated = Emulated(moe, problem)
    emulated.forward()
    return emulated, torch.randn(tokens, hidden).to(dtype)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize(("copies_late", "tiles"), [(True, configs.WIDE), (False, NARROW)])
def test_gradients_of_swiglu(
    copies_late: bool, tiles: MoeHopperBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a stage of rows, and sizes that fill no tile."""
    monkeypatch.setattr(EmulatedLauncher, "copies_late", copies_late)
    emulated, grad_output = emulate(70, 80, 48, 3, 2, layout=W13Layout.INTERLEAVED)
    problem = MoeBackwardProblem(emulated.problem, ALL, kept=True)
    EmulatedLauncher.order.clear()
    gradients = emulated.backward(grad_output, problem, tiles=tiles)[:4]
    # The input's gradient is there before the weights' begin, for a pipeline that waits for it.
    order = EmulatedLauncher.order
    assert order.index("moe_combine") < order.index("moe_backward_weights")
    assert order.count("moe_backward_weights") == 2
    assert_gradients_as_exact_as_torch(
        gradients, emulated.moe, grad_output, Activation.SILU, W13Layout.INTERLEAVED
    )


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize(("hidden", "intermediate"), [(80, 272), (272, 80)])
def test_tiles_of_other_sizes_have_the_same_bits(hidden: int, intermediate: int) -> None:
    """Among the tiles are whole ones, and those of which the second consumer has no columns."""
    emulated, grad_output = emulate(70, hidden, intermediate, 3, 2, activation=Activation.SWIGLU_OAI)
    output = emulated.output.clone()
    assert torch.equal(emulated.forward(forward_configs.NARROW), output)
    problem = MoeBackwardProblem(emulated.problem, ALL, kept=True)
    usual = emulated.backward(grad_output, problem)[:4]
    for gradient, expected in zip(
        emulated.backward(grad_output, problem, tiles=NARROW)[:4], usual, strict=True
    ):
        assert gradient is not None
        assert expected is not None
        assert torch.equal(gradient, expected)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize(
    ("rows", "activation", "dtype"),
    [(96, Activation.SILU, torch.bfloat16), (70, Activation.RELU2_NO_MUL, torch.float16)],
)
def test_gradients_of_experts_whose_rows_leave_in_boxes(
    rows: int, activation: Activation, dtype: torch.dtype
) -> None:
    """An odd number of boxes, so that the last of a panel is still on its way when the panel's place may be filled
    again and the consumer's next panel begins; and two with a rest behind them.
    """
    ids = torch.tensor([[0], [1]] * rows, dtype=torch.int32)
    emulated, grad_output = emulate(2 * rows, 80, 272, 2, 1, dtype=dtype, activation=activation, ids=ids)
    problem = MoeBackwardProblem(emulated.problem, ALL, kept=True)
    gradients = emulated.backward(grad_output, problem)[:4]
    assert_gradients_as_exact_as_torch(gradients, emulated.moe, grad_output, activation)


PAIR = MoeHopperConfiguration(tokens=64, step=32, stages=4, cluster=2)
PAIRS = replace(NARROW, second=PAIR)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize(
    ("hidden", "intermediate", "activation"),
    [
        (80, 272, Activation.SWIGLU_OAI),
        pytest.param(528, 80, Activation.RELU2_NO_MUL, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("copies_late", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pairs_of_blocks_have_the_same_bits(
    hidden: int, intermediate: int, activation: Activation, copies_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of several pairs of tiles, of one row, whose second block has none, and of no rows."""
    monkeypatch.setattr(EmulatedLauncher, "copies_late", copies_late)
    ids = torch.tensor([[0, 3]] * 90 + [[1, 3]] + [[3, -1]] * 9, dtype=torch.int32)
    emulated, grad_output = emulate(100, hidden, intermediate, 4, 2, activation=activation, ids=ids)
    output, z = emulated.output.clone(), emulated.z.clone()
    problem = MoeBackwardProblem(emulated.problem, ALL, kept=True)
    usual = emulated.backward(grad_output, problem)[:4]
    pairs = Emulated(emulated.moe, emulated.problem, blocks=5)
    assert torch.equal(pairs.forward(PAIR), output)
    assert torch.equal(pairs.z.view(torch.int16), z.view(torch.int16))
    for gradient, expected in zip(pairs.backward(grad_output, problem, tiles=PAIRS)[:4], usual, strict=True):
        assert gradient is not None
        assert expected is not None
        assert torch.equal(gradient, expected)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize("tiles", [configs.WIDE, NARROW])
def test_gradients_without_a_gate_and_experts_without_rows(tiles: MoeHopperBackward) -> None:
    """Ids that are no expert, in int64; an expert that nobody chose."""
    ids = torch.tensor([[0, 3], [3, -1], [9, 0], [0, 3], [1 << 40, -5]] * 8)
    emulated, grad_output = emulate(
        40, 64, 80, 4, 2, dtype=torch.float16, activation=Activation.RELU2_NO_MUL, ids=ids
    )
    problem = MoeBackwardProblem(emulated.problem, ALL, kept=True)
    gradients = emulated.backward(grad_output, problem, tiles=tiles)[:4]
    assert_gradients_as_exact_as_torch(gradients, emulated.moe, grad_output, Activation.RELU2_NO_MUL)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize(("layout", "kept"), [(W13Layout.CONCAT, True), (W13Layout.INTERLEAVED, False)])
def test_gradients_of_biases_and_the_clamped_activation(layout: W13Layout, kept: bool) -> None:
    """Against the composition in float64, from the projections that were kept or are computed again."""
    activation = Activation.SWIGLU_OAI
    ids = torch.tensor([[0, 3], [3, -1], [2, 0], [0, 3], [4, 2]] * 8, dtype=torch.int32)
    emulated, grad_output = emulate(
        40, 80, 48, 4, 2, activation=activation, layout=layout, ids=ids, biased=True
    )
    moe = emulated.moe
    *floats, w13_bias, w2_bias = (tensor.double() for tensor in (*moe.tensors[:4], *moe.biases.values()))
    output = composed_moe(Moe(*floats, moe.topk_ids, w13_bias, w2_bias), activation, layout, torch.float64)
    z = join_projections(*emulated.z.chunk(2, dim=1), layout)
    right_z = projected(moe, layout)
    for ours, right in ((emulated.output, output), (z[: len(right_z)], right_z)):
        assert (ours.double() - right).norm() < 0.01 * right.norm()
    if not kept:
        emulated.z.fill_(torch.nan)
    needs = MoeNeeds(*[True] * 6)
    gradients = emulated.backward(grad_output, MoeBackwardProblem(emulated.problem, needs, kept=kept))
    assert_clamped_gradients(gradients, moe, grad_output, z, layout)
    for name, gradient in zip(MoeNeeds._fields, gradients, strict=True):
        assert gradient is not None
        assert not name.startswith("w") or not gradient[1].any(), name  # nobody chose this expert


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
def test_weights_gradients_are_added_to_buffers_and_z_is_computed_again() -> None:
    emulated, grad_output = emulate(70, 80, 48, 3, 2)
    buffers = tuple(torch.randn(tensor.shape) for tensor in (emulated.moe.w13, emulated.moe.w2))
    before = [buffer.clone() for buffer in buffers]
    problem = MoeBackwardProblem(
        emulated.problem,
        ALL._replace(hidden_states=False),
        kept=False,
        accumulates_w13=True,
        accumulates_w2=True,
    )
    emulated.z.fill_(torch.nan)
    gradients = emulated.backward(grad_output, problem, buffers)[:4]
    added = tuple((after - start).to(torch.bfloat16) for after, start in zip(buffers, before, strict=True))
    assert_gradients_as_exact_as_torch((None, *added, gradients[3]), emulated.moe, grad_output)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
@pytest.mark.parametrize("layout", W13Layout)
def test_weights_gradients_are_added_to_buffers_before_they_are_rounded(layout: W13Layout) -> None:
    emulated, grad_output = emulate(70, 80, 48, 3, 2, layout=layout)
    problem = MoeBackwardProblem(emulated.problem, ALL, kept=True)
    gradients = emulated.backward(grad_output, problem)
    buffers = tuple(torch.zeros(tensor.shape) for tensor in (emulated.moe.w13, emulated.moe.w2))
    emulated.backward(grad_output, replace(problem, accumulates_w13=True, accumulates_w2=True), buffers)
    assert_rounded_last(buffers, gradients[1:3])


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
def test_exact_sums_are_added_to_buffers() -> None:
    moe, grad_output = whole_numbers(70, 80, 48, 3, 2, dtype=torch.bfloat16)
    emulated, _ = emulate(70, 80, 48, 3, 2, activation=Activation.RELU2_NO_MUL)
    emulated = Emulated(moe, emulated.problem)
    emulated.forward()
    starts = tuple(torch.randint(-99, 99, tensor.shape).float() for tensor in (moe.w13, moe.w2))
    buffers = tuple(start.clone() for start in starts)
    problem = MoeBackwardProblem(emulated.problem, ALL, kept=True, accumulates_w13=True, accumulates_w2=True)
    emulated.backward(grad_output, problem, buffers)
    assert_added_in_float32(buffers, starts, moe, grad_output)


@NEEDS_COMPILER
@pytest.mark.usefixtures("emulated_launches")
def test_what_is_not_a_number_stays_in_its_rows_and_experts() -> None:
    """The last stage of an expert reads the next one's rows."""
    ids = torch.arange(40, dtype=torch.int32)[:, None] % 3
    emulated, grad_output = emulate(40, 80, 48, 3, 1, ids=ids)
    grad_output[4] = torch.nan
    gradients = emulated.backward(grad_output, MoeBackwardProblem(emulated.problem, ALL, kept=True))[:4]
    hidden_states, w13, w2, topk_weights = gradients
    assert hidden_states is not None
    assert topk_weights is not None
    assert hidden_states.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [4]
    assert topk_weights.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [4]
    for weight in (w13, w2):
        assert weight is not None
        assert weight.isfinite().flatten(1).all(1).tolist() == [True, False, True]
