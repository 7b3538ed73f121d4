"""Routing with its losses in one pass, and its gradient: the kernels' sources run on the CPU against float64."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch
from emulated import NEEDS_COMPILER, compile_emulation
from routing_cases import BF16, CASES, FP16, FP32, Given, exact, incoming, logits_of

from flashmoe_science import MoE, router_losses, topk_routing, topk_routing_with_losses
from flashmoe_science.configs.moe import topk as configs
from flashmoe_science.cpu import routing as cpu_routing
from flashmoe_science.cuda.moe import routing_losses, topk
from flashmoe_science.jit.limits import LIMITS
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.router_losses import routing_losses as composed_losses
from flashmoe_science.routing_options import RoutingOptions, RoutingPass
from problems import H200


def emulate_forward(
    logits: torch.Tensor, k: int, options: RoutingOptions, blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """On a grid of fewer blocks than there are of tokens, so that each goes over several."""
    tokens, experts = logits.shape
    shape = configs.configuration(experts)
    kernel = routing_losses.forward_kernel(shape, logits.dtype, "sm_90")
    weights, ids = torch.full((tokens + 1, k), torch.nan), torch.full((tokens + 1, k), -7, dtype=torch.int32)
    probabilities, squares = torch.full((blocks, experts), torch.nan), torch.full((blocks,), torch.nan)
    slots = torch.full((blocks, experts), -7, dtype=torch.int32)
    arguments = ctypes.create_string_buffer(routing_losses.FORWARD_BYTES)
    topk.write_arguments(
        arguments,
        *(tokens, experts, k, options.scores, options.renormalize, options.scaling_factor),
        groups=options.groups,
        top_groups=options.top_groups,
    )
    topk.ADDRESSES.pack_into(arguments, 0, logits.data_ptr(), 0, weights.data_ptr(), ids.data_ptr())
    sums = probabilities, slots, squares
    routing_losses._SUMS.pack_into(arguments, topk.ARGUMENT_BYTES, *(each.data_ptr() for each in sums))
    compile_emulation(kernel, "TopkParameters").run(arguments, blocks)
    assert weights[-1].isnan().all()
    assert (ids[-1] == -7).all()

    losses, counts = torch.full((2,), torch.nan), torch.full((experts,), -7)
    arguments = ctypes.create_string_buffer(routing_losses.LOSSES_BYTES)
    routing_losses.write_losses_arguments(arguments, blocks, experts, tokens)
    results = losses[0], losses[1], counts
    routing_losses._LOSSES.pack_into(arguments, 0, *(each.data_ptr() for each in (*sums, *results)))
    compile_emulation(routing_losses.losses_kernel("sm_90"), "LossParameters").run(arguments, 1)
    return weights[:-1], ids[:-1], losses[0], losses[1], counts


def emulate_backward(
    logits: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    given: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    options: RoutingOptions,
) -> torch.Tensor:
    tokens, experts = logits.shape
    shape = configs.configuration(experts)
    gradient = torch.full((tokens + 1, experts), torch.nan, dtype=logits.dtype)
    arguments = ctypes.create_string_buffer(routing_losses.BACKWARD_BYTES)
    routing_losses.write_backward_arguments(
        arguments,
        *(tokens, experts, ids.shape[1], options.scores, options.renormalize, options.scaling_factor),
    )
    weights, balance, z = (0 if each is None else each.data_ptr() for each in given)
    routing_losses._BACKWARD.pack_into(
        *(arguments, 0, logits.data_ptr(), ids.data_ptr(), weights, counts.data_ptr(), balance, z),
        gradient.data_ptr(),
    )
    kernel = routing_losses.backward_kernel(shape, logits.dtype, "sm_90")
    compile_emulation(kernel, "TopkBackwardParameters").run(arguments, -(-tokens // shape.tokens_per_block))
    assert gradient[-1].isnan().all()
    return gradient[:-1]


@NEEDS_COMPILER
@pytest.mark.parametrize("name", CASES)
def test_the_emulated_pass_gives_the_choice_and_both_losses(name: str) -> None:
    tokens, experts, k, dtype, options = CASES[name]
    logits = logits_of(tokens, experts, dtype)
    weights, ids, balance, z, counts = emulate_forward(logits, k, options, blocks=2)
    right = exact(logits.double(), k, options)
    assert torch.equal(ids.long(), right[1])
    assert torch.equal(counts, right[4])
    torch.testing.assert_close(weights.double(), right[0], rtol=2e-6, atol=1e-30)
    torch.testing.assert_close(balance.double(), right[2], rtol=1e-6, atol=0)
    torch.testing.assert_close(z.double(), right[3], rtol=1e-6, atol=0)
    composed = composed_losses(logits, ids)
    torch.testing.assert_close(balance, composed.load_balancing)
    torch.testing.assert_close(z, composed.z)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "given", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("name", CASES)
def test_the_emulated_gradient(name: str, given: tuple[bool, bool, bool]) -> None:
    """Of weights and losses, and of each alone."""
    tokens, experts, k, dtype, options = CASES[name]
    logits = logits_of(tokens, experts, dtype)
    grads, right, least = incoming(logits, k, options, given)
    _, ids, _, _, counts = exact(logits.double(), k, options)
    gradient = emulate_backward(logits, ids.int(), counts, grads, options)
    rounding = {FP32: 2e-6, BF16: 2**-8, FP16: 2**-10}[dtype]
    torch.testing.assert_close(gradient.double(), right, rtol=rounding, atol=least)


@NEEDS_COMPILER
def test_a_nan_makes_the_losses_nan_and_reaches_no_other_tokens_gradient() -> None:
    logits = logits_of(12, 64, FP32)
    logits[5, 3] = torch.nan
    options = RoutingOptions()
    weights, ids, balance, z, counts = emulate_forward(logits, 4, options, blocks=1)
    assert balance.isnan()
    assert z.isnan()
    assert weights[5].isnan().all()
    others = torch.arange(12) != 5
    assert weights[others].isfinite().all()
    assert counts.sum() == 48
    incoming = (torch.ones(12, 4), torch.ones(()), torch.ones(()))
    gradient = emulate_backward(logits, ids, counts, incoming, options)
    assert gradient[others].isfinite().all()
    assert gradient[5].isnan().all()


@NEEDS_COMPILER
@pytest.mark.parametrize("blocks", [1, 3, 18])
def test_any_grid_gives_the_sums(blocks: int) -> None:
    """More blocks than tokens need leave zeros."""
    logits = logits_of(70, 64, FP32)
    _, _, balance, z, counts = emulate_forward(logits, 3, RoutingOptions(), blocks)
    right = exact(logits.double(), 3, RoutingOptions())
    assert torch.equal(counts, right[4])
    torch.testing.assert_close(torch.stack((balance, z)).double(), torch.stack(right[2:4]), rtol=1e-6, atol=0)


class Emulated:
    """The kernels in the place of a GPU's."""

    @staticmethod
    def forward(
        logits: torch.Tensor, k: int, options: RoutingOptions, correction_bias: torch.Tensor | None
    ) -> RoutingPass:
        assert correction_bias is None
        return RoutingPass(*emulate_forward(logits, k, options, blocks=2))

    @staticmethod
    def backward(
        logits: torch.Tensor,
        ids: torch.Tensor,
        counts: torch.Tensor,
        grad_weights: torch.Tensor | None,
        grad_balance: torch.Tensor | None,
        grad_z: torch.Tensor | None,
        options: RoutingOptions,
    ) -> torch.Tensor:
        return emulate_backward(logits, ids, counts, (grad_weights, grad_balance, grad_z), options)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_losses, "_fused", lambda logits, correction_bias: Emulated)


