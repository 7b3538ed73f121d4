"""What every backend asks of the arguments of the mixture-of-experts functions."""

from __future__ import annotations

import numbers
from enum import Enum
from typing import TypeVar

import numpy as np
import torch

from flashmoe_science.arguments import DTYPES, is_finite
from flashmoe_science.errors import InputError

SIZE_STEP = 16
"""The hidden and the intermediate size are multiples of this."""
_MAX_FLOAT32 = torch.finfo(torch.float32).max
MAX_SLOTS = 2**31 - 1
"""tokens * k, and the number of experts, are counted in int32."""
RENORMALIZE_FLOOR = 1e-20
"""Added to the sum that chosen scores are divided by: sigmoids may all be zero."""

E = TypeVar("E", bound=Enum)

# A copy of `out` would be written in its place.
_NEW_OUT = "pass torch.empty_like(hidden_states)"
_AT_LOADING = "call .contiguous() on it, once, where the model is loaded"
_CONTIGUOUS = {"w13": _AT_LOADING, "w2": _AT_LOADING, "out": _NEW_OUT}


class Activation(Enum):
    """What stands between the two products; the names are vLLM's where it has one."""

    SILU = "silu"
    """silu(gate) * up (SwiGLU)."""
    GELU = "gelu"
    """gelu(gate) * up (GeGLU), gelu with the exact erf."""
    GELU_TANH = "gelu_tanh"
    """gelu(gate) * up, gelu by its approximation with tanh."""
    SWIGLU_OAI = "swigluoai"
    """(up + 1) * gate * sigmoid(1.702 * gate), of gate at most 7 and up within -7 and 7 (GPT-OSS)."""
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"
    """relu(x)^2, without a gate, as the two above."""

    @property
    def gated(self) -> bool:
        """Whether w13 has two rows for each intermediate value, gate and up; else one."""
        return self in (Activation.SILU, Activation.GELU, Activation.GELU_TANH, Activation.SWIGLU_OAI)


SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_LIMIT = 7.0


ACTIVATION_CODES = {activation: code for code, activation in enumerate(Activation, 1)}
"""As the kernels number them (`kernels/cuda/moe/activation.cuh`, `kernels/cpu/activation.h`); 0 is none."""


class W13Layout(Enum):
    """Order of w13's rows where the activation is gated."""

    CONCAT = "concat"
    """All gate rows, then all up rows."""
    INTERLEAVED = "interleaved"
    """gate 0, up 0, gate 1, up 1, ..."""


class Scores(Enum):
    """What routing makes of the router's logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


def parse_choice(kind: type[E], value: object, name: str) -> E:
    """The member of ``kind`` that ``value`` is or names. Raises InputError, with the known words."""
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(repr(member.value) for member in kind)
        raise InputError(f"{name} is {value!r}; expected one of {choices}") from None


def check_moe_arguments(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    out: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> None:
    """Raise InputError, with what to do, unless the arguments make sense together, as `flashmoe_science.fused_moe`
    expects them: shapes, contiguity, one device, and one dtype of hidden_states, w13, w2, the biases and out.
    """
    _check_tensor("hidden_states", hidden_states, ("tokens", "hidden"))
    rows = "2 * intermediate" if activation.gated else "intermediate"
    _check_tensor("w13", w13, ("experts", rows, "hidden"))
    _check_tensor("w2", w2, ("experts", "hidden", "intermediate"))
    _check_tensor("topk_weights", topk_weights, ("tokens", "k"))
    _check_tensor("topk_ids", topk_ids, ("tokens", "k"))
    _check_dtype("hidden_states", hidden_states, DTYPES)
    for name, tensor in (("w13", w13), ("w2", w2)):
        if tensor.dtype != hidden_states.dtype:
            quantized = tensor.dtype in (torch.int8, torch.uint8)
            raise InputError(
                f"{name} is {tensor.dtype} but hidden_states is {hidden_states.dtype}; expected "
                + (
                    "w13_scales and w2_scales with quantised weights"
                    if quantized
                    else "one dtype: convert with .to()"
                )
            )
    _check_dtype("topk_weights", topk_weights, (torch.float32,))
    _check_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    _check_sizes(hidden_states, w13, w2, activation)
    _check_routing(hidden_states, topk_weights, topk_ids)
    named = {"w13": w13, "w2": w2, "topk_weights": topk_weights, "topk_ids": topk_ids}
    for name, bias, weight in (("w13_bias", w13_bias, w13), ("w2_bias", w2_bias, w2)):
        if bias is not None:
            _check_bias(name, bias, weight)
            named[name] = bias
    if out is not None:
        _check_out(out, hidden_states)
        named["out"] = out
    for name, tensor in named.items():
        if tensor.device != hidden_states.device:
            raise InputError(
                f"{name} is on {tensor.device} but hidden_states is on {hidden_states.device}; "
                f"expected one device: {_NEW_OUT if name == 'out' else 'move it with .to()'}"
            )
    for name, tensor in (("hidden_states", hidden_states), *named.items()):
        if not tensor.is_contiguous():
            raise InputError(
                f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}); "
                + _CONTIGUOUS.get(name, "call .contiguous() on it")
            )


def check_moe_gradient_arguments(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    *,
    slots: int,
    grad_output: torch.Tensor,
    z: torch.Tensor | None,
) -> None:
    """Raise InputError unless what the backward pass takes besides fits the arguments, which were checked.

    Expected, of hidden_states' dtype and on its device: grad_output (tokens, hidden), z (slots, rows of w13).
    """
    expected = {
        "grad_output": (grad_output, tuple(hidden_states.shape)),
        "z": (z, (slots, w13.shape[1])),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype != hidden_states.dtype:
            raise InputError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}; expected {shape} {hidden_states.dtype}"
            )
        if tensor.device != hidden_states.device:
            raise InputError(
                f"{name} is on {tensor.device} but hidden_states is on {hidden_states.device}; "
                "expected one device: move it with .to()"
            )


def check_main_gradients(w13: torch.Tensor, w2: torch.Tensor, buffers: object) -> None:
    """Raise InputError unless ``buffers`` are two: None, or float32, contiguous, with the weight's shape and device."""
    if not isinstance(buffers, (tuple, list)) or len(buffers) != 2:
        raise InputError(
            f"main_gradients is {type(buffers).__name__}; expected a pair of buffers, for w13 and w2, each of which "
            "may be None"
        )
    for name, weight, buffer in (("w13", w13, buffers[0]), ("w2", w2, buffers[1])):
        if buffer is None:
            continue
        _check_tensor(f"the main gradient of {name}", buffer, ("experts", "rows", "columns"))
        if (
            buffer.shape != weight.shape
            or buffer.dtype != torch.float32
            or buffer.device != weight.device
            or not buffer.is_contiguous()
        ):
            raise InputError(
                f"the main gradient of {name} is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}; expected "
                f"{tuple(weight.shape)} torch.float32 on {weight.device}, contiguous"
            )


