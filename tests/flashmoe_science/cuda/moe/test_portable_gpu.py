"""The portable products on a GPU, against float64: every tile of the table, random and adversarial routing."""

from __future__ import annotations

import dataclasses

import gpu_moe
import pytest
import torch
from moe_products import Routing, assert_right, operands, random_ids, routing

from flashmoe_science.configs.moe import portable as configs
from flashmoe_science.configs.moe.portable import ProductTile
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.moe import MoeKind
from flashmoe_science.cuda.moe.portable import Product, ProductLaunch
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.jit.limits import limits
from flashmoe_science.moe_arguments import Activation, W13Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROBLEM = MoeProblem(
    tokens=700,
    hidden=272,
    intermediate=208,
    experts=20,
    top_k=4,
    dtype=torch.bfloat16,
    activation=Activation.SILU,
    w13_layout=W13Layout.CONCAT,
    ids64=False,
)


def tiles() -> list[ProductTile]:
    """Of all architectures; those of others run where they fit."""
    all_tiles = (
        tile
        for architecture in configs.tuned_architectures()
        for configuration in configs.all_configurations(architecture)
        for tile in (configuration.up, configuration.down)
    )
    return list(dict.fromkeys(all_tiles))


def run(problem: MoeProblem, product: Product, tile: ProductTile, routed: Routing) -> torch.Tensor:
    """The output of a launch that was right."""
    device = device_of(0)
    if tile.shared_bytes(gather=True) > limits(device.architecture).shared_per_block:
        pytest.skip(f"{tile.label} does not fit {device.architecture}")
    make_context_current(0)
    given = operands(problem, product, routed)
    launcher = ProductLaunch(problem, product, tile, device)
    launcher.launch(*given.addresses(routed), torch.cuda.current_stream().cuda_stream)
    assert_right(problem, product, routed, given)
    return given.output


def cuda_routing(ids: torch.Tensor, experts: int) -> Routing:
    return routing(ids.cuda(), experts)


@pytest.mark.parametrize("tile", tiles(), ids=lambda tile: tile.label)
@pytest.mark.parametrize("product", Product)
def test_every_tile(product: Product, tile: ProductTile) -> None:
    torch.manual_seed(1)
    routed = cuda_routing(random_ids(700, 4, 20, invalid=0.1), 20)
    run(PROBLEM, product, tile, routed)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("layout", W13Layout)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_and_layouts(activation: Activation, layout: W13Layout, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    problem = dataclasses.replace(PROBLEM, activation=activation, w13_layout=layout, dtype=dtype)
    routed = cuda_routing(random_ids(700, 4, 20), 20)
    run(problem, Product.UP, configs.configuration(device_of(0).architecture, 140).up, routed)


@pytest.mark.parametrize("product", Product)
@pytest.mark.parametrize(
    "pattern", ["one expert", "two experts", "nothing valid", "one token", "ends of tiles", "skewed"]
)
def test_routings(product: Product, pattern: str) -> None:
    torch.manual_seed(3)
    ids = {
        "one expert": lambda: torch.full((700, 1), 13),
        "two experts": lambda: torch.tensor([[0, 19]]).expand(700, 2),
        "nothing valid": lambda: torch.full((700, 2), 1 << 30),
        "one token": lambda: torch.tensor([[7, 0, 3]]),
        "ends of tiles": lambda: torch.arange(20).repeat_interleave(torch.arange(20) * 16 + 63)[:, None],
        "skewed": lambda: (20 * torch.rand(5000, 3) ** 8).long(),
    }[pattern]()
    tokens, top_k = ids.shape
    problem = dataclasses.replace(PROBLEM, tokens=tokens, top_k=top_k)
    routed = cuda_routing(ids.int(), 20)
    for configuration in configs.all_configurations(device_of(0).architecture):
        run(problem, product, configuration.up, routed)


@pytest.mark.parametrize(("hidden", "intermediate"), [(16, 16), (32, 48), (4096, 1536), (1040, 2064)])
@pytest.mark.parametrize("product", Product)
def test_sizes(product: Product, hidden: int, intermediate: int) -> None:
    torch.manual_seed(4)
    problem = dataclasses.replace(PROBLEM, hidden=hidden, intermediate=intermediate)
    routed = cuda_routing(random_ids(700, 4, 20), 20)
    for configuration in configs.all_configurations(device_of(0).architecture):
        run(problem, product, configuration.up, routed)


def test_many_experts() -> None:
    """More than the search for work reads at a time, most of them without rows."""
    torch.manual_seed(5)
    problem = dataclasses.replace(PROBLEM, tokens=90, top_k=2, experts=2000, hidden=64, intermediate=32)
    routed = cuda_routing(random_ids(90, 2, 2000), 2000)
    for product in Product:
        run(problem, product, configs.configuration(device_of(0).architecture, 0).up, routed)


def test_the_same_bits_every_time() -> None:
    torch.manual_seed(6)
    routed = cuda_routing(random_ids(700, 4, 20), 20)
    tile = configs.configuration(device_of(0).architecture, 140).up
    given = operands(PROBLEM, Product.UP, routed)
    make_context_current(0)
    launcher = ProductLaunch(PROBLEM, Product.UP, tile, device_of(0))
    results = []
    for _ in range(5):
        given.output.fill_(torch.nan)
        launcher.launch(*given.addresses(routed), torch.cuda.current_stream().cuda_stream)
        results.append(given.output.clone())
    for result in results[1:]:
        assert torch.equal(result.view(torch.int16), results[0].view(torch.int16))


def choices() -> list[Choice]:
    configurations = configs.all_configurations(device_of(0).architecture)
    return [Choice(MoeKind.PORTABLE, configuration) for configuration in configurations]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k"),
    [
        (1, 16, 16, 1, 1),
        (33, 272, 528, 3, 2),
        (257, 128, 1024, 600, 3),
        (2000, 512, 256, 16, 2),
    ],
)
def test_layers(
    tokens: int, hidden: int, intermediate: int, experts: int, top_k: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(8)
    gpu_moe.assert_right(gpu_moe.layer(tokens, hidden, intermediate, experts, top_k, dtype=dtype), choices())


def test_a_layer_with_ids_out_of_range() -> None:
    torch.manual_seed(9)
    ids = torch.randint(-3, 12, (700, 2))
    ids[0, 0] = 1 << 40
    gpu_moe.assert_right(gpu_moe.layer(700, 272, 208, 9, 2, ids=ids), choices())
