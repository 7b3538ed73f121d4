"""The way for few tokens without a GPU: what is chosen and passed, and the kernels' sources run on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from typing import Any

import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER, compile_emulation
from hypothesis import given
from hypothesis import strategies as st
from moe_products import random_ids
from moe_whole import Arguments, arguments, assert_right

from flashmoe_science.configs.moe import few as configs
from flashmoe_science.configs.moe.few import FewConfiguration, FewProduct, FewWay
from flashmoe_science.cuda.launch import ADDRESSES
from flashmoe_science.cuda.moe import few
from flashmoe_science.cuda.moe.few import Product
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem
from flashmoe_science.cuda.moe.select import select
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import LIMITS, check_block
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY, CudaKernel, compile_kernel
from flashmoe_science.moe_arguments import Activation, W13Layout
from problems import H200

BF16, FP16 = torch.bfloat16, torch.float16
PROBLEM = MoeProblem(
    tokens=16,
    hidden=2048,
    intermediate=768,
    experts=128,
    top_k=8,
    dtype=BF16,
    activation=Activation.SILU,
    w13_layout=W13Layout.CONCAT,
    ids64=False,
)
ARCHITECTURES = st.sampled_from(configs.tuned_architectures())
A, L, P = Activation, W13Layout, FewProduct
SPLIT, TILES, COMBINED = FewWay


def launch(
    kernel: CudaKernel,
    parameters: str,
    buffer: Any,
    addresses: list[int],
    grid: int,
    late: bool,
) -> None:
    library = compile_emulation(kernel, parameters, copies_late=late)
    (ctypes.c_uint64 * 5).from_buffer(buffer)[:] = addresses
    library.run(buffer, grid)


def emulate(
    problem: MoeProblem,
    configuration: FewConfiguration,
    arranged: Arguments,
    *,
    blocks: int = 2,
    late: bool = True,
) -> None:
    few.check(problem, configuration)
    device = dataclasses.replace(H200, multiprocessors=blocks)
    middle = torch.full((problem.slots, problem.intermediate), torch.nan, dtype=problem.dtype)
    rows = torch.full((problem.slots, problem.hidden), torch.nan, dtype=problem.dtype)
    x, w13, w2, weights, ids, out = dataclasses.replace(arranged, w13_bias=None, w2_bias=None).addresses()
    results = rows.data_ptr() if not configuration.combined else out
    for product, addresses, bias in (
        (Product.UP, [x, w13, weights, ids, middle.data_ptr()], arranged.w13_bias),
        (Product.DOWN, [middle.data_ptr(), w2, weights, ids, results], arranged.w2_bias),
    ):
        kernel = few.kernel(
            *(configuration, product, problem.activation, problem.dtype, "sm_90"), biased=bias is not None
        )
        buffer = ctypes.create_string_buffer(
            few.ARGUMENT_BYTES if bias is None else few.BIASED_ARGUMENT_BYTES
        )
        few.write_arguments(buffer, problem, configuration, product)
        if bias is not None:
            few._ADDRESS.pack_into(buffer, few.ARGUMENT_BYTES, bias.data_ptr())
        grid = few.blocks(problem, configuration, product, device)
        launch(kernel, "Parameters", buffer, addresses, grid, late)
    if not configuration.combined:
        chosen = (arranged.topk_ids >= 0) & (arranged.topk_ids < problem.experts)
        by_token = rows.view(problem.tokens, problem.top_k, problem.hidden).double()
        by_token = by_token.where(chosen[:, :, None], 0.0) * arranged.topk_weights.double()[:, :, None]
        arranged.output[: problem.tokens] = by_token.sum(1)


FUSED = FewConfiguration(P(SPLIT, 2, 1, 1, 3, 2), P(COMBINED, 1, 1, 2, 3, 2), 64)
WIDE = FewConfiguration(P(SPLIT, 3, 2, 2, 2, 3), P(COMBINED, 2, 2, 1, 2, 4, parts=2), 64)
DIRECT = FewConfiguration(P(SPLIT, 1, 1, 1, 4, 4), P(COMBINED, 1, 1, 1, 4, 4, parts=4), 32, direct=True)
OWN_TILES = FewConfiguration(P(TILES, 2, 2, 2, 3, 2), P(TILES, 1, 4, 1, 2, 2), 256)
BY_SLOTS = FewConfiguration(P(TILES, 1, 3, 1, 4, 4), P(SPLIT, 4, 2, 1, 2, 3), 128)


@given(
    architecture=ARCHITECTURES,
    tokens=st.integers(1, 5000),
    top_k=st.integers(1, 40),
    experts=st.integers(1, 600),
    sizes=st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
    dtype=st.sampled_from([BF16, FP16]),
)
def test_what_is_chosen_can_do_it(
    architecture: str, tokens: int, top_k: int, experts: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    problem = MoeProblem(
        tokens, 16 * sizes[0], 16 * sizes[1], experts, top_k, dtype, A.SILU, L.CONCAT, ids64=False
    )
    choice = few.choose(problem, dataclasses.replace(H200, architecture=architecture))
    if choice is None:
        assert tokens > 1 or top_k > 32 or experts > configs.MAX_EXPERTS or problem.rows_per_expert > 4
        return
    few.check(problem, choice.configuration)
    assert choice.configuration in configs.all_configurations(architecture)
    assert not choice.configuration.direct or tokens == 1 or problem.slots**2 <= 2 * experts


@pytest.mark.parametrize("architecture", configs.tuned_architectures())
def test_blocks_fit_and_their_rings_have_room_for_the_sort(architecture: str) -> None:
    for configuration in configs.all_configurations(architecture):
        for tile in (configuration.up, configuration.down):
            check_block(tile.label, architecture, tile.threads, configuration.shared_bytes(tile))
            assert tile.warps % tile.parts == 0
    if architecture == "sm_90":
        # Two blocks of one kernel on a multiprocessor leave another one without work.
        each = [c.shared_bytes(t) for c in configs.all_configurations(architecture) for t in (c.up, c.down)]
        assert 2 * (min(each) + 1024) > LIMITS[architecture].shared_per_sm


def test_an_architecture_without_asynchronous_copies_has_no_kernels() -> None:
    assert set(configs.tuned_architectures()) == {name for name, limit in LIMITS.items() if limit.cp_async}
    assert few.kernels("sm_75") == []
    assert few.choose(PROBLEM, dataclasses.replace(H200, architecture="sm_75")) is None


@pytest.mark.parametrize(
    ("tokens", "way", "direct"),
    [
        (1, COMBINED, True),
        (2, COMBINED, True),
        (4, COMBINED, False),
        (16, COMBINED, False),
        (64, COMBINED, False),
        (128, TILES, False),
    ],
)
def test_ways_by_tokens(tokens: int, way: FewWay, direct: bool) -> None:
    choice = few.choose(dataclasses.replace(PROBLEM, tokens=tokens), H200)
    assert choice is not None
    assert (choice.configuration.down.way, choice.configuration.direct) == (way, direct)


@pytest.mark.parametrize(("top_k", "parts"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1), (13, 1)])
def test_few_experts_are_shared_by_warps(top_k: int, parts: int) -> None:
    choice = few.choose(dataclasses.replace(PROBLEM, tokens=1, top_k=top_k), H200)
    assert choice is not None
    assert choice.configuration.down.parts == parts


def test_many_tokens_are_left_to_others() -> None:
    assert few.choose(dataclasses.replace(PROBLEM, tokens=256), H200) is None
    assert few.choose(dataclasses.replace(PROBLEM, experts=513), H200) is None


def test_a_choice_for_another_problem_is_refused() -> None:
    one = few.choose(dataclasses.replace(PROBLEM, tokens=1), H200)
    assert one is not None
    with pytest.raises(InputError, match="k is 128 with 128 experts; expected at most 32"):
        few.check(PROBLEM, one.configuration)
    with pytest.raises(InputError, match="need sorted slots"):
        few.check(PROBLEM, dataclasses.replace(OWN_TILES, direct=True))
    with pytest.raises(InputError, match="first product cannot combine"):
        few.check(PROBLEM, dataclasses.replace(FUSED, up=FUSED.down))
    with pytest.raises(InputError, match="takes a FewConfiguration"):
        few.check(PROBLEM, "fast")


def declared(header: str) -> list[str]:
    """Names of the fields of a header's `Parameters`, in order."""
    text = re.sub(r"//[^\n]*", "", (KERNEL_DIRECTORY / header).read_text())
    body = text[text.index("struct Parameters {") :]
    return re.findall(r"(\w+)\s*;", body[body.index("{") + 1 : body.index("};")])


