"""A router's choice and its losses in one pass over the logits, and their gradient in another (`topk_routing.cu` with
LOSSES, `routing_losses.cu`, `topk_routing_backward.cu`).
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import torch

from flashmoe_science.configs.moe import topk as configs
from flashmoe_science.configs.moe.topk import TopkConfiguration
from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import LaunchPlan, addressed, loaded
from flashmoe_science.cuda.moe import topk
from flashmoe_science.cuda.repeat import Call, Layout, cuda_allocator, prepare
from flashmoe_science.cuda.workspace import aligned
from flashmoe_science.jit.limits import limits, overlaps
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import Scores
from flashmoe_science.routing_options import RoutingOptions, RoutingPass

MOST_BLOCKS = 1024
"""Of the pass over the logits. It is the same on every GPU, so that the order of sums is."""
_THREADS = 1024  # of the block that adds the blocks' sums
_SUMS = struct.Struct("3Q")  # probabilities, slots, squares
_LOSSES = struct.Struct("6Q")  # the sums; balance, z, counts
_LOSSES_REST = struct.Struct("3i")
_BACKWARD = struct.Struct("7Q")  # logits, ids, grad_weights, counts, grad_balance, grad_z, grad_logits
_BACKWARD_REST = struct.Struct("5i f")


def forward(
    logits: torch.Tensor, k: int, options: RoutingOptions, correction_bias: torch.Tensor | None
) -> RoutingPass:
    """As `flashmoe_science.topk_routing` and `routing_losses`, on PyTorch's current stream; nothing is synchronised.

    Args:
        logits: (tokens, experts), at least one token.

    Returns:
        weights (tokens, k) float32, ids (tokens, k) int32, both losses float32 scalars, counts (experts,) int64.

    Raises:
        InputError, DeviceError, BuildError: as `cuda.moe.topk.topk`.
    """
    tensors = (logits,) if correction_bias is None else (logits, correction_bias)
    return RoutingPass(*_forward_calls(tensors, (k, *dataclasses.astuple(options))))


def backward(
    logits: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    grad_weights: torch.Tensor | None,
    grad_balance: torch.Tensor | None,
    grad_z: torch.Tensor | None,
    options: RoutingOptions,
) -> torch.Tensor:
    """(tokens, experts), like logits. Gradients that are None are zero; those given are contiguous float32.

    Raises:
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    given = (grad_weights, grad_balance, grad_z)
    there = tuple(each is not None for each in given)
    tensors = (logits, ids, counts, *(each for each in given if each is not None))
    (gradient,) = _backward_calls(
        tensors, (options.scores, options.renormalize, options.scaling_factor, there)
    )
    result: torch.Tensor = gradient
    return result


def takes(logits: torch.Tensor) -> bool:
    """Whether the GPU of a CUDA tensor has these kernels."""
    return built_for(device_of(logits.get_device()).architecture)


def built_for(architecture: str) -> bool:
    """From sm_80 on; for sm_75 the pass with losses does not fit the registers."""
    return limits(architecture).bfloat16


def kernels(architecture: str) -> list[CudaKernel]:
    """See `cuda.choice.KernelModule`."""
    if not built_for(architecture):
        return []
    made = [
        make(configuration, dtype, architecture)
        for configuration in configs.CONFIGURATIONS
        for dtype in topk.dtypes(architecture)
        for make in (forward_kernel, backward_kernel)
    ]
    return [*made, losses_kernel(architecture)]


def forward_kernel(configuration: TopkConfiguration, dtype: torch.dtype, architecture: str) -> CudaKernel:
    plain = topk.kernel(configuration, dtype, architecture)
    return dataclasses.replace(plain, macros={**plain.macros, "LOSSES": 1})


def losses_kernel(architecture: str) -> CudaKernel:
    return CudaKernel(
        source="routing_losses.cu",
        function="routing_losses",
        architecture=architecture,
        macros={"THREADS": _THREADS, "DEPENDENT": int(overlaps(architecture))},
        threads_per_block=_THREADS,
        dynamic_shared_bytes=0,
    )


def backward_kernel(configuration: TopkConfiguration, dtype: torch.dtype, architecture: str) -> CudaKernel:
    plain = topk.kernel(configuration, dtype, architecture)
    macros = {name: value for name, value in plain.macros.items() if name != "LOSSES"}
    name = "topk_routing_backward"
    return dataclasses.replace(plain, source=f"{name}.cu", function=name, macros=macros)


def write_losses_arguments(buffer: Any, blocks: int, experts: int, tokens: int) -> None:
    """All fields of the kernel's `LossParameters` but the addresses."""
    _LOSSES_REST.pack_into(buffer, _LOSSES.size, blocks, experts, tokens)


