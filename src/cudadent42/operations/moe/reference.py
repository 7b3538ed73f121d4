"""The mixture of experts in float64, and in PyTorch's operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from cudadent42.operations.interface import OnChunk, nothing
from cudadent42.operations.moe.inputs import MoeInputs


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """GPT-OSS's, whose model code has these numbers."""
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu": lambda gate, up: functional.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "swigluoai": _swiglu_oai,
}
_UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_no_mul": functional.silu,
    "gelu_no_mul": functional.gelu,
    "relu2_no_mul": lambda x: functional.relu(x).square(),
}
_CHUNK_ENTRIES = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Entries of one expert's intermediate values held at a time in float64."""


def activate(projected: Tensor, activation: str, w13_layout: str = "concat") -> Tensor:
    """From (rows, 2 * intermediate), gate then up or both by turns, or (rows, intermediate) without a gate, to
    (rows, intermediate)."""
    if activation in _UNGATED:
        return _UNGATED[activation](projected)
    if w13_layout == "interleaved":
        gate, up = projected[..., ::2], projected[..., 1::2]
    else:
        gate, up = projected.chunk(2, dim=-1)
    return _GATED[activation](gate, up)


def moe_float64(inputs: MoeInputs, activation: str, on_chunk: OnChunk = nothing) -> Tensor:
    """The result in float64, (tokens, hidden), expert by expert; ``on_chunk`` is called after each part.

    An id outside the experts contributes nothing.
    """
    experts, _, intermediate = inputs.w2.shape
    result = torch.zeros(inputs.hidden_states.shape, dtype=torch.float64, device=inputs.w2.device)
    rows = max(1, _CHUNK_ENTRIES[inputs.w2.device.type] // intermediate)
    for expert in _chosen(inputs.topk_ids, experts):
        token, slot = torch.nonzero(inputs.topk_ids == expert, as_tuple=True)
        w13, w2 = inputs.w13[expert].double(), inputs.w2[expert].double()
        of_w13, of_w2 = (
            (0.0, 0.0) if inputs.biases is None else (each[expert].double() for each in inputs.biases)
        )
        for begin in range(0, len(token), rows):
            part, choice = token[begin : begin + rows], slot[begin : begin + rows]
            projected = inputs.hidden_states[part].double() @ w13.T + of_w13
            between = activate(projected, activation, inputs.w13_layout)
            weight = inputs.topk_weights[part, choice, None].double()
            result.index_add_(0, part, weight * (between @ w2.T + of_w2))
            on_chunk()
    return result


def expert_loop(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    w13_layout: str = "concat",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """PyTorch's usual loop: the rows of each expert gathered, two products, the results added to the output."""
    result = torch.zeros_like(hidden_states)
    for expert in _chosen(topk_ids, w13.shape[0]):
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        of_w13, of_w2 = (None if bias is None else bias[expert] for bias in (w13_bias, w2_bias))
        projected = functional.linear(hidden_states.index_select(0, token), w13[expert], of_w13)
        between = activate(projected, activation, w13_layout)
        weight = topk_weights[token, slot, None].to(between.dtype)
        result.index_add_(0, token, functional.linear(between, w2[expert], of_w2) * weight)
    return result


def yardstick(inputs: MoeInputs, activation: str) -> Tensor:
    """PyTorch's float32, with intermediate values, each expert's result and the sum rounded to the dtype: what can be
    asked of a kernel. ``expert_loop`` rounds the projections, the activation and every partial sum besides, and its
    error would let a result through that is scaled by 1 %."""
    hidden_states, dtype = inputs.hidden_states, inputs.hidden_states.dtype
    result = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for expert in _chosen(inputs.topk_ids, inputs.w13.shape[0]):
        token, slot = torch.nonzero(inputs.topk_ids == expert, as_tuple=True)
        of_w13, of_w2 = (
            (None, None) if inputs.biases is None else (each[expert].float() for each in inputs.biases)
        )
        projected = functional.linear(hidden_states[token].float(), inputs.w13[expert].float(), of_w13)
        between = activate(projected, activation, inputs.w13_layout).to(dtype)
        down = functional.linear(between.float(), inputs.w2[expert].float(), of_w2).to(dtype)
        result.index_add_(0, token, inputs.topk_weights[token, slot, None] * down)
    return result.to(dtype)


def _chosen(topk_ids: Tensor, experts: int) -> list[int]:
    """The experts that a token chose, ascending."""
    ids: list[int] = torch.unique(topk_ids).tolist()
    return [expert for expert in ids if 0 <= expert < experts]
