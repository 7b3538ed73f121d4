"""Attention backward on CUDA tensors: a cached launch plan per shape, then as little as possible per call."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, is_readable
from flashmoe_science.cuda.attention.gradients.select import plan, select
from flashmoe_science.cuda.attention.problem import Strides, result_like, strides_of
from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import LaunchPlan
from flashmoe_science.cuda.repeat import Call, Layout, cuda_allocator, layout_of, misaligned, raw_stream
from flashmoe_science.errors import InputError
from flashmoe_science.gradients import Gradients, Needs, with_contiguous_rows

_DTYPES = (torch.float16, torch.bfloat16)
_INPUTS = {"query": 16, "key": 16, "value": 16, "output": 16, "lse": 4}
"""And the bytes at a multiple of which each has to start."""


def backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    *,
    causal: bool,
    softmax_scale: float | None,
    needs: Needs,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    choice: Choice | None = None,
) -> Gradients:
    """The gradients of attention, as `flashmoe_science.gradients.Backward` says, on PyTorch's current stream.

    Nothing is synchronised. Can be captured in a CUDA graph after one call with the same combination of shapes, strides
    and options. A gradient of the output that the kernels cannot read is copied once.

    Args:
        window: (left, right), how many keys a row sees before and after its position i + seqlen_k - seqlen_q beside
            that one; -1: all. With ``causal`` the right one is -1.
        softcap: scores became softcap * tanh(score / softcap); 0: they stayed.
        choice: the kernel and configuration to use instead of `select`'s.

    Raises:
        InputError: tensors that the forward pass would not have taken either.
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    recent = _calls.recent
    if (
        # What `_calls` does, without tuples and slices of them: of a small call that is a part that shows.
        grad_lse is None
        and choice is None
        and recent[0] == len(_INPUTS) + 1
        and causal is recent[1]
        and softmax_scale == recent[2]
        and needs == recent[3]
        and window == recent[4]
        and softcap == recent[5]
        and recent[7](query, key, value, output, lse, grad_output)
    ):
        of_query, of_key, of_value = recent[8](query, key, value, output, lse, grad_output)
        return of_query, of_key, of_value
    tensors = (query, key, value, output, lse, grad_output)
    results = _calls(
        tensors if grad_lse is None else (*tensors, grad_lse),
        (causal, softmax_scale, needs, window, softcap, choice),
    )
    return results[0], results[1], results[2]


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    device: Device | None = None,
) -> Choice:
    """Which kernel and configuration the backward pass of a call takes, and why. Launches nothing.

    ``device``: as of `cuda.attention.forward`.
    """
    return select(*asked(query, key, value, causal, softmax_scale, device))


def asked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    device: Device | None,
) -> tuple[BackwardProblem, Device]:
    """What `explain` chooses for, and on which GPU; arguments as there."""
    like = result_like(query)
    problem = _problem(
        (query, key, value, like), strides_of("output", like), causal, softmax_scale, Needs(True, True, True)
    )
    return problem, device_of(query.get_device()) if device is None else device


