"""Gradients of `flash_attention` with a window, a cap and sinks, against autograd in float64 on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dense_options import DENSE, dense, each_option
from emulated import NEEDS_COMPILER
from emulated_sinks import emulate
from hypothesis import given
from hypothesis import strategies as st
from varlen_reference import visible_keys

from flashmoe_science import InputError, flash_attention
from flashmoe_science.adapters.flash_attn import flash_attn_func
from flashmoe_science.cuda.attention.gradients import sinks as cuda_sinks
from flashmoe_science.varlen import dense_gradients, sink_gradients

SINKS = torch.tensor([0.0, 2.0, -math.inf, 5.0])
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, by what autograd differentiates; the latter is 0 for rows without keys."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_keys(query.shape[2], key.shape[2], causal, window)
    seen = visible.any(1)
    lse = scores.masked_fill(~(visible | ~seen[:, None]), -math.inf).logsumexp(-1).masked_fill(~seen, 0)
    total = lse if sinks is None else torch.logaddexp(lse, sinks[:, None].expand_as(lse))
    return (scores - total[..., None]).exp().masked_fill(~visible, 0) @ value, lse


def recorded(tensors: DENSE, sinks: torch.Tensor | None, device: str = "cpu") -> list[torch.Tensor | None]:
    leaves = (None if each is None else each.detach().to(device, copy=True) for each in (*tensors, sinks))
    return [None if leaf is None else leaf.requires_grad_() for leaf in leaves]


def check(
    tensors: DENSE,
    sinks: torch.Tensor | None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float = 0.2,
    device: str = "cpu",
) -> None:
    """All gradients of a sum over output and log-sum-exp."""
    options = {"causal": causal, "window": window, "softcap": softcap}
    ours = recorded(tensors, sinks, device)
    wide = recorded(tuple(each.double() for each in tensors), sinks if sinks is None else sinks.double())  # type: ignore[arg-type]
    query, key, value, own_sinks = ours
    output, lse = flash_attention(
        query,
        key,
        value,
        sinks=own_sinks,
        softmax_scale=scale,
        return_lse=True,
        **options,  # type: ignore[arg-type]
    )
    output, lse = output.cpu(), lse.cpu()
    exact_output, exact_lse = exact(*wide, **options, scale=scale)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    of_output = torch.randn(output.shape, generator=generator)
    of_lse = torch.randn(lse.shape, generator=generator)
    seen = lse.isfinite()
    ((output.float() * of_output).sum() + (lse * of_lse)[seen].sum()).backward()
    ((exact_output * of_output).sum() + (exact_lse * of_lse)[seen].sum()).backward()
    for mine, right in zip(ours, wide, strict=True):
        if mine is not None and right is not None:
            assert mine.grad is not None
            assert mine.grad.dtype == mine.dtype
            size = float(right.grad.abs().max()) if right.grad.numel() else 0.0  # type: ignore[union-attr]
            torch.testing.assert_close(
                mine.grad.double().cpu(),
                right.grad,
                rtol=0,
                atol=TOLERANCE[tensors[0].dtype] * max(1.0, size),
            )


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 60)),
    st.booleans(),
    st.tuples(st.integers(-1, 30), st.integers(-1, 10)),
    st.sampled_from([0.0, 2.5]),
    st.booleans(),
    st.sampled_from([0.2, -0.3]),
)
def test_as_defined(
    lengths: tuple[int, int],
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    with_sinks: bool,
    scale: float,
) -> None:
    tensors = dense(2, (4, 2), lengths, 24, torch.float32)
    sinks = SINKS if with_sinks else None
    check(tensors, sinks, causal=causal, window=window, softcap=softcap, scale=scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (9, 2)}, {"causal": True, "softcap": 3.0}], ids=str
)
def test_every_dtype(dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(dense(1, (4, 2), (33, 70), 64, dtype), SINKS, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_sinks_alone_take_the_kernels(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dense_gradients, "_composed")
    check(dense(2, (4, 2), (20, 30), 32, torch.float32), SINKS, causal=causal)
    check(dense(2, (4, 2), (20, 30), 32, torch.float32), SINKS, causal=causal, window=(29, 19))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "options"),
    [((33, 70), {}), ((200, 150), {"causal": True}), ((150, 160), {"causal": True, "window": (30, 0)})],
    ids=str,
)
def test_with_sinks_by_the_kernel(
    lengths: tuple[int, int], options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one for CUDA, emulated."""
    emulate(monkeypatch)
    monkeypatch.delattr(sink_gradients, "_composed")
    check(dense(2, (4, 2), lengths, 64, dtype), SINKS, **options)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "leaves", ["sinks", "query", "value sinks", "query key value", "query key value sinks"]
)
def test_by_the_kernel_each_gradient_alone_is_the_composed_one(
    leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an output whose gradient is expanded from one number, and of its log-sum-exp."""
    named = dict(zip(("query", "key", "value"), dense(2, (4, 2), (70, 40), 64, torch.bfloat16), strict=True))
    named["sinks"] = SINKS

    def gradients() -> tuple[torch.Tensor, ...]:
        given = {name: each.detach().requires_grad_(name in leaves.split()) for name, each in named.items()}
        output, lse = flash_attention(**given, causal=True, return_lse=True)  # type: ignore[arg-type]
        total = output.float().sum() + lse.nan_to_num(neginf=0.0).sum()
        return torch.autograd.grad(total, [given[name] for name in leaves.split()])

    composed = gradients()
    with monkeypatch.context() as patch:
        emulate(patch)
        patch.delattr(sink_gradients, "_composed")
        mine = gradients()
    for one, other in zip(mine, composed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_the_cpu_has_no_kernel_for_sinks() -> None:
    assert not cuda_sinks.takes(torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("lengths", [(50, 70), (70, 50)])
def test_many_blocks_give_what_one_gives(lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_gradients, "_BLOCK_SCORES", 1)
    monkeypatch.setattr(dense_gradients, "_LEAST_ROWS", 7)
    check(dense(2, (4, 2), lengths, 32, torch.float32), SINKS, window=(11, 3), softcap=2.0)


@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (127, 0), (0, 0), (100, 3000), (60000, 60000)], ids=str
)
@pytest.mark.parametrize(("heads", "length"), [(1, 8192), (1, 65536), (4, 100), (128, 65536)])
def test_scores_of_a_block_have_room(heads: int, length: int, window: tuple[int, int]) -> None:
    rows = rows_of_a_block(heads, length, window)
    keys = min(length, rows + sum(window)) if min(window) >= 0 else length
    assert rows == dense_gradients._LEAST_ROWS or heads * rows * keys <= dense_gradients._BLOCK_SCORES


def test_a_windows_blocks_have_few_hidden_keys() -> None:
    """Of one head all rows would have room for as many hidden keys, whose scores take time."""
    assert rows_of_a_block(1, 8192, (128, 0)) == 128
    assert rows_of_a_block(1, 8192, (3, 2)) == dense_gradients._FEW_ROWS
    assert rows_of_a_block(1, 8192, (-1, 0)) == 512


def test_rows_of_a_block_are_few_where_keys_are_many() -> None:
    assert rows_of_a_block(128, 65536, (-1, -1)) == 16
    assert rows_of_a_block(128, 65536, (127, 0)) == 127
    assert rows_of_a_block(128, 65536, (1000, 24)) == 31


def rows_of_a_block(heads: int, length: int, window: tuple[int, int]) -> int:
    meta = torch.empty(1, heads, length, 8, device="meta")
    call = dense_gradients.Recorded(meta, meta, meta, meta, meta[..., 0], None)
    return dense_gradients._rows_of_a_block(meta, call, window)


def test_nothing_of_hidden_keys_and_rows_gets_into_a_gradient() -> None:
    query, key, value = dense(1, (4, 2), (6, 40), 32, torch.float32)
    key, value = key.clone(), value.clone()
    expected = _gradients(query, key, value)
    key[:, :, :30], value[:, :, 10:20] = math.nan, math.inf
    poisoned = _gradients(query, key, value)
    for mine, right in zip(poisoned, expected, strict=True):
        torch.testing.assert_close(mine, right)


def _gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in tensors)
    output = flash_attention(query, key, value, causal=True, window=(4, 0))
    assert isinstance(output, torch.Tensor)
    output.square().sum().backward()
    return [each.grad for each in (query, key, value) if each.grad is not None]


def test_only_what_is_asked_for() -> None:
    query, key, value = dense(1, (4, 2), (6, 9), 32, torch.float32)
    sinks = SINKS.clone().requires_grad_()
    output = flash_attention(query, key, value, sinks=sinks, window=(3, 3))
    output.sum().backward()  # type: ignore[union-attr]
    assert sinks.grad is not None
    assert sinks.grad[2] == 0  # of a sink that is not there
    assert (sinks.grad[[0, 1, 3]] != 0).all()
    value.requires_grad_()
    (of_value,) = torch.autograd.grad(
        flash_attention(query, key, value, softcap=2.0).sum(),  # type: ignore[union-attr]
        value,
    )
    assert of_value.shape == value.shape


def test_autocast_casts_and_leaves_the_sums_alone() -> None:
    query, key, value = recorded(dense(1, (4, 2), (20, 30), 32, torch.float32), None)[:3]
    with torch.autocast("cpu", torch.bfloat16):
        output = flash_attention(query, key, value, window=(5, 5))  # type: ignore[arg-type]
        assert output.dtype is torch.bfloat16  # type: ignore[union-attr]
        output.float().square().sum().backward()  # type: ignore[union-attr]
    narrow = [each.detach().bfloat16().requires_grad_() for each in (query, key, value)]  # type: ignore[union-attr]
    flash_attention(*narrow, window=(5, 5)).float().square().sum().backward()  # type: ignore[arg-type, union-attr]
    for mine, right in zip((query, key, value), narrow, strict=True):
        assert torch.equal(mine.grad, right.grad.float())  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("below", [4.0, 7.0, 9.0])
def test_a_sink_with_a_small_share_of_the_weights(below: float, dtype: torch.dtype) -> None:
    """Values and gradients with a mean make the same error in all columns add up."""
    query, key, value = dense(1, (4, 2), (20, 24), 32, dtype)
    value = value + 2
    sinks = torch.full((4,), math.log(24) - below)
    ours = recorded((query * 0.1, key, value), sinks)
    wide = recorded(tuple(each.double() for each in (query * 0.1, key, value)), sinks.double())  # type: ignore[arg-type]
    output = flash_attention(*ours[:3], sinks=ours[3])  # type: ignore[arg-type]
    exact_output, _ = exact(*wide, False, (-1, -1), 0.0, 32**-0.5)  # type: ignore[arg-type]
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)) + 1  # type: ignore[union-attr]
    output.backward(gradient.to(dtype))  # type: ignore[union-attr]
    exact_output.backward(gradient.to(dtype).double())
    of_query, right = ours[0].grad.double(), wide[0].grad  # type: ignore[union-attr]
    assert (of_query - right).norm() <= (0.003 if dtype == torch.float16 else 0.02) * right.norm()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("options", [{"window": (3, 0)}, {"softcap": 2.0}, {"sinks": SINKS}], ids=str)
@pytest.mark.parametrize("empty", ["batch", "rows", "keys"])
def test_empty_tensors(empty: str, options: dict[str, Any]) -> None:
    batch, rows, keys = 0 if empty == "batch" else 1, 0 if empty == "rows" else 5, 0 if empty == "keys" else 9
    leaves = [
        torch.randn(batch, heads, length, 32, requires_grad=True) for heads, length in ((4, rows), (2, keys))
    ]
    query, key = leaves
    flash_attention(query, key, key, **options).sum().backward()  # type: ignore[union-attr]
    assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in leaves)  # type: ignore[arg-type]


def test_a_hook_may_change_the_strides_of_sinks() -> None:
    query, key, value = recorded(dense(1, (4, 2), (5, 9), 32, torch.float32), None)[:3]
    sinks = SINKS.clone().requires_grad_()

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, tensor], -1)[..., 0]

    with torch.autograd.graph.saved_tensors_hooks(apart, lambda tensor: tensor):
        output = flash_attention(query, key, value, window=(3, 0), sinks=sinks)  # type: ignore[arg-type]
    output.sum().backward()  # type: ignore[union-attr]
    assert sinks.grad is not None


def test_second_derivatives_are_refused() -> None:
    query, key, value = recorded(dense(1, (4, 2), (5, 9), 32, torch.float32), None)[:3]
    output = flash_attention(query, key, value, window=(3, 0))  # type: ignore[arg-type]
    (first,) = torch.autograd.grad(output.sum(), query, create_graph=True)  # type: ignore[union-attr, arg-type]
    with pytest.raises(InputError, match="first derivatives only"):
        first.sum().backward()


def test_under_flash_attentions_name() -> None:
    query, key, value = (
        each.transpose(1, 2).detach().requires_grad_()
        for each in dense(1, (4, 2), (20, 30), 32, torch.float32)
    )
    sinks = SINKS.clone().requires_grad_()
    result = flash_attn_func(query, key, value, causal=True, window_size=(7, 0), sinks=sinks)
    assert isinstance(result, torch.Tensor)
    (mine, of_sinks) = torch.autograd.grad(result.sum(), (query, sinks))
    ours = flash_attention(
        *(each.transpose(1, 2) for each in (query, key, value)), causal=True, window=(7, 0), sinks=sinks
    )
    assert isinstance(ours, torch.Tensor)
    same, of_same = torch.autograd.grad(ours.sum(), (query, sinks))
    assert torch.equal(mine, same)
    assert torch.equal(of_sinks, of_same)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@each_option
def test_on_a_gpu(
    dtype: torch.dtype,
    head_dim: int,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    with_sinks: bool,
) -> None:
    tensors = dense(2, (4, 2), (150, 333), head_dim, dtype)
    sinks = SINKS if with_sinks else None
    check(tensors, sinks, causal=causal, window=window, softcap=softcap, scale=0.1, device="cuda")
