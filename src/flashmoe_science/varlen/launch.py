"""A call on plain tensors: recognised, or checked and made ready; the results' memory, the launch.

A model makes the same call for each layer of a step. So a thread keeps its last call for each combination of options,
and one comparison in C++, of lengths and bounds too, tells whether the next is like it (`alike.dense_matcher`). When
they change, once a step, the call is looked up by its signature, which has none of them; what was made ready for
earlier shapes is kept. On CUDA one function of C has all of these calls, and is asked before (`cuda.steady`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from operator import itemgetter
from typing import NamedTuple

import torch

from flashmoe_science.alike import Matches, dense_matcher, never
from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cpu import varlen as cpu
from flashmoe_science.cpu.library import allocate as allocate_on_cpu
from flashmoe_science.cuda import varlen as cuda
from flashmoe_science.cuda.repeat import Layout, cuda_allocator, current_device
from flashmoe_science.cuda.steady import Kind, KnownCalls, RepeatedCall, repeated_call
from flashmoe_science.errors import DeviceError, InputError
from flashmoe_science.plans import keep
from flashmoe_science.torch_private import dispatch_modes, forward_levels
from flashmoe_science.varlen.arguments import Inputs, Options, check, check_sizes, signature_of
from flashmoe_science.varlen.problem import (
    REPEATED,
    Backend,
    Problem,
    Repeat,
    Repeatable,
    Run,
    Sizes,
    Tensors,
)

_BACKENDS: dict[str, Backend] = {"cpu": cpu, "cuda": cuda}
_MAX_RUNS = 1024
_MAX_RECENT = 64
_MAX_MADE = 128
_runs: dict[tuple[object, ...], Run] = {}
Repetition = Callable[[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None], None]
"""See `problem.Repeat`."""
_tensors = tuple.__new__  # of a NamedTuple, without its own function's frame


class _Call(NamedTuple):
    """A call that was made, and what the next one is compared with."""

    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    return_lse: bool
    recorded: bool
    """Whether autograd would record it, where that is on: one of the tensors requires a gradient."""
    device: int
    """Which has to be current; -1: none has."""
    given: Callable[[tuple[torch.Tensor | None, ...]], tuple[torch.Tensor, ...]]
    """Of the inputs, those that are not None, in the order of `REPEATED`."""
    matches: Matches
    """Of these; only asked where none is nested."""
    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
    output: Layout
    lse: Layout | None
    repeat: Repetition
    steady: RepeatedCall | None
    """The same for `steady`, for tensors that do not require a gradient."""


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.steady = KnownCalls(len(Inputs._fields))
        """Makes calls like those of `made` without a line of Python, where it can."""
        self.recent: dict[tuple[object, ...], _Call] = {}
        """By options, and by which inputs are not None."""
        self.made: dict[tuple[object, ...], _Call] = {}
        """By the same, bounds and shapes: batches of several sizes, or two models, may take turns."""

    def keep(self, kind: tuple[object, ...], shapes: tuple[object, ...], call: _Call) -> None:
        """Have a call in both, as the last of `made`."""
        made = self.made
        while len(made) >= _MAX_MADE:
            del made[next(iter(made))]
        made[shapes] = call
        keep(self.recent, kind, call, _MAX_RECENT)
        if call.steady is not None:
            self.steady.add(call.steady)


of_thread = _OfThread()


def repeated(
    inputs: tuple[torch.Tensor | None, ...], options: tuple[object, ...], max_seqlen_q: int, max_seqlen_k: int
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """The results of a call that is like this thread's last one with these options, by Python; None for any other.

    Args:
        inputs: in the order of `Inputs`.
        options: in the order of `Options`.
    """
    if forward_levels._current_level >= 0 or dispatch_modes():
        return None
    try:
        # As `_key`, without its frame.
        _, _, _, _, key_starts, table, lengths, sinks, slopes, out, key_scale, value_scale, tree = inputs
        call = of_thread.recent.get(
            (
                options,
                key_starts is None,
                table is None,
                lengths is None,
                sinks is None,
                slopes is None,
                out is None,
                key_scale is None,
                value_scale is None,
                tree is None,
            )
        )
        if call is None:
            return None
        (
            same_seqlen_q,
            same_seqlen_k,
            causal,
            return_lse,
            recorded,
            device,
            given,
            matches,
            allocate,
            layout,
            lse_layout,
            repeat,
            steady,
        ) = call
        tensors = given(inputs)
        for tensor in tensors:
            if tensor.is_nested:
                return None
    except (AttributeError, TypeError):
        # No tensor, or an option that cannot be hashed: the checks say which.
        return None
    try:
        if (
            max_seqlen_q != same_seqlen_q
            or max_seqlen_k != same_seqlen_k
            or options[0] is not causal
            or options[5] is not return_lse
            or not matches(*tensors)
            or (recorded and torch.is_grad_enabled())
            or (device >= 0 and current_device() != device)
        ):
            return None
    except (ValueError, RuntimeError):
        # A bound that is no number: the checks say so.
        return None
    if steady is not None:
        of_thread.steady.add(steady)  # it may have been forgotten
    if out is None:
        out = allocate(*layout)
    if lse_layout is None:
        repeat(tensors, out, None)
        return out
    lse = allocate(*lse_layout)
    repeat(tensors, out, lse)
    return out, lse


def launch(
    inputs: Inputs, options: Options, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, if the options ask for it, the log-sum-exp: see `attention.attention_varlen`."""
    query, key, value, *_, sinks, alibi_slopes, out, key_scale, value_scale, tree_mask = inputs
    try:
        signature = signature_of(inputs, options)
        run = _runs.get(signature)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        # Not tensors, not dense, without dimensions, or an option that cannot be hashed: the checks say which.
        check(inputs, options)
        raise
    if run is None:
        problem = check(inputs, options)
        check_sizes(inputs, max_seqlen_q, max_seqlen_k)  # before anything is compiled
        reject_gradients(query, key, value, sinks, alibi_slopes, out, key_scale, value_scale)
        run = _prepare(problem, query.device)
        keep(_runs, signature, run, _MAX_RUNS)
    for each in inputs:
        if each is not None and each.is_nested:  # a jagged one has sizes and strides, as of a dense tensor
            check(inputs, options)
    sizes = check_sizes(inputs, max_seqlen_q, max_seqlen_k)
    if query.requires_grad or key.requires_grad or value.requires_grad:
        reject_gradients(query, key, value)
    if sinks is not None or alibi_slopes is not None or out is not None:
        reject_gradients(sinks, alibi_slopes, out)
    if query.is_cuda:  # without memory, to a kernel they would not be there; on the CPU every call looks
        given = {"sinks": sinks, "alibi_slopes": alibi_slopes, "tree_mask": tree_mask}
        reject_without_memory(**{name: tensor for name, tensor in given.items() if tensor is not None})
    if key_scale is not None or value_scale is not None:
        reject_gradients(key_scale, value_scale)
    if type(query) is not torch.Tensor:
        reject_without_memory(query=query, key=key, value=value)
    tokens, num_heads, _ = query.shape
    if out is None:
        out = query.new_empty((tokens, num_heads, value.shape[-1]))
    lse = query.new_empty((tokens, num_heads), dtype=torch.float32) if options.return_lse else None
    if tokens and num_heads:
        lengths = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.block_table, inputs.seqused_k
        more = sinks, alibi_slopes, key_scale, value_scale, tree_mask
        tensors = Tensors(query, key, value, out, lse, *lengths, *more)
        run(tensors, sizes)
        _remember(inputs, options, run, sizes, tensors)
    return out, lse


