"""The implementations of the mixture of experts that come with the lab. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from cudadent42.model.implementations import OUR_PACKAGE, Call, Implementation, UnsupportedCaseError
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.peers import needs
from cudadent42.operations.variants import Variant, Variants, choice, compiled, configurations, makes_variants

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.operations.moe.inputs import MoeInputs
    from flashmoe_science.configs.moe.few import FewConfiguration
    from flashmoe_science.cuda.choice import Choice
    from flashmoe_science.cuda.device import Device
    from flashmoe_science.cuda.moe.problem import MoeProblem

# ---------------------------------------------------------------- PyTorch


def grouped_mm(
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
    """Rows sorted by expert and copied in that order, two grouped products, rows put back, weighted and summed: what
    Hugging Face's transformers do by default (their ``grouped_mm`` experts). Ids must be in range."""
    import torch
    from torch.nn import functional

    from cudadent42.operations.moe.reference import activate

    tokens, hidden = hidden_states.shape
    top_k = topk_ids.shape[1]
    experts = topk_ids.reshape(-1)
    order = torch.argsort(experts)
    by_expert = experts[order]
    # Of a histogram of integers, which transformers takes, torch.compile for CUDA (2.11) made zeros.
    every = torch.arange(w13.shape[0], dtype=by_expert.dtype, device=by_expert.device)
    ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    rows = hidden_states[order // top_k]
    projected = functional.grouped_mm(rows, w13.transpose(1, 2), offs=ends)
    if w13_bias is not None:
        projected = projected + w13_bias[by_expert]
    between = activate(projected, activation, w13_layout)
    down = functional.grouped_mm(between, w2.transpose(1, 2), offs=ends)
    if w2_bias is not None:
        down = down + w2_bias[by_expert]
    down = down * topk_weights.reshape(-1)[order, None]
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), dtype=torch.int64, device=order.device)
    return down[position].view(tokens, top_k, hidden).sum(dim=1)