def reject_overlap(out: torch.Tensor, **inputs: torch.Tensor) -> None:
    """Raise InputError if ``out`` shares memory with an input: it is written before they have all been read."""
    first, last = _extent(out)
    for name, tensor in inputs.items():
        begin, end = _extent(tensor)
        if begin < last and first < end:
            raise InputError(f"out shares memory with {name}; give it memory of its own: torch.empty_like()")


def reject_unrecorded(**tensors: torch.Tensor) -> None:
    """Raise InputError if autograd would record this call of a backend, which only `fused_moe` lets it do."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise InputError(
                f"{name} requires a gradient, and a backend's forward is not recorded; call "
                "flashmoe_science.fused_moe, or this under torch.no_grad()"
            )


def reject_moe_gradients(**tensors: torch.Tensor) -> None:
    """Raise InputError if autograd would record this call: there is no backward pass."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise InputError(
                f"{name} requires a gradient, but there is no backward pass; "
                "call it under torch.no_grad() or detach() the tensor"
            )


def check_topk_arguments(
    logits: torch.Tensor,
    k: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None,
    scaling_factor: float,
    groups: int = 1,
    top_groups: int = 1,
) -> None:
    """Raise InputError unless the arguments of routing make sense together.

    Expected: logits (tokens, experts) in float32, bfloat16 or float16, contiguous; k from 1 to experts; renormalize a
    bool; correction_bias None or (experts,) float32 on the same device, contiguous; scaling_factor finite in float32;
    experts a multiple of groups; top_groups from 1 to groups, with at least k experts.
    """
    _check_tensor("logits", logits, ("tokens", "experts"))
    _check_dtype("logits", logits, DTYPES)
    experts = logits.shape[1]
    if experts == 0:
        raise InputError("logits has no experts, shape (tokens, 0); expected at least one")
    if isinstance(k, bool) or not isinstance(k, numbers.Integral):
        raise InputError(f"k is {k!r}; expected a whole number from 1 to the number of experts, {experts}")
    if not 1 <= k <= experts:
        raise InputError(f"k is {k} but logits has {experts} experts; expected 1 to {experts}")
    if logits.shape[0] * k > MAX_SLOTS:
        raise InputError(f"{logits.shape[0]} tokens times k = {k} exceeds {MAX_SLOTS}; split the tokens")
    _check_groups(experts, k, groups, top_groups)
    tensors = {"logits": logits}
    if correction_bias is not None:
        _check_tensor("correction_bias", correction_bias, ("experts",))
        _check_dtype("correction_bias", correction_bias, (torch.float32,))
        if correction_bias.shape[0] != experts:
            raise InputError(
                f"correction_bias has {correction_bias.shape[0]} entries but logits has {experts} experts; "
                "expected one for each"
            )
        if correction_bias.device != logits.device:
            raise InputError(
                f"correction_bias is on {correction_bias.device} but logits is on {logits.device}; "
                "expected one device: move it with .to()"
            )
        tensors["correction_bias"] = correction_bias
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InputError(
                f"{name} is not contiguous (strides {tensor.stride()}); call .contiguous() on it"
            )
    if not isinstance(renormalize, (bool, np.bool_)):
        raise InputError(f"renormalize is {renormalize!r}; expected True or False")
    if not is_finite(scaling_factor) or abs(scaling_factor) > _MAX_FLOAT32:
        raise InputError(f"scaling_factor is {scaling_factor!r}; expected a finite number that float32 holds")