ROUTINGS: list[dict[str, Any]] = [
    {},
    {"renormalize": False, "scaling_factor": 2.5},
    {"scores": "sigmoid", "groups": 8, "top_groups": 4},
]


@NEEDS_COMPILER
@pytest.mark.parametrize("options", ROUTINGS)
def test_autograd_through_the_kernels_is_that_of_the_composition(
    fused: None, options: dict[str, Any]
) -> None:
    logits = logits_of(33, 64, FP32).requires_grad_()
    weights, ids, losses = topk_routing_with_losses(logits, 4, **options)
    right, chosen = topk_routing(logits, 4, **options)
    composed = composed_losses(logits, chosen)
    assert torch.equal(ids, chosen)
    assert torch.equal(losses.tokens_per_expert, composed.tokens_per_expert)
    assert not losses.tokens_per_expert.requires_grad
    incoming = torch.randn(33, 4, generator=torch.Generator().manual_seed(3))

    def total(weights: torch.Tensor, losses: router_losses.RoutingLosses, which: str) -> torch.Tensor:
        parts = {
            "weights": (weights * incoming).sum(),
            "balance": 0.3 * losses.load_balancing,
            "z": 0.2 * losses.z,
        }
        return sum(part for name, part in parts.items() if name in which)  # type: ignore[return-value]

    for which in ("weights balance z", "weights", "balance", "z"):
        pairs = (
            torch.autograd.grad(total(*each, which), logits, retain_graph=True)[0]
            for each in ((weights, losses), (right, composed))
        )
        torch.testing.assert_close(*pairs, rtol=1e-5, atol=2e-7)


