"""Faults that other implementations of attention's gradients have had, each as a test, on the CPU and on a GPU.

There by every kernel that takes the call. What Hopper's own do with NaN and padding is seen on the CPU, too.
`docs/kernels/backward-faults.md` lists all of them with their tests, those in other files too.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from attention_backward import assert_gradients, backward_case
from backward_kernels import CPU, EMULATED, ON_CPU, ON_GPU, Kernel, takes, use
from torch.nn import functional

from flashmoe_science import DeviceError, InputError, flash_attention

each_kernel = pytest.mark.parametrize("kernel", [ON_CPU, *ON_GPU], indirect=True)
on_gpus = pytest.mark.parametrize("kernel", ON_GPU, indirect=True)


def with_emulated(few: tuple[int, int], more: tuple[int, int]) -> pytest.MarkDecorator:
    """Each kernel with few rows and keys and with more; emulations with more are slow."""
    cases = [
        pytest.param(*each.values, *lengths, id=f"{each.id}, {lengths}", marks=(*each.marks, *marks))
        for lengths, slow in ((few, ()), (more, (pytest.mark.slow,)))
        for kernels, marks in (([ON_CPU, *ON_GPU], ()), (EMULATED, slow))
        for each in kernels
    ]
    return pytest.mark.parametrize(("kernel", "rows", "keys"), cases, indirect=["kernel"])


Tensors = tuple[torch.Tensor, ...]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    tensor = torch.zeros(1, 1, 1, 8)
    try:
        flash_attention(tensor, tensor, tensor)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """It computes all gradients of the test."""
    used: Kernel = request.param
    use(used, monkeypatch)
    return used


def leaves(kernel: Kernel, rows: int = 70, keys: int = 90, *, heads: int = 4, kv_heads: int = 2) -> Tensors:
    """Query, key and value: float32 on the CPU, bfloat16 on a GPU."""
    device, head_dim, dtype = kernel.device, kernel.head_dim, kernel.dtype
    generator = torch.Generator().manual_seed(rows + keys + head_dim)
    shapes = ((2, heads, rows, head_dim), *(((2, kv_heads, keys, head_dim),) * 2))
    return tuple(
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes
    )


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = True) -> torch.Tensor:
    output = flash_attention(query, key, value, causal=causal)
    assert isinstance(output, torch.Tensor)
    return output


def incoming(output: torch.Tensor) -> torch.Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)


def gradients(tensors: Tensors, causal: bool = True) -> Tensors:
    output = attend(*tensors, causal=causal)
    return torch.autograd.grad(output, tensors, incoming(output))


def exact(tensors: Tensors) -> Tensors:
    """Of causal attention, in float64 on the CPU."""
    query, key, value = (each.detach().double().cpu().requires_grad_() for each in tensors)
    rows, keys = query.shape[2], key.shape[2]
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    given = incoming(output.to(tensors[0].dtype))  # what the kernel gets: rounded
    return torch.autograd.grad(output, (query, key, value), given.double())


def assert_near(results: Tensors, right: Tensors) -> None:
    for one, other in zip(results, right, strict=True):
        error = (one.detach().double().cpu() - other).norm() / other.norm()
        assert error <= (1e-5 if one.dtype is torch.float32 else 2**-6)


def assert_same(results: Tensors, expected: Tensors) -> None:
    """The same bits on the CPU. On a GPU other strides or needs may mean another kernel, and another order of sums."""
    for one, other in zip(results, expected, strict=True):
        if one.device.type == CPU:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6 * float(other.abs().max()))


@pytest.mark.parametrize("kernel", EMULATED)
def test_each_kernel_takes_calls_as_they_are_here(kernel: Kernel) -> None:
    """Otherwise the others skip it, and nobody sees."""
    query, key, _ = (each.detach() for each in leaves(kernel, 70, 90))
    assert takes(kernel, query, key)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@with_emulated((65, 71), (165, 200))
def test_what_lies_behind_the_last_row_is_never_read(
    rows: int, keys: int, causal: bool, kernel: Kernel
) -> None:
    """Padding tiles: the rows past the end of each tensor hold NaN."""
    tensors = leaves(kernel, rows, keys)

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, head_dim = tensor.shape
        larger = torch.full((batch, heads, rows + 128, head_dim), math.nan).to(tensor)
        larger[:, :, :rows] = tensor.detach()
        return larger[:, :, :rows]

    within = tuple(inside(each).requires_grad_() for each in tensors)
    output = attend(*within, causal=causal)
    results = torch.autograd.grad(output, within, inside(incoming(output)))
    assert_same(results, gradients(tensors, causal))


@each_kernel
@pytest.mark.parametrize(("rows", "keys"), [(70, 90), (300, 290), (3, 500), (500, 3)])
def test_memory_that_held_nan_before_changes_nothing(kernel: Kernel, rows: int, keys: int) -> None:
    """A workspace or a gradient that is read before it is written would show it."""
    tensors = leaves(kernel, rows, keys)
    expected = gradients(tensors)
    sizes = [4 * tensors[0].numel() >> shift for shift in range(6)]
    for _ in range(3):
        spoilt = [torch.full((size,), math.nan, device=kernel.device) for size in sizes for _ in range(4)]
        del spoilt
        assert all(map(torch.equal, gradients(tensors), expected))


@each_kernel
@pytest.mark.parametrize(("rows", "keys"), [(0, 90), (70, 0)])
def test_key_tiles_that_no_row_visits_get_zeros(kernel: Kernel, rows: int, keys: int) -> None:
    tensors = leaves(kernel, rows, keys)
    spoilt = [torch.full_like(each, math.nan) for each in tensors for _ in range(4)]
    del spoilt
    for gradient in gradients(tensors):
        assert (gradient == 0).all()


@with_emulated((90, 30), (250, 130))
def test_rows_without_keys_get_zeros_and_give_none(rows: int, keys: int, kernel: Kernel) -> None:
    """Their log-sum-exp is minus infinity, of which a difference would be NaN."""
    tensors, blind = leaves(kernel, rows, keys), rows - keys
    output, lse = flash_attention(*tensors, causal=True, return_lse=True)
    assert (lse[:, :, :blind] == -math.inf).all()
    results = torch.autograd.grad(output, tensors, incoming(output))
    assert (results[0][:, :, :blind] == 0).all()
    seen = tuple(each.detach().requires_grad_() for each in (tensors[0][:, :, blind:], *tensors[1:]))
    of_seen = torch.autograd.grad(attend(*seen), seen, incoming(output)[:, :, blind:])
    of_rows = (results[0][:, :, blind:], *results[1:])
    if kernel.dtype is torch.float32:
        for one, other in zip(of_rows, of_seen, strict=True):
            torch.testing.assert_close(one, other)
    # Of rows that lie otherwise in tiles sums have another order in 16 bits: both are held against float64.
    query, key, value = (each.detach() for each in seen)
    case = backward_case(query, key, value, incoming(output)[:, :, blind:], causal=True)
    assert_gradients(case, of_rows)
    assert_gradients(case, of_seen)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@with_emulated((70, 90), (170, 210))
def test_a_nan_reaches_every_gradient_that_depends_on_it(
    rows: int, keys: int, which: int, kernel: Kernel
) -> None:
    """In query, key, value or the output's gradient: hiding it would hide that a training run diverged."""
    tensors = leaves(kernel, rows, keys, heads=2, kv_heads=2)
    output = attend(*tensors, causal=False)
    grad = incoming(output)
    with torch.no_grad():
        (*tensors, grad)[which][0, 0, 33, 5] = math.nan
    results = torch.autograd.grad(attend(*tensors, causal=False), tensors, grad)
    assert results[0][0, 0, 33].isnan().any()  # of query
    others = torch.cat((results[0][0, 0, :33], results[0][0, 0, 34:]))
    # Another row's depends on keys and values, not on this query or on what comes in at its row.
    assert others.isfinite().all() if which in (0, 3) else others.isnan().any(-1).all()
    assert results[1][0, 0].isnan().any()
    assert results[2][0, 0].isnan().any() or which == 2  # of value: not by value
    for gradient in results:
        assert gradient[1].isfinite().all()
        assert gradient[0, 1].isfinite().all()