def _check_groups(experts: int, k: int, groups: int, top_groups: int) -> None:
    for name, value in (("groups", groups), ("top_groups", top_groups)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise InputError(f"{name} is {value!r}; expected a whole number, 1 or more")
    if experts % groups:
        raise InputError(
            f"groups is {groups} with {experts} experts; expected a number that divides the experts"
        )
    if top_groups > groups:
        raise InputError(f"top_groups is {top_groups} of {groups} groups; expected 1 to {groups}")
    most = top_groups * (experts // groups)
    if k > most:
        raise InputError(
            f"k is {k} but {top_groups} of {groups} groups have {most} experts; expected at most {most}"
        )


def _check_tensor(name: str, tensor: object, dimensions: tuple[str, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.is_nested:  # asking it for its shape raises
        raise InputError(f"{name} is a nested tensor; expected a dense one: concatenate its parts")
    if tensor.dim() != len(dimensions):
        raise InputError(
            f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; "
            f"expected {len(dimensions)}, ({', '.join(dimensions)}{',' * (len(dimensions) == 1)})"
        )
    if tensor.layout is not torch.strided:
        raise InputError(f"{name} has layout {tensor.layout}; expected a dense tensor: call .to_dense()")


def _check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise InputError(f"{name} has dtype {tensor.dtype}; expected {words}: use .to()")


def _check_sizes(
    hidden_states: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, activation: Activation
) -> None:
    hidden = hidden_states.shape[1]
    experts, _, intermediate = w2.shape
    if w13.shape[0] != experts:
        raise InputError(f"w13 has {w13.shape[0]} experts but w2 has {experts}; expected the same")
    if experts == 0:
        raise InputError("w13 and w2 have no experts, shape (0, ...); expected at least one")
    for name, its_hidden in (("w13", w13.shape[2]), ("w2", w2.shape[1])):
        if its_hidden != hidden:
            raise InputError(
                f"hidden_states has hidden size {hidden} but {name} has {its_hidden}; expected the same"
            )
    rows = 2 * intermediate if activation.gated else intermediate
    if w13.shape[1] != rows:
        words = "2 * intermediate" if activation.gated else "intermediate"
        raise InputError(
            f"w13 has {w13.shape[1]} rows for each expert and w2 intermediate size {intermediate}; "
            f"expected {rows}, {words}, for activation {activation.value!r}"
        )
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size < SIZE_STEP or size % SIZE_STEP:
            raise InputError(
                f"the {name} size is {size}; expected a multiple of {SIZE_STEP}: pad the weights with zeros"
            )


def _check_routing(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    tokens = hidden_states.shape[0]
    if topk_weights.shape != topk_ids.shape:
        raise InputError(
            f"topk_weights {tuple(topk_weights.shape)} and topk_ids {tuple(topk_ids.shape)} differ in shape; "
            "expected the same (tokens, k)"
        )
    if topk_ids.shape[0] != tokens:
        raise InputError(
            f"hidden_states has {tokens} tokens but topk_ids has {topk_ids.shape[0]}; expected the same"
        )
    k = topk_ids.shape[1]
    if k < 1:  # it may be more than the experts: of a layer that is split, most choices are of others
        raise InputError(f"k is {k} (topk_ids' second dimension); expected at least 1")
    if tokens * k > MAX_SLOTS:
        raise InputError(f"{tokens} tokens times k = {k} exceeds {MAX_SLOTS}; split the tokens")


def _check_bias(name: str, bias: torch.Tensor, weight: torch.Tensor) -> None:
    rows = "2 * intermediate" if name == "w13_bias" else "hidden"
    _check_tensor(name, bias, ("experts", rows))
    if bias.shape != weight.shape[:2] or bias.dtype != weight.dtype:
        raise InputError(
            f"{name} is {tuple(bias.shape)} {bias.dtype}; expected {tuple(weight.shape[:2])} {weight.dtype}, "
            f"a number for each row of {name.removesuffix('_bias')}"
        )


def _check_out(out: torch.Tensor, hidden_states: torch.Tensor) -> None:
    _check_tensor("out", out, ("tokens", "hidden"))
    if out.shape != hidden_states.shape or out.dtype != hidden_states.dtype:
        raise InputError(
            f"out is {tuple(out.shape)} {out.dtype}; expected {tuple(hidden_states.shape)} "
            f"{hidden_states.dtype}, as hidden_states: {_NEW_OUT}"
        )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()
