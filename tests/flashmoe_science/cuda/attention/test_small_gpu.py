"""The small-shape kernel on a GPU: every configuration, and its early start beside other work in the stream."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from flashmoe_science.configs.attention import small as configs
from flashmoe_science.configs.attention.small import SmallConfiguration
from flashmoe_science.cuda.attention import KernelKind, Problem, explain, forward, small
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTHS = [
    *[(1, 1), (3, 3), (7, 16), (64, 32), (113, 203), (128, 128), (239, 1), (16, 512), (1, 500)],
    *[(255, 256), (2, 4099), (5, 0), (40, 7)],
]
MOST_ROWS_OF_SPLITS = 16
"""More take more counters than a launch may have."""
CASES = [(architecture, head_dim) for architecture in ("sm_80", "sm_90") for head_dim in configs.HEAD_DIMS]


def guarded(*shape: int, dtype: torch.dtype, rows_first: bool, fill: float = math.nan) -> torch.Tensor:
    """Uninitialised, with rows and columns of `fill` around it in memory."""
    batch, heads, rows, dim = shape
    if rows_first:
        whole = torch.full((batch, rows + 4, heads, dim + 8), fill, device="cuda", dtype=dtype)
        return whole[:, 2 : 2 + rows, :, :dim].transpose(1, 2)
    whole = torch.full((batch, heads, rows + 4, dim + 8), fill, device="cuda", dtype=dtype)
    return whole[:, :, 2 : 2 + rows, :dim]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """By its definition, in `dtype`: output and log-sum-exp."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda")
        scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2]), -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def check(
    sizes: tuple[int, int, int, int, int, int],
    configuration: SmallConfiguration,
    *,
    causal: bool,
    dtype: torch.dtype = torch.bfloat16,
    rows_first: bool = False,
    scale: float | None = None,
    magnitude: float = 1.0,
) -> None:
    """Error within twice that of PyTorch's operators in the same dtype, and a rounding; same bits twice."""
    batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim = sizes
    torch.manual_seed(sum(sizes))
    q = guarded(batch, heads, seqlen_q, head_dim, dtype=dtype, rows_first=rows_first)
    k, v = (guarded(batch, kv_heads, seqlen_k, head_dim, dtype=dtype, rows_first=rows_first) for _ in "kv")
    for tensor, size in ((q, magnitude), (k, 1.0), (v, 1.0)):
        tensor.copy_(torch.randn(tensor.shape, device="cuda") * size)
    choice = Choice(KernelKind.SMALL, configuration)
    results = [
        forward(q, k, v, causal=causal, softmax_scale=scale, return_lse=True, choice=choice) for _ in range(2)
    ]
    (out, lse), (again, lse_again) = results
    assert lse is not None
    assert lse_again is not None
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    used = head_dim**-0.5 if scale is None else scale
    exact, exact_lse = attention(q, k, v, causal, used, torch.float64)
    plain, _ = attention(q, k, v, causal, used, dtype)
    rounding = (exact.to(dtype).double() - exact).abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + 2 * rounding + 1e-5
    assert (out.double() - exact).abs().max().item() <= allowed
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-5)


def configurations(architecture: str, head_dim: int) -> Iterator[SmallConfiguration]:
    """Those of one compiled head dimension that this GPU can run."""
    capability = torch.cuda.get_device_capability()
    for configuration in configs.all_configurations(architecture):
        if configuration.head_dim == head_dim and (capability >= (9, 0) or not configuration.dependent):
            yield configuration