def passed(problem: MoeProblem, product: Product) -> dict[str, int]:
    buffer = ctypes.create_string_buffer(few.ARGUMENT_BYTES)
    few.write_arguments(buffer, problem, FUSED, product)
    names = declared("moe/few_parameters.cuh")
    assert names[:5] == ["input", "weights", "topk_weights", "topk_ids", "output"]
    assert names[-4:] == ["bias", "bias_rows", "bias_column", "bias_part"]
    return dict(zip(names[5:-4], few._REST.unpack_from(buffer, ADDRESSES.size), strict=True))


def test_a_launch_passes_the_fields_of_the_headers_struct_in_order() -> None:
    up = passed(PROBLEM, Product.UP)
    assert (up["inner"], up["outer"], up["slots"], up["tokens"], up["top_k"]) == (2048, 768, 128, 16, 8)
    assert (up["expert_bytes"], up["row_bytes"]) == (2 * 768 * 4096, 4096)
    assert (up["tile_bytes"], up["lane_bytes"], up["high_bytes"]) == (8 * 4096, 4096, 768 * 4096)
    assert (up["tiles"], up["slabs"], up["slots_per_input_row"], up["ids64"]) == (96, 48, 8, 0)
    interleaved = passed(dataclasses.replace(PROBLEM, w13_layout=L.INTERLEAVED, ids64=True), Product.UP)
    assert [interleaved[n] for n in ("tile_bytes", "lane_bytes", "high_bytes")] == [16 * 4096, 8192, 4096]
    assert interleaved["ids64"] == 1
    ungated = passed(dataclasses.replace(PROBLEM, activation=A.GELU_NO_MUL), Product.UP)
    assert [ungated[n] for n in ("tile_bytes", "lane_bytes", "high_bytes")] == [16 * 4096, 4096, 8 * 4096]
    assert ungated["tiles"] == 48
    down = passed(PROBLEM, Product.DOWN)
    assert (down["inner"], down["outer"], down["tiles"], down["slabs"]) == (768, 2048, 128, 128)
    assert down["slots_per_input_row"] == 1