@each_kernel
def test_the_gradient_through_the_log_sum_exp_alone(kernel: Kernel) -> None:
    tensors = leaves(kernel, 70, 90, kv_heads=4)
    _, lse = flash_attention(*tensors, causal=False, return_lse=True)
    wanted = incoming(lse)
    results = torch.autograd.grad(lse, tensors, wanted, allow_unused=True)
    query, key = (each.detach().double().cpu().requires_grad_() for each in tensors[:2])
    right = torch.logsumexp(query @ key.mT * kernel.head_dim**-0.5, -1)
    assert_near(results[:2], torch.autograd.grad(right, (query, key), wanted.double().cpu()))
    assert results[2] is None or (results[2] == 0).all()


@each_kernel
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_one_alone_that_needs_a_gradient_gets_the_same(kernel: Kernel, needed: tuple[int, ...]) -> None:
    tensors = leaves(kernel)
    expected = gradients(tensors)
    some = tuple(each.detach().requires_grad_(index in needed) for index, each in enumerate(tensors))
    output = attend(*some)
    output.backward(incoming(output))
    for index, tensor in enumerate(some):
        assert (tensor.grad is not None) == (index in needed)
        if tensor.grad is not None:
            assert_same((tensor.grad,), expected[index : index + 1])


@each_kernel
def test_retained_graphs_and_accumulation_add_up(kernel: Kernel) -> None:
    tensors = leaves(kernel)
    expected = gradients(tensors)
    output = attend(*tensors)
    for _ in range(2):
        output.backward(incoming(output), retain_graph=True)
    for tensor, once in zip(tensors, expected, strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, once + once)


