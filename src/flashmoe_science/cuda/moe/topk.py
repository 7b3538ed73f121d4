"""A router's choice of experts (`kernels/cuda/topk_routing.cu`): checks, configuration, launch."""

from __future__ import annotations

import struct
from enum import Enum
from typing import Any

import torch

from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.configs.moe import topk as configs
from flashmoe_science.configs.moe.topk import TopkConfiguration
from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import LaunchPlan, addressed, loaded
from flashmoe_science.cuda.repeat import Call, Layout, cuda_allocator, prepare
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import limits, overlaps
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import Scores, check_topk_arguments

ADDRESSES = struct.Struct("4Q")
"""Of logits, bias, weights and ids."""
_REST = struct.Struct("5i f 2i")
ARGUMENT_BYTES = ADDRESSES.size + _REST.size
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def topk(
    logits: torch.Tensor,
    k: int,
    *,
    scores: Scores = Scores.SOFTMAX,
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashmoe_science.topk_routing` for CUDA tensors, in one kernel on PyTorch's current stream.

    Arguments are checked once for each combination of shapes, types and options. Nothing is synchronised. Can be
    captured in a CUDA graph after one call with the same combination. `kernels/cuda/topk_routing.cu` says how experts
    are ranked.

    Args:
        logits: (tokens, experts), contiguous; float32, bfloat16 or float16 (scores are float32).
        others: as there.

    Returns:
        weights float32 (tokens, k), ids int32 (tokens, k).

    Raises:
        InputError: arguments that do not fit, more than 1,024 experts or 32 groups, bfloat16 on a GPU before sm_80.
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    tensors = (logits,) if bias is None else (logits, bias)
    weights, ids = _calls(tensors, (k, scores, renormalize, scale, groups, top_groups))
    return weights, ids


def kernels(architecture: str) -> list[CudaKernel]:
    """See `cuda.choice.KernelModule`."""
    return [
        kernel(configuration, dtype, architecture)
        for configuration in configs.CONFIGURATIONS
        for dtype in dtypes(architecture)
    ]


def dtypes(architecture: str) -> tuple[torch.dtype, ...]:
    """Of the logits."""
    return _DTYPES if limits(architecture).bfloat16 else (torch.float32, torch.float16)


def kernel(configuration: TopkConfiguration, dtype: torch.dtype, architecture: str) -> CudaKernel:
    has = limits(architecture)
    return CudaKernel(
        source="topk_routing.cu",
        function="topk_routing",
        architecture=architecture,
        macros={
            "LANES": configuration.lanes,
            "EXPERTS_PER_LANE": configuration.experts_per_lane,
            "WARPS": configuration.warps,
            "LOGITS_BITS": 8 * dtype.itemsize,
            "NATIVE_REDUX": int(has.cp_async),  # both came with sm_80
            "DEPENDENT": int(overlaps(architecture)),
            "LOSSES": 0,
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 16 if has.bfloat16 else 8,
        },
        threads_per_block=configuration.threads,
        dynamic_shared_bytes=0,
    )


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    logits = tensors[0]
    k, scores, renormalize, scale, groups, top_groups = options
    tokens, experts = logits.shape
    results = [Layout((tokens, k), (k, 1), dtype) for dtype in (torch.float32, torch.int32)]
    allocate = cuda_allocator()
    if tokens == 0:
        return lambda *tensors: tuple(allocate(*result) for result in results)
    device = device_of(index)
    check_limits(logits, experts, groups, device)
    make_context_current(device.index)
    configuration = configs.configuration(experts)
    compiled = kernel(configuration, logits.dtype, device.architecture)
    blocks = -(-tokens // configuration.tokens_per_block)
    dependent = bool(compiled.macros["DEPENDENT"])
    launcher = loaded(compiled, device, (blocks, 1, 1), ARGUMENT_BYTES, dependent=dependent)
    write_arguments(
        launcher.buffer, tokens, experts, k, scores, renormalize, scale, groups=groups, top_groups=top_groups
    )
    start = addressed(launcher, ADDRESSES)
    inputs = {"logits": logits.element_size()}
    if len(tensors) > 1:
        return prepare({**inputs, "correction_bias": 4}, results, LaunchPlan(start), index, allocate)

    def without_bias(logits: int, weights: int, ids: int, stream: int) -> None:
        start(logits, 0, weights, ids, stream)

    return prepare(inputs, results, LaunchPlan(without_bias), index, allocate)


def check_limits(logits: torch.Tensor, experts: int, groups: int, device: Device) -> None:
    """Raise InputError for what the kernels do not take on a device."""
    if experts > configs.MAX_EXPERTS:
        raise InputError(
            f"logits has {experts} experts; the CUDA kernel takes at most {configs.MAX_EXPERTS}: use torch.topk"
        )
    if logits.dtype == torch.bfloat16 and not limits(device.architecture).bfloat16:
        raise InputError(f"logits is bfloat16, which {device.architecture} does not have: use logits.float()")
    if groups > configs.MAX_GROUPS:
        raise InputError(
            f"groups is {groups}; the CUDA kernel takes at most {configs.MAX_GROUPS}: use torch.topk"
        )


class RoutingKernel(Enum):
    """The one that there is."""

    TOPK = "topk_routing"


def choose(logits: torch.Tensor, groups: int, device: Device) -> Choice:
    """What a call takes, for explanations. Raises InputError as `check_limits` does."""
    experts = logits.shape[1]
    check_limits(logits, experts, groups, device)
    configuration = configs.configuration(experts)
    return Choice(
        RoutingKernel.TOPK,
        configuration,
        f"the only kernel: a token's experts are spread over {configuration.lanes} lanes",
    )


def check_call(tensors: Tensors, options: Options) -> None:
    logits, *bias = tensors
    k, _, renormalize, scale, groups, top_groups = options
    check_topk_arguments(logits, k, renormalize, bias[0] if bias else None, scale, groups, top_groups)


def _check(tensors: Tensors, options: Options) -> None:
    check_call(tensors, options)
    logits, *bias = tensors
    # Address 0 would mean that there is no bias.
    reject_without_memory(logits=logits, **({"correction_bias": bias[0]} if bias else {}))


_calls = Calls(_check, _make_call, options=6, most=1024)


def write_arguments(
    buffer: Any,
    tokens: int,
    experts: int,
    k: int,
    scores: Scores,
    renormalize: bool,
    scale: float,
    *,
    groups: int = 1,
    top_groups: int = 1,
) -> None:
    """All fields of the kernel's `TopkParameters` but the addresses."""
    sigmoid = int(scores is Scores.SIGMOID)
    _REST.pack_into(
        buffer,
        ADDRESSES.size,
        tokens,
        experts,
        k,
        sigmoid,
        int(renormalize),
        float(scale),
        experts // groups if groups > 1 else 0,
        top_groups,
    )
