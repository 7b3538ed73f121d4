"""Mixture-of-experts forward and routing on whichever device the tensors are."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science import autocast
from flashmoe_science.arguments import check_flag
from flashmoe_science.cpu import moe as cpu_moe
from flashmoe_science.cpu import moe_quantized as cpu_moe_quantized
from flashmoe_science.cpu import moe_training as cpu_training
from flashmoe_science.cpu import routing as cpu_routing
from flashmoe_science.cuda import moe as cuda_moe
from flashmoe_science.cuda.moe import topk as cuda_topk
from flashmoe_science.cuda.moe import training as cuda_training
from flashmoe_science.direct import all_direct, has_own_layout
from flashmoe_science.errors import BuildError, DeviceError, InputError
from flashmoe_science.moe_arguments import (
    Activation,
    Scores,
    W13Layout,
    check_main_gradients,
    check_moe_arguments,
    check_topk_arguments,
    parse_choice,
)
from flashmoe_science.moe_autograd import differentiable_moe
from flashmoe_science.moe_gradients import NO_MAIN_GRADIENTS, MainGradients
from flashmoe_science.operators.moe import FUSED_MOE
from flashmoe_science.operators.moe_quantized import FUSED_MOE_QUANTIZED
from flashmoe_science.operators.moe_training import TRAINING
from flashmoe_science.operators.routing import TOPK_ROUTING
from flashmoe_science.operators.sharding import register_where_used
from flashmoe_science.quantized import both_scales
from flashmoe_science.torch_private import dispatch_modes, forward_levels

_ACTIVATIONS = {member.value: member for member in Activation}
_LAYOUTS = {member.value: member for member in W13Layout}
_SCORES = {member.value: member for member in Scores}

E = TypeVar("E")


def fused_moe(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    w13_layout: str = "concat",
    out: torch.Tensor | None = None,
    w13_scales: torch.Tensor | None = None,
    w2_scales: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    recompute: bool = False,
    main_gradients: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's chosen experts, two-layer perceptrons with a gate.

    Differentiable once by hidden_states, w13, w2, topk_weights and the biases. Kept for the backward pass are the
    arguments and the gate and up projections, (tokens * k, rows of w13) of the tensors' dtype: nothing else.

    out[t] = sum over j of topk_weights[t, j] * (w2[e] @ act(w13[e] @ hidden_states[t] + w13_bias[e]) + w2_bias[e]),
    where e = topk_ids[t, j]; without the biases that are not given.
    Intermediate values and the experts' results are rounded to the tensors' dtype (the results not where few tokens
    on CUDA are combined on the chip); everything else is float32. The sum over j runs in the order of j, so the same
    call gives the same bits.

    Args:
        hidden_states: (tokens, hidden); float32 (CPU only), bfloat16 or float16. hidden and intermediate are multiples
            of 16. All tensors are contiguous and on one device.
        w13: (experts, 2 * intermediate, hidden), gate and up projections, of the same dtype; for an activation without
            a gate (experts, intermediate, hidden).
        w2: (experts, hidden, intermediate), down projections, of the same dtype.
        topk_weights: (tokens, k) float32.
        topk_ids: (tokens, k) int32 or int64. An id outside [0, experts) contributes nothing, as for an expert on
            another machine. An expert may be there more than once.
        activation: "silu" (SwiGLU), "gelu" (GeGLU, exact), "gelu_tanh", "swigluoai" (GPT-OSS: (up + 1) * gate *
            sigmoid(1.702 * gate), of gate at most 7 and up within -7 and 7); without a gate "silu_no_mul",
            "gelu_no_mul", "relu2_no_mul".
        w13_layout: "concat" (all gate rows, then all up rows) or "interleaved" (gate 0, up 0, gate 1, ...).
        out: (tokens, hidden), contiguous, where to write the result; memory of its own. A new tensor if None. Autograd
            does not record such a call.
        w13_scales: (experts, rows of w13, groups), of hidden_states' dtype, where w13 and w2 are quantised (CPU only):
            int8, or uint8 with two weights of 4 bits in a byte, the first in the low half, each stored with 8 added.
            w13's last dimension is then hidden / 2. A weight is its number times its group's scale; a group is
            hidden / groups neighbours in a row, a multiple of 32. Products are summed in float32 and no weight is
            rounded. `flashmoe_science.quantized.quantized` makes such weights.
        w2_scales: (experts, hidden, groups), the same for w2. Quantised weights have no backward pass.
        w13_bias: (experts, rows of w13), of the weights' dtype, in the order of w13's rows: added to the first product.
            Not with scales.
        w2_bias: (experts, hidden), the same for the second product; the routing weight multiplies it, too.
        recompute: keep no projections for the backward pass, and compute them again there: a third of its products
            more. Without effect where no gradient is needed.
        main_gradients: buffers of float32 like w13 and w2, to which the backward pass adds their gradients; autograd
            gets none of a weight that has a buffer. CUDA kernels add the sums as they are, the CPU and PyTorch's
            operations rounded to the weights' dtype. Only in eager code, and not under autocast.

    Returns:
        (tokens, hidden), like hidden_states.

    Raises:
        InputError: arguments that do not fit together, that have no memory, or that require a gradient with ``out`` or
            with scales; biases with scales.
        DeviceError: no kernel for this device, or nothing on the machine to compile one with.
        BuildError: the kernel did not compile.

    Reference: Shazeer et al., Outrageously large neural networks (2017), arXiv:1701.06538; Shazeer, GLU variants
    improve transformer (2020), arXiv:2002.05202.

    Where `flash_attention` is an operator this is one, too: ``torch.ops.flashmoe_science.fused_moe``. Under
    torch.autocast hidden_states, w13, w2 and biases are cast to its dtype, and topk_weights to float32. With scales it
    is the operator ``fused_moe_quantized``, and autocast leaves the numbers of w13 and w2 as they are.
    """
    if w13_scales is not None or w2_scales is not None:
        _reject_beside_scales(w13_bias, w2_bias, main_gradients)
        return _fused_moe_quantized(
            hidden_states,
            w13,
            w2,
            topk_weights,
            topk_ids,
            w13_scales,
            w2_scales,
            activation=activation,
            w13_layout=w13_layout,
            out=out,
        )
    if main_gradients is not None:
        check_main_gradients(w13, w2, main_gradients)
        _reject_indirect(hidden_states, w13, w2, topk_weights, topk_ids, out, w13_bias, w2_bias)
    if is_dynamo_compiling():
        return _fused_moe_dispatched(
            (hidden_states, w13, w2, topk_weights, topk_ids),
            (w13_bias, w2_bias),
            activation,
            w13_layout,
            out,
            recompute,
        )
    kind = _by_name(_ACTIVATIONS, activation) or parse_choice(Activation, activation, "activation")
    layout = _by_name(_LAYOUTS, w13_layout) or parse_choice(W13Layout, w13_layout, "w13_layout")
    if recompute is not False:
        check_flag("recompute", recompute)
    if out is None and main_gradients is None and forward_levels._current_level < 0 and not dispatch_modes():
        given: tuple[torch.Tensor, ...] = (hidden_states, w13, w2, topk_weights, topk_ids)
        if w13_bias is not None and w2_bias is not None:
            given = (*given, w13_bias, w2_bias)
        if len(given) > 5 or w13_bias is w2_bias:
            repeated = cpu_moe.repeated(given, kind, layout)
            if repeated is not None:
                return repeated
    if autocast.is_on():
        hidden_states, w13, w2, topk_weights = _autocast(hidden_states, w13, w2, topk_weights)
        w13_bias, w2_bias = _autocast_biases(w13_bias, w2_bias)
    if not all_direct(hidden_states, w13, w2, topk_weights, topk_ids, out, w13_bias, w2_bias):
        if has_own_layout():
            check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, kind, out, w13_bias, w2_bias)
        register_where_used()
        return _fused_moe_dispatched(
            (hidden_states, w13, w2, topk_weights, topk_ids),
            (w13_bias, w2_bias),
            kind.value,
            layout.value,
            out,
            recompute,
        )
    if out is not None:
        check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, kind, out, w13_bias, w2_bias)
        _reject_recorded_out(out, hidden_states, w13, w2, topk_weights, w13_bias, w2_bias)
    if isinstance(hidden_states, torch.Tensor):
        # The backends check shapes and types once for each combination.
        backend: Any = cuda_moe if hidden_states.is_cuda else cpu_moe if hidden_states.is_cpu else None
        if backend is not None:
            try:
                if (
                    hidden_states.requires_grad
                    or w13.requires_grad
                    or w2.requires_grad
                    or topk_weights.requires_grad
                    or (w13_bias is not None and w13_bias.requires_grad)
                    or (w2_bias is not None and w2_bias.requires_grad)
                ) and torch.is_grad_enabled():
                    check_moe_arguments(
                        hidden_states, w13, w2, topk_weights, topk_ids, kind, out, w13_bias, w2_bias
                    )
                    return differentiable_moe(
                        cuda_training if hidden_states.is_cuda else cpu_training,
                        hidden_states,
                        w13,
                        w2,
                        topk_weights,
                        topk_ids,
                        w13_bias,
                        w2_bias,
                        activation=kind,
                        w13_layout=layout,
                        recompute=recompute,
                        main=NO_MAIN_GRADIENTS if main_gradients is None else MainGradients(*main_gradients),
                    )
                more = {"repeatable": True} if backend is cpu_moe else {}
                result: torch.Tensor = backend.forward(
                    hidden_states,
                    w13,
                    w2,
                    topk_weights,
                    topk_ids,
                    activation=kind,
                    w13_layout=layout,
                    out=out,
                    w13_bias=w13_bias,
                    w2_bias=w2_bias,
                    **more,
                )
                return result
            except (DeviceError, BuildError):
                raise
            except (AttributeError, RuntimeError):
                # As in `flash_attention`; None has no attributes.
                check_moe_arguments(
                    hidden_states, w13, w2, topk_weights, topk_ids, kind, out, w13_bias, w2_bias
                )
                raise
    check_moe_arguments(hidden_states, w13, w2, topk_weights, topk_ids, kind, out, w13_bias, w2_bias)
    raise DeviceError(
        f"there is no kernel for {hidden_states.device}; expected tensors on cpu or cuda: move them with .to()"
    )


