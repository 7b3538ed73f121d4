"""The mixture of experts on the CPU with weights of 8 or 4 bits: kernels/cpu/moe_forward.cpp, compiled for them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cpu.library import allocate, load_function
from flashmoe_science.cpu.moe import Problem, fields
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import (
    Activation,
    W13Layout,
    reject_moe_gradients,
    reject_overlap,
)
from flashmoe_science.plans import keep
from flashmoe_science.quantized import Quantization, check_quantized_arguments

_MAX_PLANS = 4096


def forward(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_scales: torch.Tensor,
    w2_scales: torch.Tensor,
    *,
    activation: Activation = Activation.SILU,
    w13_layout: W13Layout = W13Layout.CONCAT,
    out: torch.Tensor | None = None,
    instruction_set: InstructionSet | None = None,
) -> torch.Tensor:
    """`flashmoe_science.fused_moe` for CPU tensors with scales; arguments, result and errors as there.

    Args:
        instruction_set: whose code; the CPU's best unless given.
    """
    tensors = (hidden_states, w13, w2, topk_weights, topk_ids, w13_scales, w2_scales)
    try:
        signature = (
            *((tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()) for tensor in tensors),
            activation,
            w13_layout,
            instruction_set,
        )
        plan = _plans.get(signature) if out is None else None
    except (AttributeError, RuntimeError):  # not tensors, or not dense ones: the checks say which
        check_quantized_arguments(*tensors, activation, out)
        raise
    if plan is None:
        quantization = check_quantized_arguments(*tensors, activation, out)
        plan = _make_plan(quantization, hidden_states, w2, topk_ids, activation, w13_layout, instruction_set)
        keep(_plans, signature, plan, _MAX_PLANS)
    named = {
        "hidden_states": hidden_states,
        "w13": w13,
        "w2": w2,
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
        "w13_scales": w13_scales,
        "w2_scales": w2_scales,
    }
    reject_moe_gradients(**named)
    tokens, hidden = hidden_states.shape
    if out is None:
        out = allocate((tokens, hidden), (hidden, 1), hidden_states.dtype)
    else:
        reject_moe_gradients(out=out)
        reject_overlap(out, **named)
    if plan.launch(
        plan.address,
        hidden_states.data_ptr(),
        w13.data_ptr(),
        w2.data_ptr(),
        topk_weights.data_ptr(),
        topk_ids.data_ptr(),
        out.data_ptr(),
        w13_scales.data_ptr(),
        w2_scales.data_ptr(),
        0,
        0,
        0,
        torch.get_num_threads(),
    ):
        reject_without_memory(**named, output=out)
    return out


@dataclass(frozen=True)
class _Plan:
    launch: Callable[..., int]
    address: int
    """Of `problem`."""
    problem: Problem


_plans: dict[tuple[object, ...], _Plan] = {}


def _make_plan(
    quantization: Quantization,
    hidden_states: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    w13_layout: W13Layout,
    instruction_set: InstructionSet | None,
) -> _Plan:
    experts, _, columns = w2.shape
    intermediate = columns * 8 // quantization.bits
    problem = Problem(
        *fields(hidden_states, intermediate, experts, topk_ids, activation, w13_layout),
        quantization.w13_group,
        quantization.w2_group,
    )
    launch = _load(instruction_set or host.choose_instruction_set(), quantization.bits)
    return _Plan(launch, ctypes.addressof(problem), problem)


def further_features(instruction_set: InstructionSet, bits: int) -> tuple[str, ...]:
    """CPU features that the code for weights of so many bits takes besides those of the instruction set."""
    return host.integer_dot_products(instruction_set) if bits == 4 else ()


@functools.cache
def _load(instruction_set: InstructionSet, bits: int) -> Callable[..., int]:
    return load_function(
        "moe_forward",
        "flashmoe_moe_method",
        instruction_set,
        {"WEIGHT_BITS": bits},
        further_features(instruction_set, bits),
    )