def _key(inputs: tuple[torch.Tensor | None, ...], options: tuple[object, ...]) -> tuple[object, ...]:
    (
        _,
        _,
        _,
        _,
        cu_seqlens_k,
        block_table,
        seqused_k,
        sinks,
        alibi_slopes,
        out,
        key_scale,
        value_scale,
        tree,
    ) = inputs
    return (
        options,
        cu_seqlens_k is None,
        block_table is None,
        seqused_k is None,
        sinks is None,
        alibi_slopes is None,
        out is None,
        key_scale is None,
        value_scale is None,
        tree is None,
    )


def _remember(inputs: Inputs, options: Options, run: Run, sizes: Sizes, made: Tensors) -> None:
    """Make a call like this one the thread's last with these options."""
    names = [name for name in REPEATED if getattr(inputs, name) is not None]
    given = itemgetter(*map(Inputs._fields.index, names))
    tensors: tuple[torch.Tensor, ...] = given(inputs)
    kind = _key(inputs, tuple(options))
    shapes = kind, sizes, *(tensor.shape for tensor in tensors)
    call = of_thread.made.pop(shapes, None)
    if call is None or call.causal is not options.causal or not call.matches(*tensors):
        matches = dense_matcher(*tensors, under_no_grad=True)
        if matches is never:
            return
        repeat = run.repeat(made, sizes, inputs.out is not None) if isinstance(run, Repeatable) else None
        call = _call_like(inputs, options, sizes, matches, names, repeat, _by_run(run, sizes, names))
    of_thread.keep(kind, shapes, call)


