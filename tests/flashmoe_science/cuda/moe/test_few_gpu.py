"""The way for few tokens on a GPU, against float64: every configuration, random and adversarial routing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from moe_products import random_ids
from moe_whole import Arguments, arguments, assert_right

from flashmoe_science.configs.moe.few import FewConfiguration, FewProduct, FewWay
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.moe import few
from flashmoe_science.cuda.moe.forward import forward
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem
from flashmoe_science.cuda.moe.select import select
from flashmoe_science.jit.limits import limits
from flashmoe_science.moe_arguments import Activation, W13Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

P = FewProduct
SPLIT, TILES, COMBINED = FewWay
PROBLEM = MoeProblem(
    tokens=16,
    hidden=528,
    intermediate=208,
    experts=20,
    top_k=4,
    dtype=torch.bfloat16,
    activation=Activation.SILU,
    w13_layout=W13Layout.CONCAT,
    ids64=False,
)
CONFIGURATIONS = [
    FewConfiguration(P(SPLIT, 2, 1, 1, 4), P(COMBINED, 1, 1, 2, 4), 32, direct=True),
    FewConfiguration(P(SPLIT, 1, 1, 2, 4), P(COMBINED, 1, 1, 1, 8, parts=4), 32, direct=True),
    FewConfiguration(P(SPLIT, 2, 1, 1, 4), P(COMBINED, 1, 1, 2, 4), 128),
    FewConfiguration(P(SPLIT, 4, 1, 1, 2), P(COMBINED, 1, 1, 2, 3), 256),
    FewConfiguration(P(SPLIT, 2, 2, 1, 3), P(COMBINED, 1, 2, 2, 3, parts=2), 256),
    FewConfiguration(P(SPLIT, 8, 4, 1, 2), P(SPLIT, 4, 4, 1, 3), 4096),
    FewConfiguration(P(TILES, 2, 1, 2, 5), P(TILES, 2, 1, 2, 5), 4096),
    FewConfiguration(P(TILES, 2, 4, 2, 5), P(TILES, 2, 4, 2, 5), 4096),
    FewConfiguration(P(TILES, 2, 8, 2, 4), P(TILES, 2, 8, 2, 4), 4096),
]


def run(problem: MoeProblem, configuration: FewConfiguration, given: Arguments) -> torch.Tensor:
    """The output of a call that was right, into a workspace full of NaN."""
    device = device_of(0)
    most = limits(device.architecture).shared_per_block
    if max(configuration.shared_bytes(x) for x in (configuration.up, configuration.down)) > most:
        pytest.skip(f"{configuration.label} does not fit {device.architecture}")
    make_context_current(0)
    plan = few.plan(problem, configuration, device)
    workspace = torch.full((plan.workspace_bytes + 256,), 0xFF, dtype=torch.uint8, device="cuda")
    given.output.fill_(torch.nan)
    plan.launch(
        *given.addresses(),
        workspace.data_ptr(),
        torch.cuda.current_stream().cuda_stream,
    )
    assert_right(problem, given)
    assert (workspace[plan.workspace_bytes :] == 0xFF).all()
    return given.output


def fits(problem: MoeProblem, configuration: FewConfiguration) -> bool:
    return problem.slots <= configuration.max_slots


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.label)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_configuration(configuration: FewConfiguration, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for tokens in (1, 2, 3, 7, 16, 29, 64, 200, 512):
        problem = dataclasses.replace(PROBLEM, tokens=tokens, dtype=dtype)
        if fits(problem, configuration):
            run(problem, configuration, arguments(problem, random_ids(tokens, 4, 20, invalid=0.1).cuda()))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("layout", W13Layout)
def test_activations_layouts_and_id_types(activation: Activation, layout: W13Layout) -> None:
    torch.manual_seed(2)
    problem = dataclasses.replace(PROBLEM, activation=activation, w13_layout=layout, ids64=True)
    for configuration in (CONFIGURATIONS[2], CONFIGURATIONS[7]):
        run(problem, configuration, arguments(problem, random_ids(16, 4, 20).cuda()))


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.label)
@pytest.mark.parametrize(("w13_biased", "w2_biased"), [(True, True), (True, False), (False, True)])
def test_biases(configuration: FewConfiguration, w13_biased: bool, w2_biased: bool) -> None:
    """GPT-OSS's activation and layout, and one without a gate."""
    torch.manual_seed(9)
    for activation, layout in (
        (Activation.SWIGLU_OAI, W13Layout.INTERLEAVED),
        (Activation.SWIGLU_OAI, W13Layout.CONCAT),
        (Activation.RELU2_NO_MUL, W13Layout.CONCAT),
    ):
        for tokens in (1, 2, 7, 16, 64):
            problem = dataclasses.replace(
                PROBLEM,
                tokens=tokens,
                activation=activation,
                w13_layout=layout,
                w13_biased=w13_biased,
                w2_biased=w2_biased,
            )
            if fits(problem, configuration):
                ids = random_ids(tokens, 4, 20, invalid=0.1).cuda()
                run(problem, configuration, arguments(problem, ids))


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.label)
@pytest.mark.parametrize(
    "pattern", ["one expert", "two experts", "nothing valid", "far outside", "twice", "skewed"]
)
def test_routings(configuration: FewConfiguration, pattern: str) -> None:
    torch.manual_seed(3)
    for tokens in (1, 8, 30, 120):
        ids = {
            "one expert": lambda n: torch.full((n, 1), 13),
            "two experts": lambda n: torch.tensor([[0, 19]]).repeat(n, 1),
            "nothing valid": lambda n: torch.full((n, 2), 20),
            "far outside": lambda n: torch.tensor([[-(2**31), 5, 2**31 - 1]]).repeat(n, 1),
            "twice": lambda n: torch.tensor([[7, 7, 7, 2]]).repeat(n, 1),
            "skewed": lambda n: (20 * torch.rand(n, 3) ** 8).long(),
        }[pattern](tokens)
        problem = dataclasses.replace(PROBLEM, tokens=tokens, top_k=ids.shape[1])
        if fits(problem, configuration):
            run(problem, configuration, arguments(problem, ids.cuda()))


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 8, 13, 16])
def test_choices_per_token(top_k: int) -> None:
    torch.manual_seed(4)
    for tokens in (1, 2, 15):
        problem = dataclasses.replace(PROBLEM, tokens=tokens, top_k=top_k)
        for configuration in CONFIGURATIONS:
            if fits(problem, configuration):
                run(problem, configuration, arguments(problem, random_ids(tokens, top_k, 20).cuda()))


