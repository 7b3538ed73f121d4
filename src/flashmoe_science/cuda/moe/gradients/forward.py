"""The forward pass of a mixture of experts that keeps what its activation is applied to."""

from __future__ import annotations

import torch

from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.moe.forward import ALIGNMENTS, FIVE, problem_of
from flashmoe_science.cuda.moe.select import plan
from flashmoe_science.cuda.repeat import Call, Layout, cuda_allocator, prepare
from flashmoe_science.moe_arguments import Activation, W13Layout, check_moe_arguments


def forward_keeping(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation,
    w13_layout: W13Layout,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, with the bits that the same kernels give without, and z: what the activation is applied to. (Few
    tokens have other kernels where nothing is kept, which round less.)

    z is (tokens * k, rows of w13), like hidden_states: row r is of the r-th slot in sorted order (by expert, ascending
    within an expert; rows behind the last valid slot hold anything). Its columns are all gates, then all ups, whatever
    the layout of w13.

    Raises:
        NoKernelError: no kernel keeps it (`can_differentiate`).
        InputError, DeviceError, BuildError: see `cuda.moe.forward.forward`.
    """
    more = {"w13_bias": w13_bias, "w2_bias": w2_bias}
    names = (*FIVE, *(name for name, bias in more.items() if bias is not None))
    biases = (bias for bias in more.values() if bias is not None)
    tensors = hidden_states, w13, w2, topk_weights, topk_ids, *biases
    output, z = _calls(tensors, (activation, w13_layout, choice, names))
    return output, z


def _check(tensors: Tensors, options: Options) -> None:
    check_moe_arguments(activation=options[0], **dict(zip(options[-1], tensors, strict=True)))


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    hidden_states, w13, w2, _, topk_ids, *_ = tensors
    activation, w13_layout, choice, names = options
    make_context_current(index)
    slots, columns = topk_ids.numel(), w13.shape[1]
    output = Layout(tuple(hidden_states.shape), tuple(hidden_states.stride()), hidden_states.dtype)
    results = (output, Layout((slots, columns), (columns, 1), hidden_states.dtype))
    if hidden_states.numel() == 0:
        allocate = cuda_allocator()
        return lambda *tensors: tuple(allocate(*result) for result in results)
    problem = problem_of(hidden_states, w13, w2, topk_ids, activation, w13_layout, names=names, keeps=True)
    inputs = {name: ALIGNMENTS[name] for name in names}
    return prepare(inputs, results, plan(problem, device_of(index), choice), index, cuda_allocator())


_calls = Calls(_check, _make_call, options=4, most=1024, under_no_grad=True)
