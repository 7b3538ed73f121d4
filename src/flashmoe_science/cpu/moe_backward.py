"""The gradients of experts on the CPU: the launch of kernels/cpu/moe_backward.cpp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cpu import moe
from flashmoe_science.cpu.library import CPU, load_function
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MoeGradients, MoeNeeds, MoeTensors


class _Problem(ctypes.Structure):
    """MoeBackwardProblem of moe_backward.cpp."""

    _fields_ = (*moe.FIELDS, ("grad_output_row", ctypes.c_int64))


class _Tensors(ctypes.Structure):
    """MoeBackwardTensors of moe_backward.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            *("grad_output", "hidden_states", "w13", "w2", "weights", "ids", "z", "w2_bias"),
            *("grad_hidden_states", "grad_w13", "grad_w2", "grad_weights", "grad_w13_bias", "grad_w2_bias"),
        )
    )


def backward(
    grad_output: torch.Tensor,
    tensors: MoeTensors,
    z: torch.Tensor | None,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    needs: MoeNeeds,
    instruction_set: InstructionSet | None = None,
) -> MoeGradients:
    """See `flashmoe_science.moe_gradients.MoeBackward`. A gradient of the output whose last stride is not 1 is copied.

    Besides the gradients it takes memory of (tokens * k, hidden + 3 * intermediate) in the tensors' dtype, or of those
    parts that the needed gradients go through.

    Args:
        instruction_set: whose code; the CPU's best unless given.

    Raises:
        InputError: a tensor has no memory.
        DeviceError, BuildError: see `flashmoe_science.jit.host.build`.
    """
    if grad_output.stride(1) != 1:
        grad_output = grad_output.contiguous()
    given = tensors.contiguous()
    hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias = given
    if z is None:
        z = moe.project(
            *given.five,
            w13_bias,
            activation=activation,
            w13_layout=w13_layout,
            instruction_set=instruction_set,
        )
    z = z.contiguous()
    gradients = MoeGradients(
        *(
            torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)
            if needed and tensor is not None
            else None
            for needed, tensor in zip(
                needs, (hidden_states, w13, w2, topk_weights, w13_bias, w2_bias), strict=True
            )
        )
    )
    experts, _, intermediate = w2.shape
    problem = _Problem(
        *moe.fields(hidden_states, intermediate, experts, topk_ids, activation, w13_layout),
        grad_output.stride(0) * grad_output.element_size(),
    )
    addresses = _Tensors(
        *(tensor.data_ptr() for tensor in (grad_output, hidden_states, w13, w2, topk_weights, topk_ids, z)),
        *(None if tensor is None else tensor.data_ptr() for tensor in (w2_bias, *gradients)),
    )
    launch = _load(instruction_set or host.choose_instruction_set())
    if launch(ctypes.addressof(problem), ctypes.addressof(addresses), torch.get_num_threads()):
        reject_without_memory(
            grad_output=grad_output,
            hidden_states=hidden_states,
            w13=w13,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            z=z,
        )
    return gradients


@functools.cache
def _load(instruction_set: InstructionSet) -> Callable[..., int]:
    return load_function("moe_backward", "flashmoe_moe_backward_method", instruction_set)