def test_where_a_bias_lies() -> None:
    def of(product: Product, **changes: Any) -> tuple[int, ...]:
        problem = dataclasses.replace(PROBLEM, w13_biased=True, w2_biased=True, **changes)
        buffer = ctypes.create_string_buffer(few.BIASED_ARGUMENT_BYTES)
        few.write_arguments(buffer, problem, FUSED, product)
        return few._BIAS.unpack_from(buffer, few.ARGUMENT_BYTES)

    assert of(Product.UP) == (0, 1536, 1, 768)
    assert of(Product.UP, w13_layout=L.INTERLEAVED) == (0, 1536, 2, 1)
    assert of(Product.UP, activation=A.RELU2_NO_MUL) == (0, 768, 1, 0)
    assert of(Product.DOWN) == (0, 2048, 1, 0)


@pytest.mark.parametrize("tokens", [1, 2, 8, 16])
def test_few_tokens_with_biases_take_it(tokens: int) -> None:
    """GPT-OSS's decode steps."""
    problem = MoeProblem(
        *(tokens, 2880, 2880, 32, 4, BF16, A.SWIGLU_OAI, L.INTERLEAVED),
        ids64=False,
        w13_biased=True,
        w2_biased=True,
    )
    choice = select(problem, H200)
    assert choice.kernel is MoeKind.FEW


@pytest.mark.usefixtures("nvrtc")
def test_without_biases_the_kernels_are_compiled_as_before() -> None:
    """The macro is left out, and so is what stands behind it: machine code that was measured stays."""
    for product in Product:
        plain = few.kernel(FUSED, product, A.SILU, BF16, "sm_90")
        assert "BIASED" not in plain.macros
        zero = dataclasses.replace(plain, macros={**plain.macros, "BIASED": 0})
        assert compile_kernel(zero).artifact.read_bytes() == compile_kernel(plain).artifact.read_bytes()


@each_architecture(["sm_80", "sm_86", "sm_90"])
@pytest.mark.usefixtures("nvrtc")
def test_the_largest_kernels_compile_without_spills(architecture: str) -> None:
    largest = configs.all_configurations(architecture)[-1]
    for product in Product:
        for biased, activation in ((False, A.GELU), (True, A.SWIGLU_OAI)):
            kernel = few.kernel(largest, product, activation, BF16, architecture, biased=biased)
            build = compile_kernel(kernel)
            assert build.resources is not None
            assert build.resources.blocks_per_sm >= 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90"])
