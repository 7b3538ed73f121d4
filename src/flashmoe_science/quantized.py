"""Experts' weights of 8 or 4 bits with a scale for each group of them: what the arguments of `fused_moe` must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from flashmoe_science.arguments import DTYPES, check_dense
from flashmoe_science.errors import DeviceError, InputError
from flashmoe_science.moe_arguments import Activation, check_moe_arguments

GROUP_STEP = 32
"""A group has a multiple of so many weights."""
BITS = {torch.int8: 8, torch.uint8: 4}
"""Of a weight, by the dtype of w13 and w2: uint8 holds two weights in a byte."""

NO_QUANTIZED_CUDA = (
    "there is no CUDA kernel for quantised experts; dequantise w13 and w2, or move the tensors to the CPU"
)


@dataclass(frozen=True)
class Quantization:
    """How the weights of a call are stored."""

    bits: int
    w13_group: int
    """Weights along the hidden dimension that share a scale."""
    w2_group: int
    """The same along the intermediate dimension."""


def both_scales(
    w13_scales: torch.Tensor | None, w2_scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of both matrices. Raises InputError where those of one are not given."""
    if w13_scales is None or w2_scales is None:
        given, missing = ("w2_scales", "w13_scales") if w13_scales is None else ("w13_scales", "w2_scales")
        raise InputError(f"{given} is given but {missing} is not; expected scales for both, or for neither")
    return w13_scales, w2_scales


