"""Inputs for the mixture of experts, and the formula in float64. Shared by the tests of both backends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from computed_once import computed_once
from flashmoe_science.moe_arguments import Activation, W13Layout

FEW_NUMBERS = 1024

ACTIVATIONS = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.SILU_NO_MUL: functional.silu,
    Activation.GELU_NO_MUL: functional.gelu,
    Activation.RELU2_NO_MUL: lambda x: functional.relu(x).square(),
    Activation.SWIGLU_OAI: lambda x: x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
}


def factor_of(up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """What the activated gate is multiplied by."""
    return up.clamp(-7, 7) + 1 if activation is Activation.SWIGLU_OAI else up


@dataclass(frozen=True)
class Moe:
    """Arguments of one call."""

    hidden_states: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    @property
    def biases(self) -> dict[str, torch.Tensor]:
        """Those that there are, as keywords."""
        given = {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias}
        return {name: bias for name, bias in given.items() if bias is not None}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.hidden_states, self.w13, self.w2, self.topk_weights, self.topk_ids


def make_moe(
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.float32,
    activation: Activation = Activation.SILU,
    ids: torch.dtype = torch.int32,
    seed: int = 0,
    device: str = "cpu",
    biased: bool = False,
) -> Moe:
    """Normal values; every token has `top_k` different experts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = (2 if activation.gated else 1) * intermediate
    scores = normal(tokens, experts)
    made = Moe(
        normal(tokens, hidden).to(dtype),
        (normal(experts, rows, hidden) * hidden**-0.5).to(dtype),
        (normal(experts, hidden, intermediate) * intermediate**-0.5).to(dtype),
        scores.sort(dim=-1, descending=True).values[:, :top_k].softmax(dim=-1).contiguous(),
        scores.argsort(dim=-1, descending=True)[:, :top_k].to(ids).contiguous(),
    )
    if biased:
        made = replace(
            made, w13_bias=normal(experts, rows).to(dtype), w2_bias=normal(experts, hidden).to(dtype)
        )
    biases = {name: bias.to(device) for name, bias in made.biases.items()}
    return Moe(*(tensor.to(device) for tensor in made.tensors), **biases)


def interleaved(w13: torch.Tensor) -> torch.Tensor:
    """From gate rows then up rows to gate 0, up 0, gate 1, ...; of w13 or of its bias."""
    experts, rows = w13.shape[:2]
    return w13.view(experts, 2, rows // 2, -1).transpose(1, 2).reshape(w13.shape).contiguous()


@computed_once
def exact_moe(
    moe: Moe, activation: Activation = Activation.SILU, layout: W13Layout = W13Layout.CONCAT
) -> torch.Tensor:
    """The result in float64, slot by slot from the formula."""
    return composed_moe(moe, activation, layout, torch.float64)


@computed_once
def torch_moe(moe: Moe, activation: Activation = Activation.SILU) -> torch.Tensor:
    """In the tensors' dtype, with the combination in float32: the error that a kernel is measured against."""
    return composed_moe(moe, activation, W13Layout.CONCAT, moe.hidden_states.dtype)


def composed_moe(moe: Moe, activation: Activation, layout: W13Layout, dtype: torch.dtype) -> torch.Tensor:
    """The formula, slot by slot, in ``dtype``; autograd may record it."""
    combined = torch.float64 if dtype is torch.float64 else torch.float32
    result = torch.zeros(moe.hidden_states.shape, dtype=combined)
    # By rows and by experts, each converted once: autograd would make a gradient of all of them for each slot.
    rows = list(result.unbind())
    hidden, w13, w2 = (tensor.to(dtype).unbind() for tensor in (moe.hidden_states, moe.w13, moe.w2))
    for token, experts in enumerate(moe.topk_ids.tolist()):
        for choice, expert in enumerate(experts):
            if not 0 <= expert < len(w13):
                continue
            bias, second_bias = (
                None if each is None else each[expert].to(dtype) for each in (moe.w13_bias, moe.w2_bias)
            )
            projected = functional.linear(hidden[token], w13[expert], bias)
            if not activation.gated:
                between = ACTIVATIONS[activation](projected)
            elif layout is W13Layout.CONCAT:
                gate, up = projected.chunk(2)
                between = ACTIVATIONS[activation](gate) * factor_of(up, activation)
            else:
                between = ACTIVATIONS[activation](projected[::2]) * factor_of(projected[1::2], activation)
            down = functional.linear(between, w2[expert], second_bias).to(combined)
            rows[token] = rows[token] + moe.topk_weights[token, choice].to(combined) * down
    return (torch.stack(rows) if rows else result).to(dtype)


def assert_as_exact_as_torch(
    out: torch.Tensor, moe: Moe, activation: Activation = Activation.SILU, exact: torch.Tensor | None = None
) -> None:
    """Error against float64 at most twice PyTorch's, in the worst element and in the RMS, and a rounding more.

    PyTorch's error of one draw of a few numbers is chance: over 200 draws of one token of 16 numbers in float32 its RMS
    is 1.2 roundings and its least 0.44. So is its worst element of more: 7.3 to 14.1 roundings over 16 orders of
    the same 16 tokens of 144 numbers. The worst of several draws stands for it there, and where ours is above one's.
    """
    assert out.shape == moe.hidden_states.shape
    assert out.dtype == moe.hidden_states.dtype
    if exact is None:
        exact = exact_moe(moe, activation)
    if exact.numel() == 0:
        return
    size = exact.square().mean().sqrt()
    ours, theirs = out.double() - exact, [torch_moe(moe, activation).double() - exact]
    rounding = torch.finfo(out.dtype).eps * size
    if exact.numel() < FEW_NUMBERS or ours.abs().max() > 2 * theirs[0].abs().max() + 2 * rounding:
        theirs += [size * error for error in _relative_errors_of_other_draws(moe, activation)]
    assert ours.abs().max() <= 2 * max(error.abs().max() for error in theirs) + 2 * rounding
    their_rms = max(error.square().mean().sqrt() for error in theirs)
    assert ours.square().mean().sqrt() <= 2 * their_rms + 0.25 * rounding


@computed_once
def _relative_errors_of_other_draws(moe: Moe, activation: Activation) -> list[torch.Tensor]:
    """PyTorch's errors, over the result's RMS, for the same tokens with their numbers in another order."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(15):
        order = torch.randperm(moe.hidden_states.shape[1], generator=generator)
        other = replace(moe, hidden_states=moe.hidden_states[:, order])
        exact = exact_moe(other, activation)
        size = exact.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        errors.append((torch_moe(other, activation).double() - exact) / size)
    return errors
