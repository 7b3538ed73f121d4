"""The backward pass of a mixture of experts in PyTorch's operations, for any device and dtype, float64 too.

Used where a device has no kernel for it. One expert after the other: on CUDA the host waits for the number of slots of
each expert, so a call cannot be captured in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from flashmoe_science.moe_arguments import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT, Activation, W13Layout
from flashmoe_science.moe_gradients import MoeGradients, MoeNeeds, MoeTensors


def slots_by_expert(topk_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[int]]:
    """Valid slots in sorted order (`moe_gradients.MoeTrainingForward`), and the number of slots of each expert."""
    ids = topk_ids.flatten().long()
    keys = torch.where((ids >= 0) & (ids < experts), ids, experts)
    counts: list[int] = torch.bincount(keys, minlength=experts + 1)[:experts].tolist()
    return torch.sort(keys, stable=True).indices[: sum(counts)], counts


def split_projections(z: torch.Tensor, layout: W13Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of a gated activation, from z (rows, 2 * intermediate) with its columns as w13's rows."""
    if layout is W13Layout.INTERLEAVED:
        return z[:, ::2], z[:, 1::2]
    gate, up = z.chunk(2, dim=1)
    return gate, up


def join_projections(gate: torch.Tensor, up: torch.Tensor, layout: W13Layout) -> torch.Tensor:
    """The inverse of `split_projections`."""
    if layout is W13Layout.INTERLEAVED:
        return torch.stack((gate, up), dim=2).flatten(1)
    return torch.cat((gate, up), dim=1)


def activate(z: torch.Tensor, activation: Activation, layout: W13Layout) -> torch.Tensor:
    """What the second product takes, (rows, intermediate), from the first one's z (rows, rows of w13)."""
    if not activation.gated:
        return _VALUES_AND_SLOPES[activation](z)[0]
    gate, up = split_projections(z, layout)
    return _VALUES_AND_SLOPES[activation](gate)[0] * _factor_and_slope(up, activation)[0]


def differentiate(
    z: torch.Tensor, grad: torch.Tensor, activation: Activation, layout: W13Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """`activate` of z, and the gradient of z from that of the result."""
    if not activation.gated:
        value, slope = _VALUES_AND_SLOPES[activation](z)
        return value, grad * slope
    gate, up = split_projections(z, layout)
    value, slope = _VALUES_AND_SLOPES[activation](gate)
    factor, of_factor = _factor_and_slope(up, activation)
    return value * factor, join_projections(grad * factor * slope, grad * value * of_factor, layout)


def backward(
    grad_output: torch.Tensor,
    tensors: MoeTensors,
    z: torch.Tensor | None,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    needs: MoeNeeds,
) -> MoeGradients:
    """See `flashmoe_science.moe_gradients.MoeBackward`. Products are in the tensors' dtype, under autocast too; the
    rest is in float32.
    """
    with torch.autocast(tensors.hidden_states.device.type, enabled=False):
        return _backward(grad_output, tensors, z, activation, w13_layout, needs)


def _backward(
    grad_output: torch.Tensor,
    tensors: MoeTensors,
    z: torch.Tensor | None,
    activation: Activation,
    w13_layout: W13Layout,
    needs: MoeNeeds,
) -> MoeGradients:
    hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias = tensors
    dtype = hidden_states.dtype
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    tokens, k = topk_ids.shape
    hidden = hidden_states.shape[1]
    order, counts = slots_by_expert(topk_ids, w13.shape[0])
    scores = topk_weights.flatten().to(exact)
    of_slots = hidden_states.new_zeros(tokens * k, hidden) if needs.hidden_states else None
    of_w13 = torch.zeros_like(w13) if needs.w13 else None
    of_w2 = torch.zeros_like(w2) if needs.w2 else None
    of_weights = torch.zeros_like(topk_weights) if needs.topk_weights else None
    of_w13_bias = torch.zeros_like(w13_bias) if needs.w13_bias and w13_bias is not None else None
    of_w2_bias = torch.zeros_like(w2_bias) if needs.w2_bias and w2_bias is not None else None
    end = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        begin, end = end, end + count
        slots = order[begin:end]
        rows = slots // k
        x, incoming, score = hidden_states[rows], grad_output[rows], scores[slots, None]
        if z is None:
            bias = None if w13_bias is None else w13_bias[expert]
            projected = functional.linear(x, w13[expert], bias).to(exact)
        else:
            projected = z[begin:end].to(exact)
        unweighted = (incoming @ w2[expert]).to(exact)
        between, of_z = differentiate(projected, unweighted * score, activation, w13_layout)
        rounded = of_z.to(dtype)
        if of_slots is not None:
            of_slots[slots] = rounded @ w13[expert]
        if of_weights is not None:
            of_score = (unweighted * between).sum(dim=1)
            if w2_bias is not None:
                of_score = of_score + incoming.to(exact) @ w2_bias[expert].to(exact)
            of_weights.view(-1)[slots] = of_score.to(of_weights.dtype)
        if of_w2 is not None:
            of_w2[expert] = incoming.t() @ (between * score).to(dtype)
        if of_w13 is not None:
            of_w13[expert] = rounded.t() @ x
        if of_w13_bias is not None:
            of_w13_bias[expert] = of_z.sum(dim=0)
        if of_w2_bias is not None:
            of_w2_bias[expert] = (incoming.to(exact) * score).sum(dim=0)
    summed = None
    if of_slots is not None:
        summed = of_slots.view(tokens, k, hidden).sum(dim=1, dtype=exact).to(dtype)
    return MoeGradients(summed, of_w13, of_w2, of_weights, of_w13_bias, of_w2_bias)


ValueAndSlope = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _silu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = x.sigmoid()
    return functional.silu(x), sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    below = 0.5 * torch.special.erfc(x * -math.sqrt(0.5))
    return functional.gelu(x), below + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # 0.5 * (1 + tanh(t / 2)) is the sigmoid of t.
    scale, cubic = math.sqrt(8 / math.pi), 0.044715
    square = x * x
    sigmoid = torch.sigmoid(scale * (x + cubic * square * x))
    slope = sigmoid + x * sigmoid * (1 - sigmoid) * scale * (1 + 3 * cubic * square)
    return functional.gelu(x, approximate="tanh"), slope


def _relu2(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positive = x.relu()
    return positive.square(), 2 * positive


def _swiglu_oai(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate = x.clamp(max=SWIGLU_OAI_LIMIT)
    sigmoid = torch.sigmoid(SWIGLU_OAI_ALPHA * gate)
    slope = sigmoid + SWIGLU_OAI_ALPHA * gate * sigmoid * (1 - sigmoid)
    return gate * sigmoid, torch.where(x <= SWIGLU_OAI_LIMIT, slope, 0.0)


def _factor_and_slope(up: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor | float]:
    """What the activated gate is multiplied by."""
    if activation is not Activation.SWIGLU_OAI:
        return up, 1.0
    factor = up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT) + 1
    return factor, (up.abs() <= SWIGLU_OAI_LIMIT).to(up.dtype)


_VALUES_AND_SLOPES: dict[Activation, ValueAndSlope] = {
    Activation.SILU: _silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.SILU_NO_MUL: _silu,
    Activation.GELU_NO_MUL: _gelu,
    Activation.RELU2_NO_MUL: _relu2,
    Activation.SWIGLU_OAI: _swiglu_oai,
}