def _call_like(
    inputs: Inputs,
    options: Options,
    sizes: Sizes,
    matches: Matches,
    names: list[str],
    repeat: Repeat | None,
    otherwise: Repetition,
) -> _Call:
    """The call that was made.

    Args:
        names: of the inputs that are not None, in the order of `REPEATED`; `matches` is of them.
        repeat: the backend's way of making it again.
        otherwise: what makes it again where there is none.
    """
    query, value = inputs.query, inputs.value
    given = itemgetter(*map(Inputs._fields.index, names))
    tokens, num_heads, _ = query.shape
    value_dim = value.shape[-1]
    on_cuda = query.is_cuda
    allocate = cuda_allocator() if on_cuda else allocate_on_cpu
    output = Layout((tokens, num_heads, value_dim), (num_heads * value_dim, value_dim, 1), query.dtype)
    lse = Layout((tokens, num_heads), (num_heads, 1), torch.float32) if options.return_lse else None
    recorded = any(tensor.requires_grad for tensor in given(inputs))
    steady = None
    if repeat is not None and repeat.target is not None and not recorded:
        kind = Kind(
            Inputs._fields, names, given(inputs), tuple(options), allocate, output, lse, sizes.max_seqlen_q
        )
        steady = repeated_call(kind, repeat.target)
    return _Call(
        max_seqlen_q=sizes.max_seqlen_q,
        max_seqlen_k=sizes.max_seqlen_k,
        causal=options.causal,
        return_lse=options.return_lse,
        recorded=recorded,
        device=query.get_device() if on_cuda and torch.cuda.device_count() > 1 else -1,
        given=given,
        matches=matches,
        allocate=allocate,
        output=output,
        lse=lse,
        repeat=otherwise if repeat is None else repeat.call,
        steady=steady,
    )


def _by_run(run: Run, sizes: Sizes, names: list[str]) -> Repetition:
    """Repeats a call of a backend that has no shorter way; it is given tensors of these names."""
    order = [*names, "output", "lse"]
    arranged = itemgetter(*(order.index(name) if name in order else len(order) for name in Tensors._fields))

    def repeat(tensors: tuple[torch.Tensor, ...], output: torch.Tensor, lse: torch.Tensor | None) -> None:
        run(_tensors(Tensors, arranged((*tensors, output, lse, None))), sizes)

    return repeat


def _prepare(problem: Problem, device: torch.device) -> Run:
    """Choose, compile and load, once for each problem."""
    backend = _BACKENDS.get(device.type)
    if backend is None:
        raise DeviceError(
            f"there is no kernel of attention_varlen for {device}; expected tensors on "
            f"{' or '.join(_BACKENDS)}: move them with .to()"
        )
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return backend.prepare(problem, device)


def reject_gradients(*tensors: torch.Tensor | None) -> None:
    """Raise InputError if autograd would record a call with these."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise InputError(
            "an argument requires a gradient, and attention_varlen has none; call it under torch.no_grad(), or "
            "flash_attention for each sequence"
        )