def _arguments(inputs: MoeInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With the routing weights in the tensors' dtype, as the models' routers hand them out."""
    hidden_states, w13, w2, topk_weights, topk_ids = inputs.tensors
    return hidden_states, w13, w2, topk_weights.to(hidden_states.dtype), topk_ids


def _prepare_grouped_mm(case: MoeCase, inputs: MoeInputs) -> Call:
    return partial(grouped_mm, *_arguments(inputs), case.activation, **inputs.options)


def _prepare_compiled(case: MoeCase, inputs: MoeInputs) -> Call:
    return partial(_compiled(case), *_arguments(inputs), case.activation, **inputs.options)


@cache
def _compiled(case: MoeCase) -> Callable[..., Tensor]:
    """Compiled for the very sizes. A function object of its own for each case: PyTorch gives up compiling one
    function after a few shapes."""
    import torch

    def composition(*arguments: Any, **options: Any) -> Tensor:
        return grouped_mm(*arguments, **options)

    compiled: Callable[..., Tensor] = torch.compile(composition, dynamic=False)
    return compiled


def _prepare_loop(case: MoeCase, inputs: MoeInputs) -> Call:
    from cudadent42.operations.moe.reference import expert_loop

    return partial(expert_loop, *inputs.tensors, case.activation, **inputs.options)


# ---------------------------------------------------------------- this project's kernels


def _prepare_ours(case: MoeCase, inputs: MoeInputs) -> Call:
    fused_moe = importlib.import_module("flashmoe_science").fused_moe
    if inputs.quantized is None:
        return partial(fused_moe, *inputs.tensors, activation=case.activation, **inputs.options)
    tensors, scales = _quantized_arguments(inputs)
    return partial(fused_moe, *tensors, **scales, activation=case.activation, **inputs.options)


def _prepare_wide(case: MoeCase, inputs: MoeInputs) -> Call:
    """Ours with the same weights in the case's dtype: what fewer bits have to gain on."""
    if inputs.quantized is None:
        raise UnsupportedCaseError("the weights are in the case's dtype already")
    return _prepare_ours(case, replace(inputs, quantized=None))


def _quantized_arguments(inputs: MoeInputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional arguments of a call with quantised weights, and their scales."""
    assert inputs.quantized is not None
    w13, w2 = inputs.quantized
    hidden_states, _, _, topk_weights, topk_ids = inputs.tensors
    tensors = (hidden_states, w13.numbers, w2.numbers, topk_weights, topk_ids)
    return tensors, {"w13_scales": w13.scales, "w2_scales": w2.scales}


def _prepare_variant(variant: Variant, case: MoeCase, inputs: MoeInputs) -> Call:
    arguments = variant.module("moe_arguments")
    tensors, activation = inputs.tensors, arguments.Activation(case.activation)
    layout = arguments.W13Layout(case.w13_layout)
    if inputs.quantized is not None:
        if not inputs.hidden_states.is_cpu:
            raise UnsupportedCaseError("quantised experts have no CUDA kernel")
        stored, scales = _quantized_arguments(inputs)
        forward = variant.module("cpu.moe_quantized").forward
        return partial(
            forward,
            *stored,
            **scales,
            activation=activation,
            w13_layout=layout,
            instruction_set=variant.instruction_set(),
        )
    if inputs.hidden_states.is_cpu:
        forward = variant.module("cpu.moe").forward
        return partial(
            forward,
            *tensors,
            **inputs.biased,
            activation=activation,
            w13_layout=layout,
            instruction_set=variant.instruction_set(),
        )
    asked, selection = variant.module("cuda.moe.forward").asked, _selection(variant)
    # Versions of before the biases have no names.
    names = {"names": (*variant.module("cuda.moe.forward").FIVE, *inputs.biased)} if inputs.biased else {}
    problem, device = asked(tensors, activation, layout, None, **names)
    made = compiled(variant, selection, problem, device, variant_choice(variant, problem, device))
    forward = variant.module("cuda.moe").forward
    return partial(forward, *tensors, **inputs.biased, activation=activation, w13_layout=layout, choice=made)


def variant_choice(variant: Variant, problem: MoeProblem, device: Device) -> Choice:
    """What a variant is for a problem. Raises UnsupportedCaseError."""

    def for_most_rows(problem: MoeProblem, device: Device) -> FewConfiguration:
        """The way for few tokens beyond the rows up to which it is the fastest."""
        tiles: Sequence[FewConfiguration] = variant.module("configs.moe.few").all_configurations(
            device.architecture
        )
        if not tiles:
            raise UnsupportedCaseError(f"the way for few tokens has no tiles for {device.architecture}")
        return tiles[-1]

    declined = {variant.module("cuda.moe").MoeKind.FEW: for_most_rows}
    return choice(variant, _selection(variant), problem, device, declined)


def _selection(variant: Variant) -> Any:
    return variant.module("cuda.moe.select").FORWARD


def variants_of(package: str = OUR_PACKAGE) -> Variants:
    return Variants(
        configurations(
            f"{package}.configs.moe",
            few="FewConfiguration",
            hopper="MoeHopperConfiguration",
            portable="PortableMoeConfiguration",
        ),
        "cudadent42[hopper,stages=3]",
        lambda variant: partial(_prepare_variant, variant),
        package,
    )


# ---------------------------------------------------------------- peers, never a dependency


def _prepare_liger(case: MoeCase, inputs: MoeInputs) -> Call:
    if case.activation != "silu":
        raise UnsupportedCaseError("Liger's fused MoE knows SwiGLU only")
    if case.bias or case.w13_layout != "concat":
        raise UnsupportedCaseError("Liger's fused MoE knows no biases, and gate rows before up rows only")
    function = importlib.import_module("liger_kernel.ops").LigerFusedMoEFunction
    for kernel, tuned in _liger_tuning(case):
        kernel.cache = tuned
    return partial(
        function.apply, inputs.hidden_states, inputs.w13, inputs.w2, inputs.topk_ids, inputs.topk_weights
    )


@cache
def _liger_tuning(case: MoeCase) -> tuple[tuple[Any, dict[Any, Any]], ...]:
    """What Triton's autotuner has found for each of Liger's kernels at ``case``. Liger tunes once for a hidden and an
    intermediate size; without a tuning of its own, a case of 32,768 tokens would run as it was best for one token."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    kernels = importlib.import_module("liger_kernel.ops.fused_moe_kernels")
    return tuple((kernel, {}) for kernel in vars(kernels).values() if isinstance(kernel, autotuner))


def _implementation(
    name: str,
    description: str,
    devices: tuple[str, ...],
    prepare: Callable[[MoeCase, MoeInputs], Call],
    **more: Any,
) -> Implementation:
    return Implementation(name, description, devices, prepare, operation=MoeCase.operation, **more)


_BOTH = ("cpu", "cuda")
_COMPILING_S = 300.0
"""torch.compile starts its processes once, which took over a minute; Triton's autotuning compiles dozens of kernels."""

WIDE = "cudadent42_16bit"
"""Of cases with quantised weights alone, which have no gradients."""

ALL: tuple[Implementation, ...] = (
    _implementation(
        "cudadent42", "flashmoe_science.fused_moe", _BOTH, _prepare_ours, variants=makes_variants(variants_of)
    ),
    _implementation(
        WIDE,
        "flashmoe_science.fused_moe with quantised weights in 16 bits",
        _BOTH,
        _prepare_wide,
    ),
    _implementation(
        "grouped_mm",
        "torch.nn.functional.grouped_mm between sorting and summing, as in transformers",
        _BOTH,
        _prepare_grouped_mm,
        strict=False,
        copies_inputs=True,
    ),
    _implementation(
        "grouped_mm_compiled",
        "the same under torch.compile",
        _BOTH,
        _prepare_compiled,
        strict=False,
        copies_inputs=True,
        compiling_s=_COMPILING_S,
    ),
    _implementation(
        "expert_loop",
        "PyTorch's loop over the experts, two F.linear each",
        _BOTH,
        _prepare_loop,
        strict=False,
    ),
    _implementation(
        "liger",
        "Liger's fused MoE (Triton)",
        ("cuda",),
        _prepare_liger,
        unavailable=needs("liger_kernel.ops", "liger-kernel"),
        strict=False,
        compiling_s=_COMPILING_S,
    ),
)