@each_kernel
@pytest.mark.parametrize("view", ["zero strides", "transposed", "odd offset", "rows first"])
def test_gradients_of_the_output_of_any_strides(kernel: Kernel, view: str) -> None:
    tensors = leaves(kernel)
    output = attend(*tensors)
    grad = incoming(output)
    given = {
        "zero strides": torch.ones((), dtype=grad.dtype, device=kernel.device).expand(grad.shape),
        "transposed": grad.mT.contiguous().mT,
        "odd offset": torch.empty(grad.numel() + 1, dtype=grad.dtype, device=kernel.device)[1:].view(
            grad.shape
        ),
        "rows first": grad.transpose(1, 2).contiguous().transpose(1, 2),
    }[view]
    if view == "odd offset":
        given.copy_(grad)
    results = torch.autograd.grad(output, tensors, given, retain_graph=True)
    assert_same(results, torch.autograd.grad(output, tensors, given.contiguous().clone()))


@pytest.mark.parametrize("kernel", [ON_CPU, *ON_GPU, *EMULATED], indirect=True)
def test_what_hooks_restore_may_have_other_strides(kernel: Kernel) -> None:
    """Elements of rows that lie apart, and a log-sum-exp that is read by address."""

    def by_columns(tensor: torch.Tensor) -> torch.Tensor:
        dimensions = range(tensor.dim() - 1, -1, -1)
        return tensor.permute(*dimensions).contiguous().permute(*dimensions)

    tensors = leaves(kernel)
    with torch.autograd.graph.saved_tensors_hooks(by_columns, lambda tensor: tensor):
        turned = gradients(tensors)
    assert all(map(torch.equal, turned, gradients(tensors)))


LARGE, DOMINANT = "large logits", "dominant key"


