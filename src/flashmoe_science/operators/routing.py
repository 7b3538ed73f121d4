"""``torch.ops.flashmoe_science.topk_routing``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashmoe_science.cpu import routing as cpu
from flashmoe_science.cuda.moe import topk as cuda
from flashmoe_science.direct import all_direct
from flashmoe_science.moe_arguments import Scores, check_topk_arguments, parse_choice
from flashmoe_science.operators import folding
from flashmoe_science.operators.library import define
from flashmoe_science.operators.recording import below_autograd, is_recorded, record, reject_tangents
from flashmoe_science.operators.sharding import Rule
from flashmoe_science.routing_gradients import logits_gradient
from flashmoe_science.routing_options import RoutingOptions
from flashmoe_science.torch_private import is_batched

Routing = tuple[torch.Tensor, torch.Tensor]
"""Weights and ids."""


def _on_cpu(
    logits: torch.Tensor,
    k: int,
    scores: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    return cpu.topk(
        logits,
        k,
        scores=parse_choice(Scores, scores, "scores"),
        renormalize=renormalize,
        correction_bias=correction_bias,
        scaling_factor=scaling_factor,
        groups=groups,
        top_groups=top_groups,
    )


def _on_cuda(
    logits: torch.Tensor,
    k: int,
    scores: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    return cuda.topk(
        logits,
        k,
        scores=parse_choice(Scores, scores, "scores"),
        renormalize=renormalize,
        bias=correction_bias,
        scale=scaling_factor,
        groups=groups,
        top_groups=top_groups,
    )


def _fake(
    logits: torch.Tensor,
    k: int,
    scores: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    parse_choice(Scores, scores, "scores")
    check_topk_arguments(
        logits,
        k,
        renormalize,
        correction_bias,
        1.0 if isinstance(scaling_factor, torch.SymFloat) else scaling_factor,
        groups,
        top_groups,
    )
    shape = logits.shape[0], k
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


class _Routing(torch.autograd.Function):
    """Keeps the logits and the choice."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        k: int,
        scores: str,
        renormalize: bool,
        correction_bias: torch.Tensor | None,
        scaling_factor: float,
        groups: int,
        top_groups: int,
    ) -> Routing:
        weights, ids = below_autograd(
            TOPK_ROUTING, logits, k, scores, renormalize, correction_bias, scaling_factor, groups, top_groups
        )
        ctx.scores, ctx.renormalize, ctx.scaling_factor = scores, renormalize, scaling_factor
        ctx.save_for_backward(logits, ids)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        return weights, ids

    @staticmethod
    def backward(ctx: Any, grad_weights: torch.Tensor | None, grad_ids: None) -> Any:
        if grad_weights is None:
            return (None,) * 8
        # Tensors that hooks saved and restored need not have the forward's strides.
        logits, ids = (tensor.contiguous() for tensor in ctx.saved_tensors)
        kind = parse_choice(Scores, ctx.scores, "scores")
        direct = all_direct(logits, ids, grad_weights) and not is_batched(grad_weights)
        if logits.is_cpu and not torch.is_grad_enabled() and direct:
            options = RoutingOptions(kind, ctx.renormalize, ctx.scaling_factor)
            gradient = cpu.backward(logits, ids, None, grad_weights.contiguous(), None, None, options)
            return (gradient, *(None,) * 7)
        # In operations that can be differentiated again, traced and mapped.
        gradient = logits_gradient(
            grad_weights,
            logits,
            ids,
            scores=kind,
            renormalize=ctx.renormalize,
            scaling_factor=ctx.scaling_factor,
        )
        return (gradient, *(None,) * 7)


def _recorded(
    logits: torch.Tensor,
    k: int,
    scores: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    reject_tangents("topk_routing", logits, correction_bias)
    arguments = logits, k, scores, renormalize, correction_bias, scaling_factor, groups, top_groups
    weights, ids = (
        record(_Routing, *arguments) if is_recorded(logits) else below_autograd(TOPK_ROUTING, *arguments)
    )
    return weights, ids


def _vmapped(
    mapping: folding.Mapping,
    dimensions: Sequence[int | None],
    logits: torch.Tensor,
    k: int,
    scores: str = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Any, Any]:
    """Mapped tokens are more tokens. Where the bias is mapped there is one call for each."""
    size, options = mapping.batch_size, (scaling_factor, groups, top_groups)
    of_bias = dimensions[4] if correction_bias is not None else None
    if correction_bias is None or of_bias is None:
        folded = folding.fold(logits, dimensions[0], size).contiguous()
        results = TOPK_ROUTING(folded, k, scores, renormalize, correction_bias, *options)
        return tuple(folding.unfold(result, size) for result in results), (0, 0)
    each = zip(
        folding.mapped_first(logits, dimensions[0], size).unbind(),
        correction_bias.movedim(of_bias, 0).unbind(),
        strict=True,
    )
    calls = [
        TOPK_ROUTING(one.contiguous(), k, scores, renormalize, bias.contiguous(), *options)
        for one, bias in each
    ]
    return tuple(torch.stack(results) for results in zip(*calls, strict=True)), (0, 0)


def _sharding(
    logits: Any,
    k: int,
    scores: str = "softmax",
    renormalize: bool = True,
    correction_bias: Any = None,
    *options: Any,
    **named: Any,
) -> Rule:
    from torch.distributed.tensor import Replicate, Shard

    whole, tokens = Replicate(), Shard(0)
    bias = [] if correction_bias is None else [whole]
    return [([whole, whole], [whole, *bias]), ([tokens, tokens], [tokens, *bias])]


TOPK_ROUTING = define(
    'topk_routing(Tensor logits, int k, str scores="softmax", bool renormalize=True, Tensor? correction_bias=None,'
    " float scaling_factor=1.0, int groups=1, int top_groups=1) -> (Tensor weights, Tensor ids)",
    cpu=_on_cpu,
    cuda=_on_cuda,
    fake=_fake,
    recorded=_recorded,
    flops="it multiplies no matrices",
    sharding=_sharding,
    kept=True,
)
"""`flashmoe_science.topk_routing`; arguments, results and errors as there."""

folding.register("topk_routing", _vmapped)