@pytest.mark.parametrize(("architecture", "head_dim"), CASES)
def test_every_configuration(architecture: str, head_dim: int) -> None:
    for number, configuration in enumerate(configurations(architecture, head_dim)):
        dim = head_dim - 24 if configuration.padded else head_dim
        for index, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
            if configuration.single_pass and seqlen_k > configuration.keys_per_pass:
                continue
            if configuration.splits > 1 and seqlen_q > MOST_ROWS_OF_SPLITS:
                continue
            check(
                (2, 4, 2 if index % 2 else 4, seqlen_q, seqlen_k, dim),
                configuration,
                causal=(number + index) % 2 == 0,
                dtype=torch.float16 if (number + index) % 4 < 2 else torch.bfloat16,
                rows_first=index % 3 == 0,
                magnitude=30.0 if index % 5 == 2 else 1.0,
            )


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    configuration = configs.stream(
        "sm_90" if torch.cuda.get_device_capability() >= (9, 0) else "sm_80", 64, 8, 1
    )
    for dtype, group in itertools.product((torch.float16, torch.bfloat16), (1, 3)):
        check((2, 2 * group, 2, seqlen_q, seqlen_k, 64), configuration, causal=causal, dtype=dtype)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dims_by_the_rule(head_dim: int) -> None:
    for seqlen_q, seqlen_k in ((20, 30), (3, 1000)):
        q = torch.randn(2, 4, seqlen_q, head_dim, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(2, 2, seqlen_k, head_dim, device="cuda", dtype=torch.bfloat16)
        choice = explain(q, k, k)
        assert choice.kernel is KernelKind.SMALL
        for causal in (False, True):
            check((2, 4, 2, seqlen_q, seqlen_k, head_dim), choice.configuration, causal=causal)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-6, 1.0])
def test_softmax_scales(scale: float) -> None:
    q = torch.randn(2, 3, 100, 64, device="cuda", dtype=torch.bfloat16)
    check((2, 3, 3, 100, 100, 64), explain(q, q, q).configuration, causal=True, scale=scale)


@pytest.mark.parametrize("seqlen_k", [21, 3000])
@pytest.mark.parametrize("head_dim", [64, 72, 200])
def test_nothing_is_written_around_the_output(head_dim: int, seqlen_k: int) -> None:
    q = torch.randn(2, 3, 21, head_dim, device="cuda", dtype=torch.float16)
    k = torch.randn(2, 3, seqlen_k, head_dim, device="cuda", dtype=torch.float16)
    out = guarded(2, 3, 21, head_dim, dtype=torch.float16, rows_first=False, fill=7.0)
    lse = torch.full((3, *q.shape[:3]), 7.0, device="cuda")
    strides = [(x.stride(0), x.stride(1), x.stride(2)) for x in (q, k, k, out)]
    problem = Problem(2, 3, 3, 21, seqlen_k, head_dim, torch.float16, False, 0.1, True, *strides)
    device = device_of(0)
    plan = small.plan(problem, small.configuration_for(problem, device), device)
    addresses = (x.data_ptr() for x in (q, k, k, out, lse[1]))
    plan.launch(*addresses, torch.cuda.current_stream().cuda_stream)
    assert out.isfinite().all()
    assert (out != 7.0).any()
    out.fill_(7.0)
    assert out._base is not None
    assert (out._base == 7.0).all()
    assert (lse[::2] == 7.0).all()