def _check(tensors: Tensors, options: Options) -> None:
    """Autograd passes on what the forward pass has checked."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise InputError(f"expected dense tensors, not {type(tensor).__name__}")


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    """Choose, compile, load and prepare."""
    query, key, value, output = tensors[:4]
    causal, softmax_scale, needs, window, softcap, choice = options
    if query.dtype not in _DTYPES:
        raise InputError(
            f"query has dtype {query.dtype}; the CUDA kernels take float16 and bfloat16: use .to()"
        )
    rows, lse, grad_output = tensors[:4], tensors[4], tensors[5]
    if any(map(_is_split, rows)) or not lse.is_contiguous():
        readable = (*with_contiguous_rows(*rows), lse.contiguous(), *tensors[5:])
        return _with_contiguous(_make_call(readable, options, index))
    make_context_current(index)
    copied = not is_readable(grad_output)
    like = (
        torch.empty_like(grad_output, device="meta", memory_format=torch.contiguous_format)
        if copied
        else grad_output
    )
    problem = _problem(
        (query, key, value, output),
        strides_of("grad_output", like),
        causal,
        softmax_scale,
        needs,
        window=window,
        softcap=softcap,
    )
    prepared = plan(problem, device_of(index), choice)
    results = [
        layout_of(result_like(tensor)) if needed else None
        for needed, tensor in zip(needs, (query, key, value), strict=True)
    ]
    return _prepare(results, prepared, index, copied=copied, with_lse=len(tensors) > len(_INPUTS) + 1)


def _is_split(tensor: torch.Tensor) -> bool:
    """Whether the elements of a row lie apart."""
    return tensor.numel() > 0 and tensor.stride(3) != 1


def _with_contiguous(call: Call) -> Call:
    """What hooks saved and restored need not have the strides that the forward pass read and wrote."""

    def copied(*tensors: torch.Tensor) -> tuple[Any, ...]:
        return call(*with_contiguous_rows(*tensors[:4]), tensors[4].contiguous(), *tensors[5:])

    return copied


_calls = Calls(
    _check, _make_call, options=6, repeated=lambda options: options[-1] is None, under_no_grad=True
)
"""Options: causal, softmax_scale, needs, window, softcap and choice."""


def _prepare(
    results: list[Layout | None], plan: LaunchPlan, device: int, *, copied: bool, with_lse: bool
) -> Call:
    """The call itself.

    Args:
        copied: the gradient of the output is copied to contiguous memory first.
        with_lse: there is a gradient of the log-sum-exp.
    """
    launch, allocate, stream_of = plan.launch, cuda_allocator(), raw_stream
    workspace_sizes = (plan.workspace_bytes,) if plan.workspace_bytes else None
    uint8 = torch.uint8

    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        grad_output: torch.Tensor,
        grad_lse: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        query_address, key_address, value_address = query.data_ptr(), key.data_ptr(), value.data_ptr()
        output_address, lse_address = output.data_ptr(), lse.data_ptr()
        if (query_address | key_address | value_address | output_address) & 15:
            raise InputError(misaligned(_INPUTS, (query, key, value, output, lse)))
        if copied:
            grad_output = grad_output.contiguous()
        elif grad_output.data_ptr() & 15:
            grad_output = torch.empty_strided(
                grad_output.shape, grad_output.stride(), dtype=grad_output.dtype, device=grad_output.device
            ).copy_(grad_output)  # a clone would close gaps, and the plan holds the strides
        grad_lse_address = 0
        if with_lse and grad_lse is not None:
            grad_lse = grad_lse.contiguous()
            grad_lse_address = grad_lse.data_ptr()
        gradients = tuple([None if result is None else allocate(*result) for result in results])
        addresses = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        if workspace_sizes is not None:
            # Freed when this returns: what the allocator puts there next on this stream comes after the launches.
            workspace = allocate(workspace_sizes, (1,), uint8)
            addresses.append(workspace.data_ptr())
        launch(
            query_address,
            key_address,
            value_address,
            output_address,
            grad_output.data_ptr(),
            lse_address,
            grad_lse_address,
            *addresses,
            stream_of(device),
        )
        return gradients

    of_query, of_key, of_value = results
    if copied or with_lse or of_query is None or of_key is None or of_value is None:
        return call

    def of_all(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        grad_output: torch.Tensor,
    ) -> tuple[Any, ...]:
        """As `call`, without its loops and conditions: what nearly every layer's backward pass is."""
        query_address, key_address, value_address = query.data_ptr(), key.data_ptr(), value.data_ptr()
        output_address, gradient_address = output.data_ptr(), grad_output.data_ptr()
        if (query_address | key_address | value_address | output_address | gradient_address) & 15:
            return call(query, key, value, output, lse, grad_output)
        grad_query, grad_key, grad_value = allocate(*of_query), allocate(*of_key), allocate(*of_value)
        addresses = (
            query_address,
            key_address,
            value_address,
            output_address,
            gradient_address,
            lse.data_ptr(),
            0,
            grad_query.data_ptr(),
            grad_key.data_ptr(),
            grad_value.data_ptr(),
        )
        if workspace_sizes is None:
            launch(*addresses, stream_of(device))
        else:
            workspace = allocate(workspace_sizes, (1,), uint8)
            launch(*addresses, workspace.data_ptr(), stream_of(device))
        return grad_query, grad_key, grad_value

    return of_all


def _problem(
    tensors: Tensors,
    grad_output_strides: Strides,
    causal: bool,
    softmax_scale: float | None,
    needs: Needs,
    *,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> BackwardProblem:
    query, key, value, output = tensors
    batch, num_heads, seqlen_q, head_dim = query.shape
    of_query, of_key, of_value = (
        strides_of("a gradient", result_like(tensor)) for tensor in (query, key, value)
    )
    return BackwardProblem(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        seqlen_q=seqlen_q,
        seqlen_k=key.shape[2],
        head_dim=head_dim,
        dtype=query.dtype,
        causal=causal,
        softmax_scale=1 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale),
        needs=needs,
        query_strides=strides_of("query", query),
        key_strides=strides_of("key", key),
        value_strides=strides_of("value", value),
        output_strides=strides_of("output", output),
        grad_output_strides=grad_output_strides,
        grad_query_strides=of_query,
        grad_key_strides=of_key,
        grad_value_strides=of_value,
        window_left=window[0],
        window_right=window[1],
        softcap=softcap,
    )
