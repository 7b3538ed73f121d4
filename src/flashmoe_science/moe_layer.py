"""A mixture of experts as a module: router, experts, and the router's losses."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from flashmoe_science import autocast
from flashmoe_science.arguments import check_dense, check_flag, is_finite
from flashmoe_science.errors import InputError
from flashmoe_science.moe import fused_moe, topk_routing
from flashmoe_science.moe_arguments import (
    Activation,
    Scores,
    W13Layout,
    check_moe_arguments,
    check_topk_arguments,
    parse_choice,
)
from flashmoe_science.moe_capacity import limit_to_capacity, tokens_per_expert
from flashmoe_science.moe_states import BY_TURNS, convert_state
from flashmoe_science.router_losses import RoutingLosses, topk_routing_with_losses


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
        correction_bias: the choice is made by scores with a bias, the buffer ``gate.e_score_correction_bias``, which
            stays float32 where the module is cast. The router's product is then in float32, too (DeepSeek-V3).
        router_bias: the router has a bias, ``gate.bias`` (GPT-OSS).
        bias: both products of an expert have one, ``experts.gate_up_proj_bias`` and ``experts.down_proj_bias``
            (GPT-OSS).
        shared_experts: that every token takes besides, with a weight of 1. They are the last of the experts' tensors,
            so that the same launches compute them.
        capacity_factor: an expert takes at most this many times its equal share of the slots, rounded up; slots beyond
            it are dropped (`limit_to_capacity`). None: none are.
        recompute: keep no projections for the backward pass, as of `fused_moe`.
        main_gradients: the backward pass adds the gradients of ``experts.gate_up_proj`` and ``experts.down_proj`` to
            their ``main_grad``, a float32 buffer like the weight, as Megatron has it. `fused_moe` says more. A weight
            without one gets its gradient from autograd.
        initializer_range: standard deviation of fresh weights.
        device, dtype: of the parameters.

    Raises:
        InputError: options that do not fit together; of a call, tokens that do not fit the layer.
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
        main_gradients: bool = False,
        initializer_range: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = parse_choice(Activation, activation, "activation")
        _check_whole(1, hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
        _check_whole(0, shared_experts=shared_experts)
        flags = {
            "correction_bias": correction_bias,
            "router_bias": router_bias,
            "bias": bias,
            "recompute": recompute,
            "main_gradients": main_gradients,
        }
        for name, flag in flags.items():
            check_flag(name, flag)
        if top_k > experts:
            raise InputError(f"top_k is {top_k} with {experts} experts; expected 1 to {experts}")
        if capacity_factor is not None and not (is_finite(capacity_factor) and capacity_factor > 0):
            raise InputError(f"capacity_factor is {capacity_factor!r}; expected a number above 0, or None")
        if not (is_finite(initializer_range) and initializer_range >= 0):
            raise InputError(f"initializer_range is {initializer_range!r}; expected a number, 0 or more")
        rows, every = intermediate * (2 if kind.gated else 1), experts + shared_experts
        _check_sizes(hidden, rows, intermediate, every, kind)
        logits = torch.empty((0, experts), device="meta", dtype=torch.float32)
        check_topk_arguments(logits, top_k, renormalize, None, scaling_factor, groups, top_groups)
        self.hidden, self.top_k, self.activation = hidden, top_k, kind.value
        self.scores = parse_choice(Scores, scores, "scores").value
        self.w13_layout = parse_choice(W13Layout, w13_layout, "w13_layout").value
        self.renormalize, self.scaling_factor, self.recompute = renormalize, scaling_factor, recompute
        self.groups, self.top_groups, self.main_gradients = groups, top_groups, main_gradients
        self.routed_experts, self.shared_experts = experts, shared_experts
        self.capacity_factor = capacity_factor
        self.initializer_range = initializer_range

        def add(module: nn.Module, name: str, *sizes: int, there: bool = True) -> None:
            made = nn.Parameter(torch.empty(sizes, device=device, dtype=dtype)) if there else None
            module.register_parameter(name, made)

        self.gate, self.experts = nn.Module(), nn.Module()
        add(self.gate, "weight", experts, hidden)
        add(self.gate, "bias", experts, there=router_bias)
        correction = torch.zeros(experts, device=device, dtype=torch.float32) if correction_bias else None
        self.gate.register_buffer("e_score_correction_bias", correction)
        add(self.experts, "gate_up_proj", every, rows, hidden)
        by_turns = W13Layout(self.w13_layout) is W13Layout.INTERLEAVED and kind.gated
        # Of the layer's state alone: transformers' fused tensors have the same names, and all gate rows first.
        self.experts.register_buffer(
            BY_TURNS, torch.ones((), device=device, dtype=torch.uint8) if by_turns else None
        )
        add(self.experts, "down_proj", every, hidden, intermediate)
        add(self.experts, "gate_up_proj_bias", every, rows, there=bias)
        add(self.experts, "down_proj_bias", every, hidden, there=bias)
        self.register_load_state_dict_pre_hook(convert_state)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh normal weights; biases of zero, the correction of the choice among them. What a module made on the
        meta device holds after ``to_empty()`` is made so, too.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self.initializer_range)
        for name, buffer in self.named_buffers():
            buffer.fill_(1 if name.endswith(BY_TURNS) else 0)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., hidden) to the same."""
        tokens = self._tokens(hidden_states)
        weights, ids = topk_routing(self._logits(tokens), self.top_k, **self._routing())
        return self._mix(tokens, weights, self._within_capacity(ids)).view(hidden_states.shape)

    def forward_with_losses(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, RoutingLosses]:
        """The output, and of these tokens the router's losses and how many slots each routed expert takes.

        The losses are of the router's choice, also where a capacity drops slots of it: a popular expert stands at its
        capacity, so from what is left nobody could tell how much too popular it is.
        """
        tokens = self._tokens(hidden_states)
        weights, ids, losses = topk_routing_with_losses(self._logits(tokens), self.top_k, **self._routing())
        if self.capacity_factor is not None:
            ids = self._within_capacity(ids)
            taken = tokens_per_expert(ids, self.routed_experts)
            losses = RoutingLosses(losses.load_balancing, losses.z, taken)
        return self._mix(tokens, weights, ids).view(hidden_states.shape), losses

    def _tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden). PyTorch's words about what does not fit would be of a product of matrices."""
        if not is_dynamo_compiling():
            self._check_tokens(hidden_states)
        return hidden_states.reshape(-1, hidden_states.shape[-1])

    def _check_tokens(self, hidden_states: torch.Tensor) -> None:
        check_dense(hidden_states=hidden_states)
        if hidden_states.dim() == 0 or hidden_states.shape[-1] != self.hidden:
            raise InputError(
                f"hidden_states has shape {tuple(hidden_states.shape)}; expected (..., {self.hidden})"
            )
        weight: Any = self.experts.down_proj
        if hidden_states.dtype != weight.dtype and not autocast.is_on():
            raise InputError(
                f"hidden_states is {hidden_states.dtype} but the experts are {weight.dtype}; "
                "expected one dtype: convert with .to(), or use torch.autocast"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        """The correction of the choice stays float32 where the module is cast: it differs by less than 16 bits hold."""
        gate: Any = self.gate
        before = gate.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = gate.e_score_correction_bias
        if after is not None and after.dtype is not torch.float32:
            gate.e_score_correction_bias = before.to(after.device, torch.float32)
        return self

    def _routing(self) -> dict[str, Any]:
        """Options of `topk_routing`."""
        gate: Any = self.gate
        correction = gate.e_score_correction_bias
        return {
            "scores": self.scores,
            "renormalize": self.renormalize,
            "correction_bias": None if correction is None else correction.float(),
            "scaling_factor": self.scaling_factor,
            "groups": self.groups,
            "top_groups": self.top_groups,
        }

    def _within_capacity(self, ids: torch.Tensor) -> torch.Tensor:
        if self.capacity_factor is None:
            return ids
        # Whole numbers alone: torch.export keeps no rounding of a symbol.
        factor = Fraction(float(self.capacity_factor)).limit_denominator(1 << 30) or Fraction(1, 1 << 30)
        slots, share = ids.numel() * factor.numerator, self.routed_experts * factor.denominator
        return limit_to_capacity(ids, self.routed_experts, (slots + share - 1) // share)

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
            main_gradients=self._main_gradients(),
        )

    def _main_gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """Of both weights of the experts, where autograd records and they are asked for."""
        if not self.main_gradients or not torch.is_grad_enabled():
            return None
        first, second = (
            getattr(weight, "main_grad", None)
            for weight in (self.experts.gate_up_proj, self.experts.down_proj)
        )
        return None if first is second is None else (first, second)

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
        shape = ids.shape[0], self.shared_experts  # len() is no symbol under torch.export
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


def _check_whole(least: int, **numbers: object) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise InputError(f"{name} is {number!r}; expected a whole number, {least} or more")


def _check_sizes(hidden: int, rows: int, intermediate: int, experts: int, activation: Activation) -> None:
    """What `fused_moe` will ask of the weights."""

    def shaped(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    check_moe_arguments(
        shaped(0, hidden),
        shaped(experts, rows, hidden),
        shaped(experts, hidden, intermediate),
        shaped(0, 1),
        shaped(0, 1, dtype=torch.int32),
        activation,
    )