def test_a_nan_stays_in_its_row() -> None:
    q, k, v = (torch.randn(1, 1, 100, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    clean, _ = forward(q, k, v)
    q[0, 0, 17] = math.nan
    out, lse = forward(q, k, v, return_lse=True)
    others = torch.arange(100, device="cuda") != 17
    assert out[0, 0, 17].isnan().all()
    assert lse is not None
    assert lse[0, 0, 17].isnan()
    assert torch.equal(out[0, 0, others], clean[0, 0, others])


def assert_is_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    choice = explain(q, k, v)
    assert choice.kernel is KernelKind.SMALL
    out, lse = forward(q, k, v, return_lse=True)
    exact, exact_lse = attention(q, k, v, False, q.shape[3] ** -0.5, torch.float64)
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    assert lse is not None
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("seqlen_k", [37, 3000])
def test_an_infinity_in_the_last_dimension_of_a_key(seqlen_k: int) -> None:
    """The compiled head dimension is larger: what stands in for the dimensions past the end must be zero."""
    q = torch.randn(1, 2, 9, 80, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, seqlen_k, 80, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q[..., 79] = q[..., 79].abs() + 0.1
    k[:, :, 11, 79] = -math.inf
    assert_is_attention(q, k, v)


@pytest.mark.parametrize("seqlen_k", [17, 33, 3001])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_an_infinity_in_the_last_value(head_dim: int, seqlen_k: int) -> None:
    """The last tile is not whole: what stands in for the keys past the end must be zero."""
    q = torch.randn(1, 2, 9, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, seqlen_k, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v[:, :, -1] = math.inf
    assert_is_attention(q, k, v)


SHAPES = [(1, 1, 64, 64), (1, 1, 512, 512), (2, 4, 128, 128), (1, 8, 1, 3000)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_of_calls_sees_each_ones_result(shape: tuple[int, int, int, int]) -> None:
    """Each call reads what the one before wrote, and overwrites what the one before that read."""
    batch, heads, seqlen_q, seqlen_k = shape
    start = torch.randn(batch, heads, seqlen_q, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads, seqlen_k, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def chain(wait: bool) -> torch.Tensor:
        x = start
        for _ in range(100):
            x, _ = forward(x, k, v)
            if wait:
                torch.cuda.synchronize()
        return x

    expected = chain(wait=True)
    for _ in range(10):
        assert torch.equal(chain(wait=False), expected)


def test_work_of_others_before_and_after_is_ordered() -> None:
    """A long kernel writes the inputs right before, and another one overwrites them right after."""
    shape = (1, 2, 128, 64)
    big = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    source = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    expected, _ = forward(source, source, source)
    q = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for round_ in range(100):
        q.zero_()
        product = big @ big
        torch.add(source, product.flatten()[: source.numel()].view(shape), alpha=0, out=q)
        out, _ = forward(q, q, q)
        if round_ % 2:
            q.fill_(math.nan)
        else:
            forward(source, source, source)
        different += (out != expected).sum()
    assert different.item() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_graph_of_calls_between_copies_and_forks(shape: tuple[int, int, int, int]) -> None:
    batch, heads, seqlen_q, seqlen_k = shape
    query = torch.randn(batch, heads, seqlen_q, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads, seqlen_k, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.empty_like(query)

    def work() -> tuple[torch.Tensor, ...]:
        q.copy_(query)  # a copy node before
        a, _ = forward(q, k, v)
        b, _ = forward(a, k, v)
        q.zero_()  # a memset node or kernel after
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            c, _ = forward(b, k, v)
        d, _ = forward(a + b, k, v)
        main.wait_stream(side)
        e, _ = forward(c + d, k, v)  # after a join
        f, _ = forward(e, k, v)
        return a, b, c, d, e, f

    expected = [x.clone() for x in work()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for got, wanted in zip(captured, expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_call_right_after_a_join_and_right_before_a_fork_can_be_captured() -> None:
    q = torch.randn(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
    expected, _ = forward(q, q, q)
    twice, _ = forward(expected, expected, expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            a, _ = forward(q, q, q)
        b, _ = forward(q, q, q)
        main.wait_stream(side)
        c, _ = forward(a, b, a)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(a, expected)
    assert torch.equal(b, expected)
    assert torch.equal(c, twice)


@pytest.mark.parametrize("shape", [*SHAPES, (1, 8, 1, 20000)])
def test_a_thousand_times_the_same_bits(shape: tuple[int, int, int, int]) -> None:
    batch, heads, seqlen_q, seqlen_k = shape
    q = torch.randn(batch, heads, seqlen_q, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads, seqlen_k, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    first, _ = forward(q, k, v)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        different += (forward(q, k, v)[0] != first).sum()
    assert different.item() == 0
