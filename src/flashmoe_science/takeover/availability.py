"""Whether a machine can make and run the kernels: asked where a call has no way back, remembered where one failed."""

from __future__ import annotations

import functools
from typing import TypeVar

import torch

from flashmoe_science.attention import flash_attention
from flashmoe_science.cuda.moe import training as cuda_training
from flashmoe_science.errors import BuildError, CaptureError, DeviceError, InputError
from flashmoe_science.moe import fused_moe, topk_routing
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.operators import listed_keys
from flashmoe_science.takeover.tracing import constant_result

_Kind = TypeVar("_Kind")

REFUSALS = (InputError, DeviceError, BuildError)
"""What a call of a kernel that is not to be made raises."""


def summary(error: Exception) -> str:
    """What an error says was wrong, without what to do."""
    return f"{type(error).__name__}: {str(error).partition(';')[0].partition(chr(10))[0]}"


def failed(failures: dict[_Kind, str], kind: _Kind, error: Exception) -> str:
    """Why a call raised one of `REFUSALS`. Machines without a compiler and kernels that do not build stay so: it is
    remembered for its kind, unless the next call may work; see `CaptureError`."""
    if isinstance(error, InputError):
        return "an argument that the kernel refuses"
    reason = summary(error)
    if not isinstance(error, CaptureError):
        failures[kind] = reason
    return reason


@constant_result
def why_no_attention(device_type: str, dtype: torch.dtype) -> str | None:
    """Asked while a graph is traced: compiled, it has no way back. Compiles a small kernel, as a first call does."""
    return _try_attention(device_type, dtype)


@constant_result
def why_no_lists(device_type: str, dtype: torch.dtype) -> str | None:
    """The same for attention over lists of keys."""
    return _try_lists(device_type, dtype)


@constant_result
def why_no_experts(device_type: str, dtype: torch.dtype) -> str | None:
    """The same for experts."""
    return _try_experts(device_type, dtype)


@constant_result
def why_no_routing(device_type: str, dtype: torch.dtype) -> str | None:
    """The same for a router's choice."""
    return _try_routing(device_type, dtype)


@constant_result
def why_no_expert_gradients(device_type: str, dtype: torch.dtype, activation: str, layout: str) -> str | None:
    """Why the gradients of experts are not made by kernels there; None if they are. Compiles nothing.

    ``activation`` and ``layout``: as `fused_moe` calls them, an activation with a gate.
    """
    return _lacks_expert_gradients(device_type, dtype, activation, layout)


@functools.cache
def _lacks_expert_gradients(device_type: str, dtype: torch.dtype, activation: str, layout: str) -> str | None:
    if device_type == "cpu":
        return None
    tokens = torch.empty(64, 256, dtype=dtype, device=device_type)
    weights = torch.empty(8, 512, 256, dtype=dtype, device=device_type)
    ids = torch.empty(64, 2, dtype=torch.int64, device=device_type)
    layer = tokens, weights, weights[:, :256], ids
    if cuda_training.keeps_z(*layer, activation=Activation(activation), w13_layout=W13Layout(layout)):
        return None
    return f"no kernel for the gradients of experts with {activation} on this GPU"


@functools.cache
def _try_attention(device_type: str, dtype: torch.dtype) -> str | None:
    tensor = torch.zeros(1, 1, 1, 64, dtype=dtype, device=device_type)
    try:
        flash_attention(tensor, tensor, tensor)
    except REFUSALS as error:
        return summary(error)
    return None


@functools.cache
def _try_lists(device_type: str, dtype: torch.dtype) -> str | None:
    tensor = torch.zeros(1, 1, 1, 64, dtype=dtype, device=device_type)
    numbers = torch.arange(2, dtype=torch.int32, device=device_type)
    try:
        listed_keys.attend(tensor, tensor, tensor, numbers[:1, None], numbers[1:], numbers, 1)
    except REFUSALS as error:
        return summary(error)
    return None


@functools.cache
def _try_experts(device_type: str, dtype: torch.dtype) -> str | None:
    tokens = torch.zeros(1, 64, dtype=dtype, device=device_type)
    w13 = torch.zeros(1, 128, 64, dtype=dtype, device=device_type)
    weights = torch.ones(1, 1, dtype=torch.float32, device=device_type)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device_type)
    try:
        fused_moe(tokens, w13, w13[:, :64], weights, ids)
    except REFUSALS as error:
        return summary(error)
    return None


@functools.cache
def _try_routing(device_type: str, dtype: torch.dtype) -> str | None:
    try:
        topk_routing(torch.zeros(1, 32, dtype=dtype, device=device_type), 2)
    except REFUSALS as error:
        return summary(error)
    return None
