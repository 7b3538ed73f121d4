"""Attention forward on CUDA tensors: a cached launch plan per shape, then as little as possible per call."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashmoe_science.arguments import (
    check_arguments,
    check_causal,
    reject_gradients,
    reject_without_memory,
)
from flashmoe_science.cuda.attention.problem import Problem, result_like, strides_of
from flashmoe_science.cuda.attention.select import plan, select
from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import Launch
from flashmoe_science.cuda.repeat import (
    Allocate,
    Call,
    Layout,
    cuda_allocator,
    current_device,
    layout_of,
    misaligned,
    raw_stream,
)
from flashmoe_science.errors import InputError

_DTYPES = (torch.float16, torch.bfloat16)
_INPUTS = {"query": 16, "key": 16, "value": 16}
"""And the bytes at a multiple of which each has to start."""


def _check(tensors: Tensors, options: Options) -> None:
    query, key, value = tensors
    check_arguments(query, key, value, options[1])


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    """Choose, compile, load and prepare."""
    query, key, value = tensors
    causal, softmax_scale, return_lse, choice = options
    _check_dtype(query)
    if softmax_scale == 0:
        # Scores are 0, or NaN where a product is infinite or NaN: so they are with a query that was multiplied by 0.
        return _with_query_times_zero(
            _make_call((query * 0, key, value), (causal, 1.0, return_lse, choice), index)
        )
    device = device_of(index)
    make_context_current(index)
    output = result_like(query)
    launch: Launch = _nothing
    if query.numel() > 0:
        problem = _problem(query, key, value, output, causal, softmax_scale, return_lse)
        launch = plan(problem, device, choice).launch
    return prepare(layout_of(output), return_lse, launch, index, cuda_allocator())


calls = Calls(_check, _make_call, options=4, repeated=lambda options: options[-1] is None)
"""Options: causal, softmax_scale, return_lse and choice. `flash_attention` compares a call with the last one itself."""
recorded = Calls(
    _check, _make_call, options=4, repeated=lambda options: options[-1] is None, under_no_grad=True
)
"""Those with a tensor that requires a gradient, as autograd makes them, with nothing recorded meanwhile. `forward`
compares a call with the last one, and `repeated` a call that autograd is to record."""


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    choice: Choice | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`flashmoe_science.flash_attention` for CUDA tensors, on PyTorch's current stream.

    Arguments are checked once for each combination of shapes, strides, types and options; then a call is a look-up, an
    allocation and a launch. Nothing is synchronised. Can be captured in a CUDA graph after one call with the same
    combination.

    Args:
        query, key, value, causal, softmax_scale, return_lse: as there; float16 or bfloat16, head_dim a multiple of 8 up
            to 256.
        choice: the kernel and configuration to use instead of `select`'s.

    Returns:
        The output, like query; and the log-sum-exp, float32 (batch, num_heads, seqlen_q), or None.

    Raises:
        InputError: arguments that do not fit together or require a gradient, a last dimension that is not
            contiguous, or rows that are not aligned to 16 bytes.
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    if causal is not True and causal is not False:
        causal = check_causal(causal)
    try:
        of_kind = calls
        if query.requires_grad or key.requires_grad or value.requires_grad:
            reject_gradients(query, key, value)
            of_kind = recorded
            _, *options, matches, call = of_kind.recent
            if options == [causal, softmax_scale, return_lse, choice] and matches(query, key, value):
                output, lse = call(query, key, value)
                return output, lse
        device = query.get_device()
        signature = (
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            device,
            key.get_device(),
            value.get_device(),
            torch.is_inference_mode_enabled(),  # changes what matches
            causal,
            softmax_scale,
            return_lse,
            choice,
        )
        ready = of_kind.ready.get(signature)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, not dense, or an argument that cannot be hashed: the checks say which.
        check_arguments(query, key, value, softmax_scale)
        raise
    if type(query) is not torch.Tensor or type(key) is not torch.Tensor or type(value) is not torch.Tensor:
        # A launch on memory that is not there would end the process's use of the GPU.
        reject_without_memory(query=query, key=key, value=value)
    if ready is None or device != current_device():
        return of_kind.first(signature, (query, key, value))
    of_kind.recent = ready.recent
    return ready.call(query, key, value)


def repeated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, softmax_scale: float | None
) -> Call | None:
    """Output and log-sum-exp of a call that autograd is to record, if it is like the last one of this thread that it
    recorded; else None. What matches requires the same gradients and needs no other check than those for a tangent and
    for a mode, as in `flash_attention`.
    """
    _, recent_causal, recent_scale, recent_lse, _, matches, call = recorded.recent
    if (
        causal is recent_causal
        and recent_lse is True
        and (
            softmax_scale is recent_scale or (type(softmax_scale) is float and softmax_scale == recent_scale)
        )
        and matches(query, key, value)
    ):
        again: Call = call
        return again
    return None


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    device: Device | None = None,
) -> Choice:
    """Which kernel and configuration `forward` takes for these tensors, and why. Launches nothing.

    ``device``: a GPU that need not be there, for tensors of any device, ``meta`` among them; theirs unless given.
    """
    problem, gpu = asked(query, key, value, causal, softmax_scale, return_lse, device)
    return select(problem, gpu)


def asked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    device: Device | None,
) -> tuple[Problem, Device]:
    """What `explain` chooses for, and on which GPU; arguments as there, which are checked."""
    check_arguments(query, key, value, softmax_scale)
    causal = check_causal(causal)
    _check_dtype(query)
    problem = _problem(query, key, value, result_like(query), causal, softmax_scale, return_lse)
    return problem, device_of(query.get_device()) if device is None else device


def _check_dtype(query: torch.Tensor) -> None:
    if query.dtype not in _DTYPES:
        raise InputError(
            f"query has dtype {query.dtype}; the CUDA kernels take float16 and bfloat16: use .to()"
        )


def _with_query_times_zero(call: Call) -> Call:
    def zeroed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
        return call(query * 0, key, value)

    return zeroed


def _nothing(query: int, key: int, value: int, output: int, lse: int, stream: int) -> None:
    """The launch of a call without output elements."""


def prepare(output: Layout, return_lse: bool, launch: Launch, device: int, allocate: Allocate) -> Call:
    """`repeat.prepare` for three tensors and one or two results, without its loops: a fifth of the host's time.

    Args:
        output: of the result (batch, heads, seqlen_q, head_dim).
        device: current when the call is made.
    """
    sizes, strides, dtype = output
    batch, heads, seqlen_q, _ = sizes
    lse_sizes, lse_strides = (batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1)
    stream_of, float32 = raw_stream, torch.float32

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
        query_address, key_address, value_address = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if (query_address | key_address | value_address) & 15:
            raise InputError(misaligned(_INPUTS, (query, key, value)))
        output = allocate(sizes, strides, dtype)
        if return_lse:
            lse = allocate(lse_sizes, lse_strides, float32)
            stream = stream_of(device)
            launch(query_address, key_address, value_address, output.data_ptr(), lse.data_ptr(), stream)
            return output, lse
        launch(query_address, key_address, value_address, output.data_ptr(), 0, stream_of(device))
        return output, None

    return call


def _kernels_scale(head_dim: int, softmax_scale: float | None) -> float:
    """What a kernel is given; 1 for 0, as the query is then multiplied by 0 before."""
    if softmax_scale is None:
        return 1 / math.sqrt(head_dim)
    return float(softmax_scale) or 1.0


def _problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
) -> Problem:
    batch, num_heads, seqlen_q, head_dim = query.shape
    return Problem(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        seqlen_q=seqlen_q,
        seqlen_k=key.shape[2],
        head_dim=head_dim,
        dtype=query.dtype,
        causal=causal,
        softmax_scale=_kernels_scale(head_dim, softmax_scale),
        return_lse=return_lse,
        query_strides=strides_of("query", query),
        key_strides=strides_of("key", key),
        value_strides=strides_of("value", value),
        output_strides=strides_of("output", output),
    )
