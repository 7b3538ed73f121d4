"""Gradients of attention on the GPU at hand: every kernel that takes a call, by itself and through autograd."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_backward import Backward, assert_gradients, backward_case
from attention_gradients import Case, Exact, assert_as_exact_as_torch, assert_rms_as_of_torch
from backward_on_gpu import ALL, BF16, FP16, KINDS, LENGTHS, SHORT, backward, case_of, choice_of, choices_of

from flashmoe_science import flash_attention
from flashmoe_science.configs.attention.backward_hopper import HopperBackward
from flashmoe_science.cuda.attention import gradients
from flashmoe_science.cuda.attention.gradients.problem import GradientKind
from flashmoe_science.gradients import Gradients, Needs

pytestmark = pytest.mark.gpu


def assert_right(case: Backward, needs: Needs = ALL) -> None:
    """Every kernel that takes the call is right, and gives the same bits twice."""
    choices = [choice for kind in KINDS for choice in choices_of(case, needs, kind)]
    assert choices, "no kernel takes this"
    for choice in choices:
        first, second = backward(case, needs, choice), backward(case, needs, choice)
        assert [gradient is not None for gradient in first] == list(needs)
        assert_gradients(case, first)
        for one, other in zip(first, second, strict=True):
            assert one is None or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 72, 96, 128, 136, 192, 200, 256])
def test_head_dims(head_dim: int, causal: bool) -> None:
    for dtype in (BF16, FP16):
        for lengths in (LENGTHS, SHORT):
            assert_right(case_of(lengths, head_dim, causal=causal, dtype=dtype))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (64, 128), (239, 1), (1, 239), (799, 3), (3, 799), (113, 203), (1023, 1024), (1100, 700)],
)
def test_lengths(lengths: tuple[int, int], causal: bool, head_dim: int) -> None:
    assert_right(case_of(lengths, head_dim, causal=causal))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim"),
    [(15, 15, 128), (64, 128, 64), (256, 256, 64), (300, 300, 128), (130, 70, 40), (256, 256, 256)],
)
def test_error_over_many_draws_against_pytorchs(
    seqlen_q: int, seqlen_k: int, head_dim: int, causal: bool, dtype: torch.dtype
) -> None:
    """RMS at most 1.15 times, worst element and worst row at most twice, of every kernel. Pooled over a batch: of one
    draw of few rows either side's RMS varies by tens of per cent.
    """
    generator = torch.Generator("cuda").manual_seed(seqlen_q + seqlen_k + head_dim)
    query, key, value, grad = (
        torch.randn(12, 4, rows, head_dim, device="cuda", generator=generator).to(dtype)
        for rows in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)
    )
    case = backward_case(query, key, value, grad, causal=causal)
    beside = Case(query, key, value, grad, causal=causal)
    for kind in KINDS:
        for choice in choices_of(case, ALL, kind):
            made = backward(case, ALL, choice)
            assert_as_exact_as_torch(beside, made, Exact(case.exact, case.bounds))
            assert_rms_as_of_torch(beside, made, Exact(case.exact, case.bounds))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_more_tiles_than_multiprocessors(causal: bool, head_dim: int) -> None:
    """Several sections of heads too: blocks draw tickets, and take one tile after another."""
    assert_right(case_of((1500, 1500), head_dim, heads=(32, 32), causal=causal))


def test_steps_of_80_rows_with_a_mask() -> None:
    """Which are chosen from more keys on."""
    case = case_of((1300, 1700), 128, heads=(16, 8), grad_lse=True)
    tile = HopperBackward(128, True, wide=True)
    choice = choice_of(case, ALL, GradientKind.HOPPER)
    if choice is None:
        pytest.skip("this GPU has no wgmma")
    first, second = (backward(case, ALL, dataclasses.replace(choice, configuration=tile)) for _ in range(2))
    assert_gradients(case, first)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_grouped_heads_and_a_gradient_of_the_log_sum_exp(heads: tuple[int, int], head_dim: int) -> None:
    assert_right(case_of(head_dim=head_dim, heads=heads, grad_lse=True))


@pytest.mark.parametrize("lengths", [LENGTHS, SHORT], ids=["", "short"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_scales(scale: float, head_dim: int, lengths: tuple[int, int]) -> None:
    assert_right(case_of(lengths, head_dim, scale=scale))


@pytest.mark.parametrize("lengths", [LENGTHS, SHORT], ids=["", "short"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("factor", [2.0**10, 2.0**-14])
def test_large_and_small_gradients_in_float16(factor: float, head_dim: int, lengths: tuple[int, int]) -> None:
    assert_right(case_of(lengths, head_dim, dtype=FP16, factor=factor))


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("needs", [Needs(*(bool(i & bit) for bit in (1, 2, 4))) for i in range(1, 8)])
def test_only_what_is_needed(needs: Needs, head_dim: int) -> None:
    assert_right(case_of(head_dim=head_dim), needs)


def test_rows_before_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(case_of(rows_first=True, head_dim=128))


def test_gradients_of_the_output_that_no_kernel_reads_are_copied() -> None:
    case = case_of((128, 192))
    for grad in (
        torch.ones((), device="cuda", dtype=BF16).expand(case.output.shape),
        case.grad_output.mT.contiguous().mT,
        torch.randn(2 * 4 * 128 * 64 + 1, device="cuda").to(BF16)[1:].view(2, 4, 128, 64),
        case.grad_output[:1].expand(2, -1, -1, -1),
        torch.randn(2, 4, 128, 72, device="cuda").to(BF16)[..., 4:68],
    ):
        same = backward_case(case.query, case.key, case.value, grad.contiguous(), causal=True)
        results = gradients.backward(
            grad,
            same.query,
            same.key,
            same.value,
            same.output,
            same.lse,
            None,
            causal=True,
            softmax_scale=None,
            needs=ALL,
        )
        assert_gradients(same, results)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "heads", "rows"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_expanded_queries_keys_and_values(head_dim: int, axis: int) -> None:
    """Stride 0: each entry that memory repeats has a gradient of its own, which autograd sums."""
    whole = case_of((150, 203), head_dim)
    parts = [tensor.narrow(axis, 0, 1).contiguous() for tensor in (whole.query, whole.key, whole.value)]
    tensors = [
        part.expand(like.shape)
        for part, like in zip(parts, (whole.query, whole.key, whole.value), strict=True)
    ]
    assert all(tensor.stride(axis) == 0 for tensor in tensors)
    case = backward_case(*tensors, whole.grad_output, causal=True)
    assert_right(case)
    inputs = [part.clone().requires_grad_() for part in parts]
    expanded = [part.expand(like.shape) for part, like in zip(inputs, tensors, strict=True)]
    output = flash_attention(*expanded, causal=True)
    assert isinstance(output, torch.Tensor)
    summed = torch.autograd.grad(output, inputs, whole.grad_output)
    for got, exact, bound in zip(summed, case.exact, case.bounds, strict=True):
        # The sum is rounded too, and autograd may round it as often as it has terms.
        size = exact.abs().sum(axis, keepdim=True) * exact.shape[axis] ** 0.5
        allowed = bound.sum(axis, keepdim=True) + torch.finfo(BF16).eps * size
        assert ((got.double() - exact.sum(axis, keepdim=True)).abs() <= allowed).all()


def test_no_rows_and_no_keys() -> None:
    for lengths in ((0, 100), (100, 0)):
        for gradient in backward(case_of(lengths)):
            assert gradient is not None
            assert (gradient == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_without_keys_get_zeros(head_dim: int) -> None:
    case = case_of((417, 300), head_dim)
    of_query = backward(case)[0]
    assert of_query is not None
    assert (of_query[:, :, :117] == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_bits_every_time(head_dim: int, causal: bool) -> None:
    case = case_of((1500, 1500), head_dim, causal=causal)
    first = backward(case)
    for _ in range(100):
        for one, other in zip(first, backward(case), strict=True):
            assert one is not None
            assert torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_one_pass_gives_the_same_bits_beside_another(head_dim: int, causal: bool) -> None:
    """More blocks than the GPU runs at a time, of which those of a head wait for each other, in two grids at once."""
    case = case_of((1500, 1500), head_dim, heads=(32, 16), causal=causal)
    choice = next(iter(choices_of(case, ALL, GradientKind.PORTABLE)))
    if choice.configuration.single is None:
        pytest.skip(f"there is no tile for one pass at head_dim {head_dim} here")
    first = backward(case, choice=choice)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(backward(case, choice=choice))
        torch.cuda.synchronize()
        for result in results:
            for one, other in zip(first, result, strict=True):
                assert torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_memory_holds_nothing_of_the_square_of_the_length(head_dim: int, causal: bool) -> None:
    """In whole steps of every kernel. Plans alone are held to the same without a GPU, in `test_workspace.py`."""
    case = case_of((2560, 2560), head_dim, heads=(2, 2), causal=causal)
    backward(case)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    results = backward(case)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    owned = sum(gradient.nbytes for gradient in results if gradient is not None)
    # At most a float32 sum of dQ and statistics.
    assert taken <= owned + 2 * case.query.nbytes + 4 * case.lse.nbytes


# --- through autograd


def leaves(case: Backward) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in (case.query, case.key, case.value)]


def test_autograd_and_retained_graphs() -> None:
    case = case_of((256, 256))
    inputs = leaves(case)
    output = flash_attention(*inputs, causal=True)
    assert isinstance(output, torch.Tensor)
    first = torch.autograd.grad(output, inputs, case.grad_output, retain_graph=True)
    second = torch.autograd.grad(output, inputs, case.grad_output)
    assert_gradients(case, first)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_sum_of_the_output() -> None:
    case = case_of((256, 256))
    case = backward_case(case.query, case.key, case.value, torch.ones_like(case.query), causal=True)
    inputs = leaves(case)
    flash_attention(*inputs, causal=True).sum().backward()  # type: ignore[union-attr]
    assert_gradients(case, tuple(tensor.grad for tensor in inputs))


def test_the_log_sum_exp_is_differentiable() -> None:
    case = case_of((256, 256), grad_lse=True)
    inputs = leaves(case)
    output, lse = flash_attention(*inputs, causal=True, return_lse=True)
    gradients = torch.autograd.grad([output, lse], inputs, [case.grad_output, case.grad_lse])
    assert_gradients(case, gradients)


def test_a_graph_of_forward_and_backward() -> None:
    case = case_of((256, 256), 128)
    inputs = leaves(case)

    def step() -> tuple[torch.Tensor, ...]:
        output = flash_attention(*inputs, causal=True)
        assert isinstance(output, torch.Tensor)
        return torch.autograd.grad(output, inputs, case.grad_output)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for gradient in captured:
        gradient.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_gradients(case, captured)


def test_streams_and_threads() -> None:
    """Several threads, each on a stream of its own, with calls of different shapes."""
    cases = [case_of((128 + 64 * i, 300), 64 if i % 2 else 128) for i in range(4)]

    def work(case: Backward) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            results = [backward(case) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        for result in results:
            assert_gradients(case, result)

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(work, cases))


def test_staggered_tiles_on_two_streams() -> None:
    """Tiles of a head wait for each other in both directions, so a kernel needs all of its blocks on the GPU at once.
    Here each of two takes all multiprocessors."""
    case = case_of((640, 640), 128, heads=(32, 32), causal=False)
    choice = choice_of(case, ALL, GradientKind.HOPPER)
    if choice is None:
        pytest.skip("this GPU has no wgmma")
    assert choice.configuration == HopperBackward(128, False, staggered=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results: list[Gradients] = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(backward(case, ALL, choice))
    torch.cuda.synchronize()
    assert_gradients(case, results[0])
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))  # type: ignore[arg-type]