@pytest.mark.usefixtures("nvrtc")
def test_all_kernels_compile_without_spills(architecture: str) -> None:
    for kernel in few.kernels(architecture):
        compile_kernel(kernel)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    (
        "configuration",
        "tokens",
        "hidden",
        "intermediate",
        "experts",
        "k",
        "dtype",
        "activation",
        "layout",
        "ids64",
        "late",
    ),
    [
        (FUSED, 13, 144, 80, 5, 2, BF16, A.SILU, L.CONCAT, False, True),
        (FUSED, 3, 16, 16, 70, 5, FP16, A.RELU2_NO_MUL, L.CONCAT, True, False),
        (WIDE, 30, 80, 112, 3, 2, BF16, A.GELU_TANH, L.INTERLEAVED, False, False),
        (DIRECT, 1, 176, 80, 16, 8, BF16, A.SILU, L.INTERLEAVED, False, True),
        (DIRECT, 3, 48, 112, 4, 3, FP16, A.GELU, L.CONCAT, True, False),
        (OWN_TILES, 40, 144, 80, 5, 2, BF16, A.SILU, L.CONCAT, True, True),
        (OWN_TILES, 21, 48, 32, 2, 2, FP16, A.SILU, L.CONCAT, False, False),
        (BY_SLOTS, 40, 80, 48, 3, 3, FP16, A.SILU_NO_MUL, L.CONCAT, False, True),
    ],
)
def test_emulated(
    configuration: FewConfiguration,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    activation: Activation,
    layout: W13Layout,
    ids64: bool,
    late: bool,
) -> None:
    torch.manual_seed(0)
    problem = MoeProblem(tokens, hidden, intermediate, experts, k, dtype, activation, layout, ids64)
    arranged = arguments(problem, random_ids(tokens, k, experts, invalid=0.2))
    emulate(problem, configuration, arranged, late=late)
    assert_right(problem, arranged)


@NEEDS_COMPILER
@pytest.mark.parametrize(("configuration", "tokens"), [(FUSED, 6), (DIRECT, 3), (OWN_TILES, 12)])
def test_fewer_experts_than_choices_emulated(configuration: FewConfiguration, tokens: int) -> None:
    """A rank has two of a layer's experts; most choices are of others."""
    torch.manual_seed(0)
    problem = MoeProblem(tokens, 48, 32, 2, 8, BF16, A.SILU, L.CONCAT, ids64=False)
    ids = random_ids(tokens, 8, 16) - 6
    assert ((ids >= 0) & (ids < 2)).any()
    arranged = arguments(problem, ids)
    emulate(problem, configuration, arranged)
    assert_right(problem, arranged)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("configuration", "tokens", "experts", "k", "dtype", "activation", "layout", "biased"),
    [
        (FUSED, 13, 5, 2, BF16, A.SWIGLU_OAI, L.INTERLEAVED, (True, True)),
        (WIDE, 30, 3, 2, FP16, A.SWIGLU_OAI, L.CONCAT, (True, True)),
        (DIRECT, 1, 16, 8, BF16, A.SWIGLU_OAI, L.INTERLEAVED, (True, True)),
        (DIRECT, 3, 4, 3, BF16, A.RELU2_NO_MUL, L.CONCAT, (True, False)),
        (OWN_TILES, 40, 5, 2, BF16, A.SWIGLU_OAI, L.INTERLEAVED, (True, True)),
        (OWN_TILES, 21, 2, 2, FP16, A.SILU_NO_MUL, L.CONCAT, (True, True)),
        (BY_SLOTS, 40, 3, 3, FP16, A.SILU, L.CONCAT, (False, True)),
    ],
)
def test_biases_emulated(
    configuration: FewConfiguration,
    tokens: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    activation: Activation,
    layout: W13Layout,
    biased: tuple[bool, bool],
) -> None:
    """In every way of both products; some experts are no experts, and the last tiles have fewer columns."""
    torch.manual_seed(0)
    problem = MoeProblem(
        *(tokens, 144, 80, experts, k, dtype, activation, layout),
        ids64=False,
        w13_biased=biased[0],
        w2_biased=biased[1],
    )
    arranged = arguments(problem, random_ids(tokens, k, experts, invalid=0.2))
    emulate(problem, configuration, arranged)
    assert_right(problem, arranged)