def topk_routing(
    logits: torch.Tensor,
    k: int,
    *,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    correction_bias: torch.Tensor | None = None,
    scaling_factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token and their weights, from a router's logits.

    Chosen are the k largest logits; with `correction_bias` the k largest of scores + correction_bias. Of equal ones the
    lower id is first; NaN is below every number. A weight is the expert's score, without the bias. Weights are
    differentiable by the logits, any number of times; the choice and the bias are outside the gradient.

    Args:
        logits: (tokens, experts), float32, bfloat16 or float16, contiguous; computed with in float32.
        k: 1 to experts.
        scores: "softmax" over all experts, or "sigmoid" of each. With "softmax" and ``renormalize`` the weights are the
            softmax of the chosen logits alone (GPT-OSS).
        renormalize: divide a token's weights by their sum (plus 1e-20, as all may be zero).
        correction_bias: (experts,) float32 (DeepSeek-V3's balance without a loss).
        scaling_factor: that the weights are multiplied by at last.
        groups: neighbouring experts form so many groups of equal size (DeepSeek), at most 32 on CUDA.
        top_groups: experts are chosen from the best of these groups. A group's rank is its best expert's; with
            `correction_bias` the sum of its two best experts' scores + bias.

    Returns:
        weights (tokens, k) float32 and ids (tokens, k) int32, the best first: as `fused_moe` takes them.

    Raises:
        InputError: arguments that do not fit together, logits that have no memory, on CUDA more than 1,024 experts or
            32 groups.
        DeviceError, BuildError: as `fused_moe`.

    Where `flash_attention` is an operator this is one, too: ``torch.ops.flashmoe_science.topk_routing``.
    """
    if is_dynamo_compiling():
        return _topk_routing_dispatched(
            logits, k, scores, renormalize, correction_bias, scaling_factor, groups, top_groups
        )
    kind = _by_name(_SCORES, scores) or parse_choice(Scores, scores, "scores")
    if forward_levels._current_level < 0 and not dispatch_modes():
        repeated = cpu_routing.repeated(
            logits, k, kind, renormalize, correction_bias, scaling_factor, groups, top_groups
        )
        if repeated is not None:
            return repeated
    recorded = isinstance(logits, torch.Tensor) and logits.requires_grad and torch.is_grad_enabled()
    if recorded or not all_direct(logits, correction_bias):
        if has_own_layout():
            check_topk_arguments(logits, k, renormalize, correction_bias, scaling_factor, groups, top_groups)
        register_where_used()
        return _topk_routing_dispatched(
            logits, k, kind.value, renormalize, correction_bias, scaling_factor, groups, top_groups
        )
    if isinstance(logits, torch.Tensor) and logits.is_cpu:
        return cpu_routing.topk(
            logits,
            k,
            scores=kind,
            renormalize=renormalize,
            correction_bias=correction_bias,
            scaling_factor=scaling_factor,
            groups=groups,
            top_groups=top_groups,
            repeatable=True,
        )
    if isinstance(logits, torch.Tensor) and logits.is_cuda:
        # Checked once for each combination.
        return cuda_topk.topk(
            logits,
            k,
            scores=kind,
            renormalize=renormalize,
            bias=correction_bias,
            scale=scaling_factor,
            groups=groups,
            top_groups=top_groups,
        )
    check_topk_arguments(logits, k, renormalize, correction_bias, scaling_factor, groups, top_groups)
    raise DeviceError(
        f"there is no kernel for {logits.device}; expected tensors on cpu or cuda: move them with .to()"
    )


def _by_name(members: dict[str, E], name: object) -> E | None:
    # A dictionary's answer takes a tenth of the enumeration's half microsecond.
    return members.get(name) if isinstance(name, str) else None


def _autocast(
    hidden_states: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What autocast makes of the tensors; it leaves the weights of routing as the kernels take them."""
    cast = autocast.cast(hidden_states, w13, w2)
    return (*cast, topk_weights if cast[0] is hidden_states else topk_weights.float())


def _autocast_biases(*biases: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if bias is None else autocast.cast(bias)[0] for bias in biases)


def _fused_moe_dispatched(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor | None, ...],
    activation: str | Activation,
    w13_layout: str | W13Layout,
    out: torch.Tensor | None,
    recompute: bool,
) -> torch.Tensor:
    """By way of the dispatcher. torch.compile traces this, so what is checked is checked by the operator."""
    *floats, topk_ids = tensors
    if is_dynamo_compiling():
        floats, biases = list(_autocast(*floats)), _autocast_biases(*biases)
    _reject_recorded_out(out, *floats, *biases)
    options = _word(activation), _word(w13_layout)
    result: torch.Tensor = (
        TRAINING(*floats, topk_ids, *biases, *options, False)[0]
        if recompute
        else FUSED_MOE(*floats, topk_ids, *options, *biases)
    )
    return result if out is None else out.copy_(result)


def _reject_beside_scales(
    w13_bias: torch.Tensor | None, w2_bias: torch.Tensor | None, main_gradients: object
) -> None:
    """Raise InputError for what quantised weights do not go with."""
    if w13_bias is not None or w2_bias is not None:
        raise InputError("quantised weights take no biases; leave w13_bias and w2_bias out, or the scales")
    if main_gradients is not None:
        raise InputError("quantised weights have no backward pass; leave main_gradients out, or the scales")


def _reject_indirect(*tensors: torch.Tensor | None) -> None:
    """Raise InputError for a call with ``main_gradients`` that anybody but autograd would have to see."""
    if is_dynamo_compiling() or autocast.is_on() or not all_direct(*tensors):
        raise InputError(
            "main_gradients are for eager code without autocast and transforms; leave them out there"
        )


def _reject_recorded_out(out: torch.Tensor | None, *tensors: torch.Tensor | None) -> None:
    """Raise InputError if autograd would have to record a call that writes to ``out``."""
    if out is None or not torch.is_grad_enabled():
        return
    if out.requires_grad or any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise InputError(
            "autograd does not record a call with out=, and a tensor requires a gradient; "
            "leave out= away, or call it under torch.no_grad()"
        )


def _fused_moe_quantized(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_scales: torch.Tensor | None,
    w2_scales: torch.Tensor | None,
    *,
    activation: str,
    w13_layout: str,
    out: torch.Tensor | None,
) -> torch.Tensor:
    w13_scales, w2_scales = both_scales(w13_scales, w2_scales)
    tensors = (hidden_states, w13, w2, topk_weights, topk_ids, w13_scales, w2_scales)
    given = all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    if given and (is_dynamo_compiling() or autocast.is_on()):
        hidden_states, w13_scales, w2_scales = autocast.cast(hidden_states, w13_scales, w2_scales)
        topk_weights = topk_weights.float()
    if given and (is_dynamo_compiling() or not all_direct(*tensors, out)):
        # The operator checks.
        result: torch.Tensor = FUSED_MOE_QUANTIZED(
            hidden_states,
            w13,
            w2,
            topk_weights,
            topk_ids,
            w13_scales,
            w2_scales,
            _word(activation),
            _word(w13_layout),
        )
        return result if out is None else out.copy_(result)
    return cpu_moe_quantized.forward(
        hidden_states,
        w13,
        w2,
        topk_weights,
        topk_ids,
        w13_scales,
        w2_scales,
        activation=parse_choice(Activation, activation, "activation"),
        w13_layout=parse_choice(W13Layout, w13_layout, "w13_layout"),
        out=out,
    )


def _topk_routing_dispatched(
    logits: torch.Tensor,
    k: int,
    scores: str | Scores,
    renormalize: bool,
    correction_bias: torch.Tensor | None,
    scaling_factor: float,
    groups: int,
    top_groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = TOPK_ROUTING(
        logits, k, _word(scores), renormalize, correction_bias, scaling_factor, groups, top_groups
    )
    return weights, ids


def _word(choice: str | Enum) -> str:
    return choice if isinstance(choice, str) else choice.value
