"""For tests on a GPU: tensors with guards around them, every kernel that takes a call, and what is right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashmoe_science.cuda.attention import KernelKind, Problem
from flashmoe_science.cuda.attention.forward import _problem
from flashmoe_science.cuda.attention.problem import result_like
from flashmoe_science.cuda.attention.select import module
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current

_PATTERN = 0x7FA5  # a NaN in float16 and in bfloat16
_LSE_PATTERN = 0x7FC5A5A5  # a NaN in float32
_GUARD_ROWS = 32
_GUARD_COLUMNS = 8


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a larger buffer, every other element of which holds a pattern that is a NaN."""

    whole: torch.Tensor
    tensor: torch.Tensor

    def assert_intact(self, what: str) -> None:
        """Nothing was written around the tensor. Destroys the tensor."""
        words = self.whole.view(torch.int16 if self.whole.element_size() == 2 else torch.int32)
        pattern = _PATTERN if words.dtype == torch.int16 else _LSE_PATTERN
        self.tensor.view(words.dtype).fill_(pattern)
        assert (words == pattern).all(), f"{what}: written outside of the tensor"


def guarded(*shape: int, dtype: torch.dtype, rows_first: bool = False) -> Guarded:
    """(batch, heads, rows, dim), all of it the pattern; with `rows_first` rows lie before heads in memory."""
    batch, heads, rows, dim = shape
    rows_in, dims = slice(_GUARD_ROWS, _GUARD_ROWS + rows), slice(0, dim)
    all_rows, all_dims = rows + 2 * _GUARD_ROWS, dim + _GUARD_COLUMNS
    sizes = (batch, all_rows, heads, all_dims) if rows_first else (batch, heads, all_rows, all_dims)
    whole = torch.full(sizes, _PATTERN, device="cuda", dtype=torch.int16).view(dtype)
    if rows_first:
        return Guarded(whole, whole[:, rows_in, :, dims].transpose(1, 2))
    return Guarded(whole, whole[:, :, rows_in, dims])


def random(*shape: int, dtype: torch.dtype, rows_first: bool = False) -> torch.Tensor:
    """Normal random numbers with NaN around them in memory."""
    return guarded(*shape, dtype=dtype, rows_first=rows_first).tensor.copy_(torch.randn(shape, device="cuda"))


def random_qkv(
    lengths: tuple[int, int],
    head_dim: int,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 4),
    dtype: torch.dtype = torch.bfloat16,
    rows_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(sum(lengths) + head_dim)
    sizes = ((heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1]))
    q, k, v = (random(batch, h, n, head_dim, dtype=dtype, rows_first=rows_first) for h, n in sizes)
    return q, k, v


def problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    return_lse: bool = True,
) -> Problem:
    return _problem(q, k, v, output, causal, scale, return_lse)


def choices(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None = None
) -> list[Choice]:
    """What each kernel that takes this call would use."""
    asked = problem(q, k, v, result_like(q), causal=causal, scale=scale)
    candidates = (module(kind).choose(asked, device_of(q.get_device())) for kind in KernelKind)
    return [choice for choice in candidates if choice is not None]


def run_guarded(
    choice: Choice,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    return_lse: bool = True,
    rows_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and log-sum-exp of one launch that writes into guarded buffers; fails if it writes beside them."""
    where = device_of(q.get_device())
    make_context_current(where.index)
    out = guarded(*q.shape, dtype=q.dtype, rows_first=rows_first)
    count = q.shape[0] * q.shape[1] * q.shape[2]
    whole = torch.full((count + 128,), _LSE_PATTERN, device="cuda", dtype=torch.int32).view(torch.float32)
    lse = Guarded(whole, whole[64 : 64 + count].view(q.shape[:3]))
    asked = problem(q, k, v, out.tensor, causal=causal, scale=scale, return_lse=return_lse)
    plan = module(choice.kernel).plan(asked, choice.configuration, where)
    lse_address = lse.tensor.data_ptr() if return_lse else 0
    addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.tensor.data_ptr(), lse_address)
    plan.launch(*addresses, torch.cuda.current_stream().cuda_stream)
    results = out.tensor.clone(), lse.tensor.clone() if return_lse else None
    out.assert_intact(f"{choice}: output")
    lse.assert_intact(f"{choice}: log-sum-exp")
    return results


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition in `dtype`; output and log-sum-exp."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ (k * scale).transpose(2, 3)
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        visible = visible.tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~visible, -math.inf)
        # A row without keys is zero; one whose scores are NaN stays NaN.
        weights = scores.softmax(dim=-1).masked_fill(~visible.any(-1)[:, None], 0.0)
        return weights @ v, scores.logsumexp(dim=-1)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


def assert_right(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    only: list[Choice] | None = None,
    rows_first: bool = False,
    most: float = math.inf,
) -> None:
    """Every kernel that takes the call (or those of `only`) is right, and stays inside its tensors.

    The error against float64 is within twice that of PyTorch's operators in the same dtype, and a rounding; and
    within `most`, for scores so large that PyTorch's operators, which round them, say little.
    """
    used = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    exact, exact_lse = reference(q, k, v, causal, used, torch.float64)
    plain, _ = reference(q, k, v, causal, used, q.dtype)
    rounding = 2 * ((exact.to(q.dtype) + 0.3 - 0.3).double() - exact).abs().max().item()
    allowed = min(2 * (plain.double() - exact).abs().max().item() + rounding, most)
    asked = choices(q, k, v, causal=causal, scale=scale) if only is None else only
    assert asked, "no kernel takes this"
    for choice in asked:
        out, lse = run_guarded(choice, q, k, v, causal=causal, scale=scale, rows_first=rows_first)
        error = (out.double() - exact).abs().max().item()
        assert error <= allowed, f"{choice}: error {error:.2e}, allowed {allowed:.2e}"
        assert lse is not None
        torch.testing.assert_close(
            lse.double(), exact_lse, atol=1e-3, rtol=1e-5, msg=lambda text, c=choice: f"{c}: {text}"
        )