@NEEDS_COMPILER
def test_the_gradients_own_gradient_is_that_of_the_composition(fused: None) -> None:
    """Routing is differentiable any number of times, and stays so."""
    logits = logits_of(9, 64, FP32).requires_grad_()
    weights, _, losses = topk_routing_with_losses(logits, 4)
    right, chosen = topk_routing(logits, 4)
    composed = composed_losses(logits, chosen)
    seconds = []
    for each, its in ((weights, losses), (right, composed)):
        value = each.square().sum() + its.load_balancing + its.z
        (first,) = torch.autograd.grad(value, logits, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), logits)[0])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-6)


@NEEDS_COMPILER
def test_without_a_gradient_nothing_is_recorded(fused: None) -> None:
    logits = logits_of(9, 64, FP32)
    weights, _, losses = topk_routing_with_losses(logits, 4)
    assert weights.grad_fn is None
    assert losses.z.grad_fn is None


@NEEDS_COMPILER
def test_the_modules_losses_go_through_them(fused: None) -> None:
    torch.manual_seed(0)
    layer = MoE(64, 32, 8, 2)
    tokens = torch.randn(20, 64)
    output, losses = layer.forward_with_losses(tokens)
    (losses.load_balancing + losses.z).backward()
    logits = torch.nn.functional.linear(tokens, layer.gate.weight.detach()).requires_grad_()  # type: ignore[arg-type]
    composed = composed_losses(logits, topk_routing(logits.detach(), 2)[1])
    torch.testing.assert_close(losses.load_balancing, composed.load_balancing)
    torch.testing.assert_close(losses.z, composed.z)
    (composed.load_balancing + composed.z).backward()
    assert logits.grad is not None
    torch.testing.assert_close(layer.gate.weight.grad, logits.grad.t() @ tokens, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(output, layer(tokens))


@pytest.mark.parametrize("named", [None, "", "fused", "other"])
def test_on_the_cpu_they_are_the_cpus_whatever_is_named(
    monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    if named is None:
        monkeypatch.delenv(router_losses.OVERRIDE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(router_losses.OVERRIDE_VARIABLE, named)
    assert router_losses._fused(torch.zeros(2, 4), None) is cpu_routing
    weights, ids, losses = topk_routing_with_losses(torch.zeros(2, 4), 2)
    assert ids.tolist() == [[0, 1], [0, 1]]
    assert losses.load_balancing == 2
    assert weights.sum() == 2


def test_no_tokens_lose_nothing() -> None:
    _, _, losses = topk_routing_with_losses(torch.zeros(0, 4), 2)
    assert (losses.load_balancing, losses.z) == (0, 0)


def test_one_graph() -> None:
    torch._dynamo.reset()
    logits = logits_of(9, 16, FP32)

    def step(logits: torch.Tensor) -> torch.Tensor:
        weights, _, losses = topk_routing_with_losses(logits, 4)
        return weights.sum() + losses.load_balancing + losses.z

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits), step(logits))


@pytest.mark.parametrize(
    ("named", "architecture", "kernels"),
    [
        (None, "sm_80", True),
        ("", "sm_90", True),
        ("fused", "sm_90", True),
        ("composed", "sm_90", False),
        (None, "sm_75", False),
    ],
)
def test_on_cuda_the_composition_is_for_turing_or_must_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, named: str | None, architecture: str, kernels: bool
) -> None:
    if named is None:
        monkeypatch.delenv(router_losses.OVERRIDE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(router_losses.OVERRIDE_VARIABLE, named)

    class OnCuda(torch.Tensor):
        is_cpu, is_cuda = False, True

    device = dataclasses.replace(H200, architecture=architecture)
    monkeypatch.setattr(routing_losses, "device_of", lambda index: device)
    monkeypatch.setattr(router_losses, "all_direct", lambda *tensors: True)
    logits = torch.zeros(2, 4).as_subclass(OnCuda)
    assert router_losses._fused(logits, None) is (routing_losses if kernels else None)


def step(
    logits: torch.Tensor, k: int, grads: Given
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `exact` gives, and the gradient of the logits."""
    weights, ids, losses = topk_routing_with_losses(logits, k)
    outputs = weights, losses.load_balancing, losses.z
    (gradient,) = torch.autograd.grad(outputs, logits, grads)
    made = weights.detach(), ids, losses.load_balancing.detach(), losses.z.detach()
    return *made, losses.tokens_per_expert, gradient


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("tokens", [1, 70, 5000])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (128, 8), (1000, 6)])
def test_on_a_gpu_against_float64(
    monkeypatch: pytest.MonkeyPatch, experts: int, k: int, tokens: int, dtype: torch.dtype
) -> None:
    """No element is further off than one rounding allows, nor twice as far as where the losses are composed: those
    round the gradients of weights and losses apart, and their sum again.
    """
    given = logits_of(tokens, experts, dtype)
    incoming_grads, right, least = incoming(given, k, RoutingOptions(), (True, True, True))
    truth = exact(given.double(), k, RoutingOptions())
    grads = tuple(each.cuda() for each in incoming_grads if each is not None)
    logits = given.cuda().requires_grad_()
    first, second = step(logits, k, grads), step(logits, k, grads)  # type: ignore[arg-type]
    assert all(map(torch.equal, first, second))
    weights, ids, balance, z, counts, gradient = (each.cpu() for each in first)
    assert torch.equal(ids.long(), truth[1])
    assert torch.equal(counts, truth[4])
    torch.testing.assert_close(weights.double(), truth[0], rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(torch.stack((balance, z)).double(), torch.stack(truth[2:4]), rtol=1e-5, atol=0)
    rounding = {FP32: 1e-5, BF16: 2**-8, FP16: 2**-10}[dtype]
    torch.testing.assert_close(gradient.double(), right, rtol=rounding, atol=least)

    monkeypatch.setenv(router_losses.OVERRIDE_VARIABLE, "composed")
    composed = step(logits, k, grads)[-1].cpu()  # type: ignore[arg-type]
    error, theirs = ((each.double() - right).abs() for each in (gradient, composed))
    assert error.max() <= 2 * theirs.max() + least
    assert error.norm() <= 2 * theirs.norm() + 1e-7 * right.norm()


@pytest.mark.gpu
def test_a_graph_of_both_passes_gives_the_same_bits() -> None:
    logits = logits_of(70, 128, FP32).cuda().requires_grad_()
    grads = torch.ones(70, 8, device="cuda"), torch.ones((), device="cuda"), torch.ones((), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [step(logits, 8, grads) for _ in range(3)][-1]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(logits, 8, grads)
    graph.replay()
    assert all(map(torch.equal, expected, captured))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_gradient_is_nearer_to_float64_than_the_compositions(dtype: torch.dtype) -> None:
    """Which rounds the gradients of weights and losses to 16 bits apart, and their sum again."""
    logits = logits_of(70, 8, dtype)
    grads, right, _ = incoming(logits, 2, RoutingOptions(), (True, True, True))
    counts = exact(logits.double(), 2, RoutingOptions())[4]
    leaf = logits.clone().requires_grad_()
    weights, ids = topk_routing(leaf, 2)
    losses = composed_losses(leaf, ids)
    outputs = weights, losses.load_balancing, losses.z
    (composed,) = torch.autograd.grad(outputs, leaf, tuple(each for each in grads if each is not None))
    gradient = emulate_backward(logits, ids, counts, grads, RoutingOptions())
    error, theirs = ((each.double() - right).norm() for each in (gradient, composed))
    assert error < 0.9 * theirs


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_they_compile_without_spills(architecture: str) -> None:
    """Spills and a stack frame raise."""
    built = [compile_kernel(routing_losses.losses_kernel(architecture))]
    assert LIMITS[architecture].bfloat16
    for configuration in configs.CONFIGURATIONS:
        for dtype in (FP32, BF16, FP16):
            for make in (routing_losses.forward_kernel, routing_losses.backward_kernel):
                built.append(compile_kernel(make(configuration, dtype, architecture)))
    assert all(each.resources is not None and each.resources.stack_bytes == 0 for each in built)