def write_backward_arguments(
    buffer: Any, tokens: int, experts: int, k: int, scores: Scores, renormalize: bool, scale: float
) -> None:
    """All fields of the kernel's `TopkBackwardParameters` but the addresses."""
    sigmoid = int(scores is Scores.SIGMOID)
    _BACKWARD_REST.pack_into(
        buffer, _BACKWARD.size, tokens, experts, k, sigmoid, int(renormalize), float(scale)
    )


FORWARD_BYTES = topk.ARGUMENT_BYTES + _SUMS.size
LOSSES_BYTES = _LOSSES.size + _LOSSES_REST.size
BACKWARD_BYTES = _BACKWARD.size + _BACKWARD_REST.size


def blocks_of(tokens: int, configuration: TopkConfiguration) -> int:
    return min(MOST_BLOCKS, -(-tokens // configuration.tokens_per_block))


def _make_forward(tensors: Tensors, options: Options, index: int) -> Call:
    logits = tensors[0]
    tokens, experts = logits.shape
    k, scores, renormalize, scale, groups, top_groups = options
    device = device_of(index)
    topk.check_limits(logits, experts, groups, device)
    make_context_current(device.index)
    configuration = configs.configuration(experts)
    blocks = blocks_of(tokens, configuration)
    first = forward_kernel(configuration, logits.dtype, device.architecture)
    second = losses_kernel(device.architecture)
    dependent = overlaps(device.architecture)
    route = loaded(first, device, (blocks, 1, 1), FORWARD_BYTES, dependent=dependent)
    add = loaded(second, device, (1, 1, 1), LOSSES_BYTES, dependent=dependent)
    topk.write_arguments(
        route.buffer, tokens, experts, k, scores, renormalize, scale, groups=groups, top_groups=top_groups
    )
    write_losses_arguments(add.buffer, blocks, experts, tokens)
    sums = aligned(4 * blocks * experts)
    biased = len(tensors) > 1

    def launch(*given: int) -> None:
        logits_at, *rest = given
        bias = rest.pop(0) if biased else 0
        weights, ids, balance, z, counts, workspace, stream = rest
        parts = workspace, workspace + sums, workspace + 2 * sums
        topk.ADDRESSES.pack_into(route.buffer, 0, logits_at, bias, weights, ids)
        _SUMS.pack_into(route.buffer, topk.ARGUMENT_BYTES, *parts)
        route.start(stream)
        _LOSSES.pack_into(add.buffer, 0, *parts, balance, z, counts)
        add.start(stream)

    results = [
        *(Layout((tokens, k), (k, 1), dtype) for dtype in (torch.float32, torch.int32)),
        *(Layout((), (), torch.float32) for _ in range(2)),
        Layout((experts,), (1,), torch.int64),
    ]
    inputs = {"logits": logits.element_size(), **({"correction_bias": 4} if biased else {})}
    plan = LaunchPlan(launch, 2 * sums + aligned(4 * blocks))
    return prepare(inputs, results, plan, index, cuda_allocator())


def _make_backward(tensors: Tensors, options: Options, index: int) -> Call:
    logits, ids, *_ = tensors
    tokens, experts = logits.shape
    scores, renormalize, scale, there = options
    device = device_of(index)
    make_context_current(device.index)
    configuration = configs.configuration(experts)
    compiled = backward_kernel(configuration, logits.dtype, device.architecture)
    blocks = -(-tokens // configuration.tokens_per_block)
    dependent = overlaps(device.architecture)
    launcher = loaded(compiled, device, (blocks, 1, 1), BACKWARD_BYTES, dependent=dependent)
    write_backward_arguments(launcher.buffer, tokens, experts, ids.shape[1], scores, renormalize, scale)
    start = addressed(launcher, _BACKWARD)

    def launch(logits_at: int, ids_at: int, counts: int, *rest: int) -> None:
        *given, gradient, stream = rest
        left = iter(given)
        weights, balance, z = (next(left) if each else 0 for each in there)
        start(logits_at, ids_at, weights, counts, balance, z, gradient, stream)

    names = [
        name for name, each in zip(("grad_weights", "grad_balance", "grad_z"), there, strict=True) if each
    ]
    inputs = {"logits": logits.element_size(), "ids": 4, "counts": 8, **dict.fromkeys(names, 4)}
    result = Layout((tokens, experts), (experts, 1), logits.dtype)
    return prepare(inputs, [result], LaunchPlan(launch), index, cuda_allocator())


_forward_calls = Calls(topk.check_call, _make_forward, options=6, most=1024, under_no_grad=True)
_backward_calls = Calls(
    lambda tensors, options: None, _make_backward, options=4, most=1024, under_no_grad=True
)
