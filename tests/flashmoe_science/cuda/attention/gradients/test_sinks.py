"""What sinks change of a backward pass, and their gradient: the kernel's source run on the CPU, and what it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER
from emulated_sinks import emulate

from flashmoe_science.cuda.attention.gradients import sinks as kernel
from flashmoe_science.cuda.attention.problem import strides_of
from flashmoe_science.jit.limits import LIMITS
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.varlen import sink_gradients
from problems import H200, T4

BF16, FP16 = torch.bfloat16, torch.float16
GUARD = 8


@dataclasses.dataclass(frozen=True)
class Call:
    """What the kernel reads."""

    output: torch.Tensor
    grad_output: torch.Tensor
    lse: torch.Tensor
    sinks: torch.Tensor
    grad_lse: torch.Tensor | None


Results = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Launched = Callable[..., Results]


def call_of(
    shape: tuple[int, int, int],
    head_dim: int,
    dtype: torch.dtype = BF16,
    *,
    grad_lse: bool = True,
    transposed: bool = False,
) -> Call:
    batch, heads, rows = shape
    generator = torch.Generator().manual_seed(rows + head_dim)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    def per_element() -> torch.Tensor:
        if transposed:
            return normal(batch, rows, heads, head_dim).to(dtype).transpose(1, 2)
        return normal(batch, heads, rows, head_dim).to(dtype)

    return Call(
        per_element(),
        per_element(),
        3 * normal(batch, heads, rows) + 2,
        3 * normal(heads),
        normal(batch, heads, rows) if grad_lse else None,
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The emulated kernel's results, in memory with guards behind it."""
    counters = emulate(monkeypatch)

    def launch(call: Call, *, total: bool = True, of_sinks: bool = True) -> Results:
        batch, heads, rows, head_dim = call.output.shape
        of_lse = call.grad_lse if total else None
        problem = kernel.SinksProblem(
            batch=batch,
            num_heads=heads,
            seqlen_q=rows,
            head_dim=head_dim,
            dtype=call.output.dtype,
            output_strides=strides_of("output", call.output) if of_sinks else None,
            grad_output_strides=strides_of("grad_output", call.grad_output) if of_sinks else None,
            grad_lse_strides=None if of_lse is None else of_lse.stride(),
        )
        planned = kernel.plan(problem, H200)
        sizes = (batch, heads, rows), (batch, heads, rows), (heads,)
        wanted = total, of_lse is not None, of_sinks
        memory = [
            torch.full((math.prod(size) + GUARD,), 7.0) if each else None
            for size, each in zip(sizes, wanted, strict=True)
        ]
        assert (planned.workspace_bytes > 0) == of_sinks
        workspace = torch.full((planned.workspace_bytes // 4,), math.nan)
        read = (call.lse, call.sinks, *((call.output, call.grad_output) if of_sinks else ()))
        addresses = [tensor.data_ptr() for tensor in (*read, *(() if of_lse is None else (of_lse,)))]
        addresses += [0 if each is None else each.data_ptr() for each in memory]
        planned.launch(*addresses, *((workspace.data_ptr(),) if of_sinks else ()), 0)
        assert not counters.any()
        assert all((each[-GUARD:] == 7).all() for each in memory if each is not None)
        made = [
            None if each is None else each[:-GUARD].view(size)
            for each, size in zip(memory, sizes, strict=True)
        ]
        return made[0], made[1], made[2]

    return launch


def composed(call: Call, *, double: bool = False) -> Results:
    """By the formula of PyTorch's operations."""
    tensors: dict[str, Any] = {
        name: getattr(call, name) for name in ("grad_output", "output", "lse", "sinks", "grad_lse")
    }
    if double:
        tensors = {name: None if each is None else each.double() for name, each in tensors.items()}
    return sink_gradients._composed(**tensors, total=True, of_sinks=True)[1:]


def assert_as_exact(call: Call, results: Results) -> None:
    """Against float64, for finite inputs. Weights of float32 have an error that grows with the size of logarithms."""
    total, scaled, of_sinks = results
    right_total, right_scaled, _ = composed(call, double=True)
    largest = float(max(1.0, call.lse[call.lse.isfinite()].abs().max(), call.sinks.abs().max()))
    error = 2e-6 * largest
    if total is not None:
        assert right_total is not None
        torch.testing.assert_close(total.double(), right_total, rtol=1e-6, atol=2e-7 * largest)
    if scaled is not None:
        assert right_scaled is not None
        torch.testing.assert_close(scaled.double(), right_scaled, rtol=error, atol=1e-30)
    if of_sinks is not None:
        assert right_total is not None
        products = call.output.double() * call.grad_output.double()
        share = (call.sinks.double()[:, None] - right_total).exp().masked_fill(call.lse == -math.inf, 0)
        right = -(products.sum(-1) * share).sum((0, 2))
        bound = error * (products.abs().sum(-1) * share).sum((0, 2))
        assert ((of_sinks.double() - right).abs() <= bound).all()


SHAPES = [(1, 1, 1), (2, 3, 130), (1, 2, 128), (3, 1, 300), (1, 5, 31)]


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 72, 128, 200, 256])
def test_as_defined(
    launched: Launched, head_dim: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    call = call_of(shape, head_dim, dtype, transposed=head_dim % 16 == 8)
    assert_as_exact(call, launched(call))


@NEEDS_COMPILER
@pytest.mark.parametrize("grad_lse", [False, True])
@pytest.mark.parametrize(("total", "of_sinks"), [(True, True), (True, False), (False, True)])
def test_only_what_is_wanted(launched: Launched, total: bool, of_sinks: bool, grad_lse: bool) -> None:
    call = call_of((2, 3, 130), 64, grad_lse=grad_lse)
    results = launched(call, total=total, of_sinks=of_sinks)
    assert [each is not None for each in results] == [total, total and grad_lse, of_sinks]
    assert_as_exact(call, results)
    everything = launched(call)
    for mine, same in zip(results, everything, strict=True):
        assert mine is None or torch.equal(mine, same)  # type: ignore[arg-type]


@NEEDS_COMPILER
@pytest.mark.parametrize("layout", ["expanded", "expanded rows", "transposed", "every second"])
def test_a_gradient_of_the_log_sum_exp_of_any_strides(launched: Launched, layout: str) -> None:
    call = call_of((2, 3, 130), 64)
    given = {
        "expanded": lambda: torch.tensor(1.5).expand(2, 3, 130),
        "expanded rows": lambda: torch.randn(2, 3, 1).expand(2, 3, 130),
        "transposed": lambda: torch.randn(130, 3, 2).permute(2, 1, 0),
        "every second": lambda: torch.randn(2, 3, 260)[..., ::2],
    }[layout]()
    _, scaled, _ = launched(dataclasses.replace(call, grad_lse=given))
    _, same, _ = launched(dataclasses.replace(call, grad_lse=given.contiguous()))
    assert torch.equal(scaled, same)  # type: ignore[arg-type]


@NEEDS_COMPILER
def test_rows_of_other_strides(launched: Launched) -> None:
    """A last block with rows past the end, in the middle of what another head's rows hold."""
    call = call_of((2, 3, 150), 40)
    wide = torch.full((2, 150, 4, 3, 48), math.nan, dtype=BF16)
    wide[:, :, 1, :, :40] = call.output.transpose(1, 2)
    view = wide[:, :, 1, :, :40].transpose(1, 2)
    for mine, same in zip(launched(dataclasses.replace(call, output=view)), launched(call), strict=True):
        assert torch.equal(mine, same)  # type: ignore[arg-type]


SPECIAL = [-math.inf, math.inf, math.nan, 1e30, -1e30, 200.0, -200.0, 0.0, 3.0]


@NEEDS_COMPILER
@pytest.mark.parametrize("of_lse", [1.0, math.inf, math.nan])
def test_what_is_not_finite_or_large_gives_what_the_formula_gives(launched: Launched, of_lse: float) -> None:
    """Each log-sum-exp with each sink: rows without keys, no sink, an infinite one, and ratios beyond float32."""
    values = torch.tensor(SPECIAL)
    heads = len(values)
    call = call_of((1, heads, heads), 64)
    lse = values.expand(1, heads, heads).contiguous()
    call = dataclasses.replace(call, lse=lse, sinks=values, grad_lse=torch.full_like(lse, of_lse))
    for row in range(heads):
        alone = dataclasses.replace(
            call,
            output=call.output[:, :, row : row + 1].contiguous(),
            grad_output=call.grad_output[:, :, row : row + 1].contiguous(),
            lse=lse[:, :, row : row + 1].contiguous(),
            grad_lse=call.grad_lse[:, :, row : row + 1],  # type: ignore[index]
        )
        for mine, right in zip(launched(alone), composed(alone), strict=True):
            torch.testing.assert_close(mine, right, rtol=2e-5, atol=1e-5, equal_nan=True)


@NEEDS_COMPILER
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_what_is_not_finite_stays_in_its_head(launched: Launched, head_dim: int, value: float) -> None:
    call = call_of((2, 3, 130), head_dim)
    call.grad_output[1, 1, 129, 5] = value  # the last row, which is read in place of those past the end
    total, scaled, of_sinks = launched(call)
    assert total is not None
    assert scaled is not None
    assert of_sinks is not None
    assert total.isfinite().all()
    assert scaled.isfinite().all()
    assert of_sinks.isfinite().tolist() == [True, False, True]
    torch.testing.assert_close(of_sinks, composed(call)[2], rtol=1e-4, atol=1e-4, equal_nan=True)


@NEEDS_COMPILER
def test_a_row_without_keys_has_no_share(launched: Launched) -> None:
    call = call_of((1, 2, 140), 64)
    call.lse[:, :, ::3] = -math.inf
    results = launched(call)
    assert_as_exact(call, results)
    total, scaled, _ = results
    assert (total[:, :, ::3] == -math.inf).all()  # type: ignore[index, union-attr]
    assert (scaled[:, :, ::3] == 0).all()  # type: ignore[index]
    call.lse.fill_(-math.inf)
    assert (launched(call)[2] == 0).all()  # type: ignore[union-attr]


@NEEDS_COMPILER
def test_sums_do_not_depend_on_what_was_there(launched: Launched) -> None:
    call = call_of((2, 2, 700), 64)
    first = launched(call)
    for mine, same in zip(launched(call), first, strict=True):
        assert torch.equal(mine, same)  # type: ignore[arg-type]
    assert_as_exact(call, first)


@NEEDS_COMPILER
def test_more_blocks_than_a_block_has_threads(launched: Launched) -> None:
    call = call_of((140, 1, 130), 8)
    assert_as_exact(call, launched(call))


@NEEDS_COMPILER
def test_offsets_beyond_32_bits(launched: Launched) -> None:
    """Memory that is never touched is not there."""
    call = call_of((2, 2, 3), 64)
    far = torch.empty((1 << 31) + (1 << 20), dtype=torch.uint8).view(BF16)
    output = far.as_strided((2, 2, 3, 64), (1 << 30, 256, 64, 1))
    gradient = far.as_strided((2, 2, 3, 64), (4096, 1024, 1 << 29, 1), 2048)[:, :, :2]
    output.copy_(call.output)
    for mine, same in zip(launched(dataclasses.replace(call, output=output)), launched(call), strict=True):
        assert torch.equal(mine, same)  # type: ignore[arg-type]
    gradient.copy_(call.grad_output[:, :, :2])
    few = dataclasses.replace(
        call,
        output=call.output[:, :, :2].contiguous(),
        lse=call.lse[:, :, :2].contiguous(),
        grad_lse=None,
        grad_output=gradient,
    )
    same = launched(dataclasses.replace(few, grad_output=gradient.contiguous()))
    assert torch.equal(launched(few)[2], same[2])  # type: ignore[arg-type]


def test_what_it_takes() -> None:
    def output(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    assert kernel.why_not(output(1, 64, 8192, 64)) is None
    assert kernel.why_not(output(1, 1024, 1, 256, dtype=FP16)) is None
    assert kernel.why_not(output(1, 4, 9, 64, dtype=torch.float32)) == "another dtype"
    assert kernel.why_not(output(0, 4, 9, 64)) == kernel.why_not(output(1, 4, 0, 64)) == "an empty tensor"
    assert kernel.why_not(output(1, 1025, 9, 64)) == "more than 1024 heads"
    assert kernel.why_not(output(1 << 21, 1024, 1, 8)) == "too many rows"
    assert kernel.why_not(output(1, 1, (1 << 31) - 100, 8)) == "too many rows"


def test_what_kernels_cannot_read_is_copied() -> None:
    rows = torch.randn(2, 3, 5, 64).bfloat16()
    assert kernel.readable(rows) is rows
    transposed = rows.transpose(1, 2)
    assert kernel.readable(transposed) is transposed
    for given in (
        rows[:, :, :, ::2],
        rows.mT,
        rows[:, :, :1].expand(2, 3, 5, 64),
        torch.tensor(1.0).bfloat16().expand(2, 3, 5, 64),
        torch.randn(2, 3, 5, 68).bfloat16()[..., :64],
        torch.randn(2 * 3 * 5 * 64 + 1).bfloat16()[1:].view(2, 3, 5, 64),
    ):
        copy = kernel.readable(given)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, given)


def test_turing_has_no_bfloat16() -> None:
    assert [each.macros["ELEMENT_BF16"] for each in kernel.kernels(T4.architecture)] == [0]
    assert [each.macros["ELEMENT_BF16"] for each in kernel.kernels(H200.architecture)] == [0, 1]


@each_architecture(tuple(LIMITS))
def test_it_compiles_for_every_architecture(architecture: str, nvrtc: None) -> None:
    for each in kernel.kernels(architecture):
        resources = compile_kernel(each).resources
        assert resources is not None
        assert resources.spill_store_bytes == resources.stack_bytes == 0
        assert resources.registers_per_thread <= 64