def check_quantized_arguments(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_scales: torch.Tensor,
    w2_scales: torch.Tensor,
    activation: Activation,
    out: torch.Tensor | None = None,
) -> Quantization:
    """How the weights are stored. Raises InputError, with what to do, unless the arguments make sense together, and
    DeviceError where they are not on the CPU.

    Expected: w13 (experts, rows, hidden) and w2 (experts, hidden, intermediate) int8, or uint8 with half as many
    bytes in the last dimension; w13_scales (experts, rows, groups) and w2_scales (experts, hidden, groups) of
    hidden_states' dtype, where the number of groups divides the depth into multiples of 32; else as
    `check_moe_arguments`.
    """
    weights = {"w13": w13, "w2": w2}
    scales = {"w13_scales": w13_scales, "w2_scales": w2_scales}
    for name, tensor in (("hidden_states", hidden_states), *weights.items(), *scales.items()):
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if hidden_states.dtype not in DTYPES:
        raise InputError(
            f"hidden_states has dtype {hidden_states.dtype}; expected float32 or bfloat16 or float16: use .to()"
        )
    for name, tensor in weights.items():
        if tensor.dtype not in BITS:
            raise InputError(
                f"{name} has dtype {tensor.dtype}; expected int8, or uint8 with two weights in a byte"
            )
    if w13.dtype != w2.dtype:
        raise InputError(f"w13 is {w13.dtype} but w2 is {w2.dtype}; expected one dtype")
    for name, tensor in (*weights.items(), *scales.items()):
        if tensor.dim() != 3:
            raise InputError(f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; expected 3")
        if not tensor.is_contiguous():
            raise InputError(
                f"{name} is not contiguous; call .contiguous() on it, once, where the model is loaded"
            )
    bits = BITS[w13.dtype]
    others = {"topk_weights": topk_weights, "topk_ids": topk_ids, "out": out}
    for name, other in {**weights, **scales, **others}.items():
        if isinstance(other, torch.Tensor) and other.device != hidden_states.device:
            raise InputError(
                f"{name} is on {other.device} but hidden_states is on {hidden_states.device}; "
                "expected one device: move it with .to()"
            )
    check_moe_arguments(
        _without_memory(hidden_states),
        _as_if_plain(w13, hidden_states),
        _as_if_plain(w2, hidden_states),
        _without_memory(topk_weights),
        _without_memory(topk_ids),
        activation,
        _without_memory(out),
    )
    groups = [_group(name, weights[name], scales[f"{name}_scales"], bits, hidden_states) for name in weights]
    if hidden_states.is_cuda:
        raise DeviceError(NO_QUANTIZED_CUDA)
    return Quantization(bits, *groups)


def dequantized(
    weights: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(experts, rows, depth): the weights that these numbers and scales stand for.

    Args:
        weights: int8 (experts, rows, depth), or uint8 (experts, rows, depth / 2).
        scales: (experts, rows, groups).
        dtype: of the result, and of the product that it is.
    """
    if weights.dtype == torch.uint8:
        numbers = torch.stack((weights & 15, weights >> 4), dim=-1).flatten(-2).to(dtype) - 8
    else:
        numbers = weights.to(dtype)
    return (numbers.reshape(*scales.shape, -1) * scales.to(dtype).unsqueeze(-1)).flatten(-2)


def quantized(weights: torch.Tensor, *, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (experts, rows, depth) rounded to 8 or 4 bits, and their scales, as `fused_moe` takes them.

    Each group's scale takes its largest magnitude to 127, or to 7. The scales have the weights' dtype.

    Raises:
        InputError: bits other than 8 and 4, or a group that does not divide the depth or is no multiple of 32.
    """
    check_dense(weights=weights)
    if weights.dim() != 3 or not weights.is_floating_point():
        raise InputError(
            f"weights is {weights.dtype} with shape {tuple(weights.shape)}; expected floats, (experts, rows, depth)"
        )
    if not isinstance(group, int):
        raise InputError(f"group is {group!r:.80}; expected a whole number")
    depth = weights.shape[-1]
    if bits not in BITS.values():
        raise InputError(f"bits is {bits}; expected 8 or 4")
    if group < GROUP_STEP or group % GROUP_STEP or depth % group:
        raise InputError(
            f"group is {group}; expected a multiple of {GROUP_STEP} that divides the depth, {depth}"
        )
    largest = 2 ** (bits - 1) - 1
    groups = weights.reshape(*weights.shape[:-1], -1, group)
    scales = (groups.abs().amax(dim=-1).float() / largest).to(weights.dtype)
    safe = torch.where(scales == 0, torch.ones_like(scales), scales).float()
    numbers = (groups.float() / safe.unsqueeze(-1)).round().clamp(-largest - 1, largest).flatten(-2)
    if bits == 8:
        return numbers.to(torch.int8).contiguous(), scales.contiguous()
    nibbles = (numbers + 8).to(torch.uint8).reshape(*numbers.shape[:-1], -1, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).contiguous(), scales.contiguous()


T = TypeVar("T")


def _without_memory(tensor: T) -> T:
    """The same sizes, strides and dtype; what is no tensor is left to be refused."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return tensor
    # `.to("meta")` would give contiguous strides to what shares or skips memory.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")  # type: ignore[return-value]


def _as_if_plain(weights: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """A tensor without contents that has the weights' sizes, one element for each weight."""
    experts, rows, depth = weights.shape
    sizes = (experts, rows, depth * 8 // BITS[weights.dtype])
    return torch.empty(sizes, dtype=hidden_states.dtype, device="meta")


def _group(
    name: str, weights: torch.Tensor, scales: torch.Tensor, bits: int, hidden_states: torch.Tensor
) -> int:
    depth = weights.shape[2] * 8 // bits
    if scales.dtype != hidden_states.dtype:
        raise InputError(
            f"{name}_scales is {scales.dtype} but hidden_states is {hidden_states.dtype}; "
            "expected one dtype: convert with .to()"
        )
    if scales.shape[:2] != weights.shape[:2]:
        raise InputError(
            f"{name}_scales has shape {tuple(scales.shape)} and {name} {tuple(weights.shape)}; "
            "expected the same experts and rows"
        )
    groups = scales.shape[2]
    if groups == 0 or depth % groups or depth // groups % GROUP_STEP:
        raise InputError(
            f"{name}_scales has {groups} groups for rows of {depth} weights; "
            f"expected groups of a multiple of {GROUP_STEP} weights"
        )
    return depth // groups