@pytest.mark.parametrize(("hidden", "intermediate"), [(16, 16), (32, 48), (2048, 768), (1040, 2064)])
def test_sizes(hidden: int, intermediate: int) -> None:
    torch.manual_seed(5)
    problem = dataclasses.replace(PROBLEM, tokens=8, hidden=hidden, intermediate=intermediate)
    for configuration in CONFIGURATIONS:
        if fits(problem, configuration):
            run(problem, configuration, arguments(problem, random_ids(8, 4, 20).cuda()))


def test_as_many_experts_as_it_takes() -> None:
    torch.manual_seed(6)
    problem = dataclasses.replace(PROBLEM, tokens=60, top_k=3, experts=512, hidden=64, intermediate=32)
    for configuration in CONFIGURATIONS[3:]:
        run(problem, configuration, arguments(problem, random_ids(60, 3, 512).cuda()))


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.label)
def test_the_same_bits_every_time_also_in_a_row_without_pause(configuration: FewConfiguration) -> None:
    """Consecutive calls overlap; a call that started too early would meet what the one before left."""
    torch.manual_seed(7)
    problem = dataclasses.replace(PROBLEM, tokens=8, hidden=2048, intermediate=768)
    calls = [arguments(problem, random_ids(8, 4, 20).cuda()) for _ in range(3)]
    first = [run(problem, configuration, given).clone() for given in calls]
    plan = few.plan(problem, configuration, device_of(0))
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    for _ in range(20):
        for given in calls:
            given.output.fill_(torch.nan)
            plan.launch(
                *given.addresses(),
                workspace.data_ptr(),
                torch.cuda.current_stream().cuda_stream,
            )
        for given, expected in zip(calls, first, strict=True):
            assert torch.equal(given.output.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 33])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (8, 2), (64, 1), (60, 13)])
def test_what_is_chosen_for_a_shape(tokens: int, experts: int, top_k: int) -> None:
    """Through the cached call, and replayed from a graph with other ids."""
    torch.manual_seed(8)
    problem = dataclasses.replace(
        PROBLEM, tokens=tokens, experts=experts, top_k=top_k, hidden=256, intermediate=144
    )
    assert select(problem, device_of(0)).kernel is MoeKind.FEW
    given = arguments(problem, random_ids(tokens, top_k, experts, invalid=0.1).cuda())
    out = given.output[:tokens]

    def call() -> None:
        forward(given.hidden_states, given.w13, given.w2, given.topk_weights, given.topk_ids, out=out)

    call()
    assert_right(problem, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        given.topk_ids.copy_(random_ids(tokens, top_k, experts, invalid=0.1))
        given.output.fill_(torch.nan)
        graph.replay()
        assert_right(problem, given)