@pytest.mark.parametrize("factor", [1.0, 2.0**10, 2.0**-14], ids=["", "large gradients", "small gradients"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("hard", [LARGE, DOMINANT])
@pytest.mark.parametrize("kernel", [*ON_GPU, *EMULATED], indirect=True)
def test_peaked_softmaxes(kernel: Kernel, hard: str, dtype: torch.dtype, factor: float) -> None:
    """Probabilities of 0 and of nearly 1, where dP - delta cancels, beside gradients at either end of the range."""
    query, key, value = (each.detach().to(dtype) for each in leaves(kernel))
    if hard == LARGE:
        query = query * 16
    else:
        key[:, :, 7] *= 8
    grad = incoming(query) * factor
    case = backward_case(query, key, value, grad, causal=True)
    tensors = tuple(each.requires_grad_() for each in (query, key, value))
    assert_gradients(case, torch.autograd.grad(attend(*tensors), tensors, grad))


@each_kernel
def test_views_of_one_projection_of_query_key_and_value(kernel: Kernel) -> None:
    """As a fused projection gives them: neither contiguous nor alike in strides, and one leaf behind all."""
    query, key, value = (each.detach() for each in leaves(kernel, 70, 70, kv_heads=4))
    joined = torch.stack((query, key, value), dim=2).permute(0, 3, 2, 1, 4).contiguous().requires_grad_()
    output = attend(*(each.transpose(1, 2) for each in joined.unbind(2)))
    (gradient,) = torch.autograd.grad(output, joined, incoming(output))
    apart = tuple(each.requires_grad_() for each in (query, key, value))
    assert_same(tuple(each.transpose(1, 2) for each in gradient.unbind(2)), gradients(apart))


@each_kernel
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 90), (90, 1)])
def test_one_row_or_one_key(kernel: Kernel, rows: int, keys: int) -> None:
    for dtype in (
        torch.bfloat16,
        torch.float16,
        *((torch.float32,) if kernel.dtype is torch.float32 else ()),
    ):
        tensors = tuple(each.detach().to(dtype).requires_grad_() for each in leaves(kernel, rows, keys))
        output = attend(*tensors, causal=False)
        grad = incoming(output)
        results = torch.autograd.grad(output, tensors, grad)
        query, key, value = (each.detach() for each in tensors)
        case = backward_case(query, key, value, grad, causal=False)
        assert_gradients(case, results)
        if keys > 1:
            continue
        # The one key's probabilities are 1, so its value's gradient is a sum in float32 that is rounded once.
        right, sums = case.exact[2], grad.double().abs().unflatten(1, (2, 2)).sum((2, 3))[:, :, None]
        error, slack = (results[2].double() - right).abs(), 2**-20 * sums
        assert (error <= torch.finfo(dtype).eps / 2 * right.abs() + slack).all()
        by_torch = functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
        theirs = (torch.autograd.grad(by_torch, tensors, grad)[2].double() - right).abs()
        assert (error / sums).max() <= 2 * (theirs / sums).max() + 2**-20


@each_kernel
def test_the_same_bits_in_every_call(kernel: Kernel) -> None:
    tensors = leaves(kernel, 250, 310)
    expected = gradients(tensors)
    assert_near(expected, exact(tensors))
    for _ in range(10):
        assert all(map(torch.equal, gradients(tensors), expected))


@each_kernel
def test_second_derivatives_are_refused_with_a_way_out(kernel: Kernel) -> None:
    tensors = leaves(kernel)
    (first,) = torch.autograd.grad(attend(*tensors).sum(), tensors[:1], create_graph=True)
    with pytest.raises(InputError, match=r"first derivatives only; .*SDPBackend\.MATH"):
        torch.autograd.grad(first.square().sum(), tensors[0])


@on_gpus
def test_a_forward_pass_on_another_stream(kernel: Kernel) -> None:
    """Autograd runs the backward pass on the forward's stream, whatever stream is current when it is asked for."""
    tensors = leaves(kernel, 250, 310)
    expected = gradients(tensors)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs.append(attend(*tensors))
    for stream, output in zip(reversed(streams), outputs, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        for each in streams:
            stream.wait_stream(each)
        with torch.cuda.stream(stream):
            results = torch.autograd.grad(output, tensors, incoming(output))
        stream.synchronize()
        assert all(map(torch.equal, results, expected))


@on_gpus
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_captured_graph_of_both_passes(kernel: Kernel, causal: bool) -> None:
    tensors = leaves(kernel, 250, 310)
    expected = gradients(tensors, causal)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients(tensors, causal)
    torch.cuda.current_stream().wait_stream(side)
    query, key, value = tensors
    grad, graph = incoming(query), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(attend(query, key, value, causal=causal), tensors, grad)
    for _ in range(2):
        for each in captured:
            each.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, expected))


@on_gpus
def test_on_two_gpus_at_once(kernel: Kernel) -> None:
    """Each call on the device of its tensors, whichever is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = leaves(kernel, 250, 310)
    expected = gradients(tensors)
    other = tuple(each.detach().to("cuda:1").requires_grad_() for each in tensors)
    for current in (0, 1):
        with torch.cuda.device(current):
            outputs = attend(*tensors), attend(*other)
            total = sum((output * incoming(output)).float().sum().to("cuda:0") for output in outputs)
            assert isinstance(total, torch.Tensor)
            total.backward()
    for one, two, once in zip(tensors, other, expected, strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad.to("cuda:0"))
        assert torch.equal(one.grad, once + once)


def test_every_test_of_the_page_is_there() -> None:
    page = (ROOT / "docs" / "kernels" / "backward-faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 30
    for file, name in named:
        text = (ROOT / "tests" / "flashmoe_science" / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text, (file, name)
