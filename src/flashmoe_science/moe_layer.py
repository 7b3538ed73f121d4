"""A mixture of experts as a module: router, experts, and the router's losses."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from flashmoe_science.errors import InputError
from flashmoe_science.moe import fused_moe, topk_routing
from flashmoe_science.moe_arguments import Activation, parse_choice
from flashmoe_science.router_losses import RoutingLosses, routing_losses

_PER_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down projections as checkpoints with a tensor for each expert call them: Qwen and OLMoE; Mixtral."""


class MoE(nn.Module):
    """Each token's k best experts, chosen by a router, weighted and summed.

    Parameters are called as those of transformers' blocks (``gate.weight``, ``experts.gate_up_proj``,
    ``experts.down_proj``), so that ``load_state_dict`` takes the state of a Qwen3-MoE, Mixtral or OLMoE block. It also
    takes their checkpoints' older form, with a tensor for each expert and projection.

    Args:
        hidden, intermediate: sizes, multiples of 16.
        experts, top_k: how many there are, and how many a token takes.
        activation: as of `fused_moe`.
        scores, renormalize, scaling_factor: as of `topk_routing`. Qwen3-MoE and Mixtral renormalise, OLMoE does not.
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
        scores: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scaling_factor: float = 1.0,
        recompute: bool = False,
        initializer_range: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise InputError(f"top_k is {top_k} with {experts} experts; expected 1 to {experts}")
        rows = intermediate * (2 if parse_choice(Activation, activation, "activation").gated else 1)
        self.top_k, self.activation, self.scores = top_k, activation, scores
        self.renormalize, self.scaling_factor, self.recompute = renormalize, scaling_factor, recompute
        self.initializer_range = initializer_range

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))

        self.gate = nn.Module()
        self.gate.weight = parameter(experts, hidden)
        self.experts = nn.Module()
        self.experts.gate_up_proj = parameter(experts, rows, hidden)
        self.experts.down_proj = parameter(experts, hidden, intermediate)
        self.register_load_state_dict_pre_hook(_join_experts)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh normal weights."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=self.initializer_range)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., hidden) to the same."""
        return self._run(hidden_states)[0]

    def forward_with_losses(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, RoutingLosses]:
        """The output and the router's losses of these tokens."""
        output, logits, ids = self._run(hidden_states)
        return output, routing_losses(logits, ids)

    def _run(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = functional.linear(tokens, self.gate.weight)  # type: ignore[arg-type]
        weights, ids = topk_routing(
            logits,
            self.top_k,
            scores=self.scores,
            renormalize=self.renormalize,
            scaling_factor=self.scaling_factor,
        )
        w13, w2 = self.experts.gate_up_proj, self.experts.down_proj
        output = fused_moe(
            tokens.contiguous(),
            w13,  # type: ignore[arg-type]
            w2,  # type: ignore[arg-type]
            weights,
            ids,
            activation=self.activation,
            recompute=self.recompute,
        )
        return output.view(hidden_states.shape), logits, ids

    def extra_repr(self) -> str:
        experts, hidden, intermediate = self.experts.down_proj.shape  # type: ignore[misc]
        return f"{hidden}, {intermediate}, {self.top_k} of {experts}, {self.activation}"


def _join_experts(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Tensors of single experts become those of all, in place."""
    for gate, up, down in _PER_EXPERT:
        if f"{prefix}experts.0.{down}.weight" not in state:
            continue
        count = sum(1 for name in state if _is_of_an_expert(name, prefix, down))
        gates, ups, downs = (_take(state, prefix, name, count) for name in (gate, up, down))
        state[f"{prefix}experts.gate_up_proj"] = torch.cat((torch.stack(gates), torch.stack(ups)), dim=1)
        state[f"{prefix}experts.down_proj"] = torch.stack(downs)


def _is_of_an_expert(name: str, prefix: str, projection: str) -> bool:
    return name.startswith(f"{prefix}experts.") and name.endswith(f".{projection}.weight")


def _take(state: dict[str, Any], prefix: str, projection: str, count: int) -> list[torch.Tensor]:
    names = [f"{prefix}experts.{expert}.{projection}.weight" for expert in range(count)]
    missing = [name for name in names if name not in state]
    if missing:
        raise InputError(
            f"the state dict has no {missing[0]}; expected one of each projection for every expert"
        )
    return [state.pop(name) for name in names]
