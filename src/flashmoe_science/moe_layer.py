"""A mixture of experts as a module: router, experts, and the router's losses."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from flashmoe_science.errors import InputError
from flashmoe_science.moe import fused_moe, topk_routing
from flashmoe_science.moe_arguments import Activation, W13Layout, parse_choice
from flashmoe_science.moe_capacity import limit_to_capacity
from flashmoe_science.moe_states import convert_state
from flashmoe_science.router_losses import RoutingLosses, routing_losses, topk_routing_with_losses


class MoE(nn.Module):
    """Each token's k best experts, chosen by a router, weighted and summed.

    Parameters are called as those of transformers' blocks (``gate.weight``, ``experts.gate_up_proj``,
    ``experts.down_proj``), so that ``load_state_dict`` takes the state of a Qwen3-MoE, Mixtral, OLMoE, GPT-OSS or
    DeepSeek-V3 block. It also takes their checkpoints' older form, with a tensor for each expert and projection.

    Args:
        hidden, intermediate: sizes, multiples of 16.
        experts, top_k: how many there are, and how many a token takes.
        activation, w13_layout: as of `fused_moe`.
        scores, renormalize, scaling_factor, groups, top_groups: as of `topk_routing`. Qwen3-MoE and Mixtral
            renormalise, OLMoE does not.
        correction_bias: the choice is made by scores with a bias, the buffer ``gate.e_score_correction_bias`` in
            float32. The router's product is then in float32, too (DeepSeek-V3).
        router_bias: the router has a bias, ``gate.bias`` (GPT-OSS).
        bias: both products of an expert have one, ``experts.gate_up_proj_bias`` and ``experts.down_proj_bias``
            (GPT-OSS).
        shared_experts: that every token takes besides, with a weight of 1. They are the last of the experts' tensors,
            so that the same launches compute them.
        capacity_factor: an expert takes at most this many times its equal share of the slots, rounded up; slots beyond
            it are dropped (`limit_to_capacity`). None: none are.
        recompute: keep no projections for the backward pass, as of `fused_moe`.
        initializer_range: standard deviation of fresh weights.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        *,
        activation: str = "silu",
        w13_layout: str = "concat",
        scores: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scaling_factor: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        correction_bias: bool = False,
        router_bias: bool = False,
        bias: bool = False,
        shared_experts: int = 0,
        capacity_factor: float | None = None,
        recompute: bool = False,
        initializer_range: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise InputError(f"top_k is {top_k} with {experts} experts; expected 1 to {experts}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise InputError(f"capacity_factor is {capacity_factor!r}; expected a number above 0, or None")
        rows = intermediate * (2 if parse_choice(Activation, activation, "activation").gated else 1)
        self.top_k, self.activation, self.scores = top_k, activation, scores
        self.w13_layout = parse_choice(W13Layout, w13_layout, "w13_layout").value
        self.renormalize, self.scaling_factor, self.recompute = renormalize, scaling_factor, recompute
        self.groups, self.top_groups = groups, top_groups
        self.routed_experts, self.shared_experts = experts, shared_experts
        self.capacity_factor = capacity_factor
        self.initializer_range = initializer_range

        def add(module: nn.Module, name: str, *sizes: int, there: bool = True) -> None:
            made = nn.Parameter(torch.empty(sizes, device=device, dtype=dtype)) if there else None
            module.register_parameter(name, made)

        every = experts + shared_experts
        self.gate, self.experts = nn.Module(), nn.Module()
        add(self.gate, "weight", experts, hidden)
        add(self.gate, "bias", experts, there=router_bias)
        correction = torch.zeros(experts, device=device, dtype=torch.float32) if correction_bias else None
        self.gate.register_buffer("e_score_correction_bias", correction)
        add(self.experts, "gate_up_proj", every, rows, hidden)
        add(self.experts, "down_proj", every, hidden, intermediate)
        add(self.experts, "gate_up_proj_bias", every, rows, there=bias)
        add(self.experts, "down_proj_bias", every, hidden, there=bias)
        self.register_load_state_dict_pre_hook(convert_state)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh normal weights; biases of zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self.initializer_range)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., hidden) to the same."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = topk_routing(self._logits(tokens), self.top_k, **self._routing())
        return self._mix(tokens, weights, self._within_capacity(ids)).view(hidden_states.shape)

    def forward_with_losses(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, RoutingLosses]:
        """The output, and of these tokens the router's losses and how many slots each routed expert takes."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self._logits(tokens)
        if self.capacity_factor is None:
            weights, ids, losses = topk_routing_with_losses(logits, self.top_k, **self._routing())
        else:
            weights, ids = topk_routing(logits, self.top_k, **self._routing())
            ids = self._within_capacity(ids)
            losses = routing_losses(logits, ids)  # without the slots that are dropped
        return self._mix(tokens, weights, ids).view(hidden_states.shape), losses

    def _routing(self) -> dict[str, Any]:
        """Options of `topk_routing`."""
        gate: Any = self.gate
        return {
            "scores": self.scores,
            "renormalize": self.renormalize,
            "correction_bias": gate.e_score_correction_bias,
            "scaling_factor": self.scaling_factor,
            "groups": self.groups,
            "top_groups": self.top_groups,
        }

    def _within_capacity(self, ids: torch.Tensor) -> torch.Tensor:
        if self.capacity_factor is None:
            return ids
        share = ids.numel() / self.routed_experts
        return limit_to_capacity(ids, self.routed_experts, math.ceil(self.capacity_factor * share))

    def _mix(self, tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden), from each token's routed experts and the shared ones."""
        experts: Any = self.experts
        chosen_weights, chosen = self._with_shared(weights, ids)
        return fused_moe(
            tokens.contiguous(),
            experts.gate_up_proj,
            experts.down_proj,
            chosen_weights,
            chosen,
            activation=self.activation,
            w13_layout=self.w13_layout,
            w13_bias=experts.gate_up_proj_bias,
            w2_bias=experts.down_proj_bias,
            recompute=self.recompute,
        )

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        gate: Any = self.gate
        if gate.e_score_correction_bias is None:
            return functional.linear(tokens, gate.weight, gate.bias)
        with torch.autocast(tokens.device.type, enabled=False):
            bias = None if gate.bias is None else gate.bias.float()
            return functional.linear(tokens.float(), gate.weight.float(), bias)

    def _with_shared(self, weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The routing with the shared experts behind each token's choices."""
        if self.shared_experts == 0:
            return weights, ids
        shape = len(ids), self.shared_experts
        last = self.routed_experts + self.shared_experts
        shared = torch.arange(self.routed_experts, last, dtype=ids.dtype, device=ids.device)
        return (
            torch.cat((weights, weights.new_ones(shape)), dim=1),
            torch.cat((ids, shared.expand(shape)), dim=1),
        )

    def extra_repr(self) -> str:
        _, hidden, intermediate = self.experts.down_proj.shape  # type: ignore[misc]
        shared = f", {self.shared_experts} shared" if self.shared_experts else ""
        return f"{hidden}, {intermediate}, {self.top_k} of {self.routed_experts}{shared}, {self.activation}"
