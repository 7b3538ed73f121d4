"""Dense tensors through the kernels of `attention_varlen`: `flash_attention` with a window, a cap or sinks.

Where their strides allow it they are seen as sequences, for the decode kernel and Hopper's. The portable kernel takes
them as they are.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from flashmoe_science.configs.attention.varlen import Features, VarlenConfiguration, tiles
from flashmoe_science.cuda.attention.problem import Strides, result_like, strides_of
from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.choice import Choice, Refusal
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import Launcher, LaunchPlan
from flashmoe_science.cuda.repeat import Call, Layout, cuda_allocator, layout_of, prepare
from flashmoe_science.cuda.varlen import portable
from flashmoe_science.cuda.varlen.arguments import PER_CALL, ByteStrides, PlanArguments
from flashmoe_science.cuda.varlen.kind import VarlenKernel, bucket
from flashmoe_science.cuda.varlen.lengths import length_table
from flashmoe_science.cuda.varlen.prepare import first_of
from flashmoe_science.cuda.varlen.select import candidates
from flashmoe_science.cuda.varlen.select import explained as explained_sequences
from flashmoe_science.errors import InputError, NoKernelError
from flashmoe_science.varlen.problem import Problem, Run, Sizes
from flashmoe_science.varlen.problem import Tensors as VarlenTensors
from flashmoe_science.varlen.sequences import Sequences, as_sequences

_ADDRESSES = struct.Struct("11Q")
_ALIGNMENTS = {"query": 16, "key": 16, "value": 16, "sinks": 4}


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    window: tuple[int, int],
    softcap: float,
    softmax_scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output like query, and the log-sum-exp or None: see `flashmoe_science.varlen.dense_forward`.

    Arguments were checked. ``softmax_scale`` is positive. Arguments are looked at once for each combination of shapes,
    strides, types and options.
    """
    tensors = (query, key, value) if sinks is None else (query, key, value, sinks)
    output, lse = _calls(tensors, (window, softcap, softmax_scale, return_lse))
    return output, lse


def _checked_before(tensors: Tensors, options: Options) -> None:
    """By the operator, or by `flashmoe_science.varlen.dense`."""


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    query, key, value = tensors[:3]
    window, softcap, softmax_scale, return_lse = options
    device = device_of(index)
    make_context_current(index)
    output = result_like(query)
    batch, heads, seqlen_q, _ = query.shape
    lse = (
        Layout((batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1), torch.float32)
        if return_lse
        else None
    )
    plan = LaunchPlan(_nothing)
    if query.numel() > 0:
        seen = as_sequences(query, key, value, output) if key.numel() > 0 else None
        if seen is not None:
            problem = seen.problem(
                query.dtype,
                window=window,
                softcap=softcap,
                softmax_scale=softmax_scale,
                sinks=len(tensors) > 3,
                return_lse=return_lse,
            )
            run = _run(problem, device, seen.sizes)
            if run is not None:
                return _call(run, seen, layout_of(output), index, return_lse)
        plan = _plan(query, key, value, output, device, window, softcap, softmax_scale, len(tensors) > 3)
    names = list(_ALIGNMENTS)[: len(tensors)]
    inputs = {name: _ALIGNMENTS[name] for name in names}
    return prepare(inputs, (layout_of(output), lse), plan, index, cuda_allocator())


_calls = Calls(_checked_before, _make_call, options=4)


def _run(problem: Problem, device: Device, sizes: Sizes) -> Run | None:
    """What makes the call where another kernel than the portable one takes it."""
    try:
        kinds = candidates(problem, device, sizes, sizes.batch * sizes.max_seqlen_q)
    except NoKernelError:
        return None  # the dense launch says what is wrong
    return (
        None
        if kinds[0] is VarlenKernel.PORTABLE
        else first_of(kinds, problem, device, bucket(sizes.max_seqlen_q))
    )


def explained(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device: Device,
    *,
    window: tuple[int, int],
    softcap: float,
    with_sinks: bool,
) -> tuple[Choice, tuple[Refusal, ...]]:
    """Which kernel and configuration such a call takes, and why each other does not take it. Launches nothing.

    Raises:
        NoKernelError: no kernel takes it.
    """
    seen = as_sequences(query, key, value, result_like(query)) if query.numel() and key.numel() else None
    if seen is not None:
        problem = seen.problem(
            query.dtype, window=window, softcap=softcap, softmax_scale=1.0, sinks=with_sinks, return_lse=False
        )
        choice, others = explained_sequences(problem, device, seen.sizes, seen.query.sizes[0])
        if choice.kernel is not VarlenKernel.PORTABLE:
            return choice, others
    else:
        reason = "it reads sequences, as which these tensors cannot be seen"
        others = tuple(Refusal(kind, reason) for kind in VarlenKernel if kind is not VarlenKernel.PORTABLE)
    tile = _tile(query, key, device, window, softcap)
    return Choice(VarlenKernel.PORTABLE, tile, "mma.sync kernel, for dense tensors of any strides"), others


def _tile(
    query: torch.Tensor, key: torch.Tensor, device: Device, window: tuple[int, int], softcap: float
) -> VarlenConfiguration:
    """Of the portable kernel. Raises NoKernelError where it does not take such tensors."""
    batch, heads, seqlen_q, head_dim = query.shape
    kv_heads = key.shape[1]
    refusal = portable.why_not_dimensions(query.dtype, head_dim, head_dim, device)
    if refusal is not None:
        raise NoKernelError(
            f"no CUDA kernel of attention with a window, a cap or sinks takes this: {refusal}"
        )
    both = tiles(device.architecture, head_dim, head_dim, features(query, key, window, softcap))
    return portable.tile_of(both, seqlen_q * (heads // kv_heads), batch * kv_heads, device)


def _call(run: Run, seen: Sequences, layout: Layout, device: int, return_lse: bool) -> Call:
    allocate = cuda_allocator()
    lengths, of_device = seen.lengths, length_table(device)
    query_starts = of_device.get(lengths.cu_seqlens_q)
    key_starts, pages, used_keys = (
        None if numbers is None else of_device.get(numbers)
        for numbers in (lengths.cu_seqlens_k, lengths.pages, lengths.seqused_k)
    )
    table = None if pages is None else pages[:, None]
    sizes, heads_of = seen.sizes, seen.heads_of
    of_query, of_key, of_value, of_output = seen.query, seen.key, seen.value, seen.output
    tokens, heads, _ = of_query.sizes

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        if sinks is not None and heads_of > 1:
            sinks = sinks.repeat(heads_of)
        output = allocate(*layout)
        lse = allocate((tokens, heads), (heads, 1), torch.float32) if return_lse else None
        run(
            VarlenTensors(
                query.as_strided(*of_query),
                key.as_strided(*of_key),
                value.as_strided(*of_value),
                output.as_strided(*of_output),
                lse,
                query_starts,
                key_starts,
                table,
                used_keys,
                sinks,
                None,
            ),
            sizes,
        )
        return output, None if lse is None else seen.dense_lse(lse)

    return call


def plan_arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    block_m: int,
    window: tuple[int, int],
    softcap: float,
    softmax_scale: float,
) -> PlanArguments:
    """All but what differs between calls."""
    element = query.element_size()
    heads, seqlen_q, head_dim = query.shape[1:]
    kv_heads, seqlen_k = key.shape[1:3]

    def in_bytes(name: str, tensor: torch.Tensor) -> ByteStrides:
        strides: Strides = strides_of(name, tensor)
        return strides[0] * element, strides[1] * element, strides[2] * element

    return PlanArguments(
        query=in_bytes("query", query),
        key=in_bytes("key", key),
        value=in_bytes("value", value),
        output=in_bytes("output", output),
        lse=(heads * seqlen_q, seqlen_q, 1),
        num_slices=kv_heads,
        heads_per_kv_head=heads // kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        window_left=window[0],
        window_right=window[1],
        softmax_scale=softmax_scale,
        softcap=softcap,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        tiles_per_sequence=-(-seqlen_q * (heads // kv_heads) // block_m),
    )


def features(query: torch.Tensor, key: torch.Tensor, window: tuple[int, int], softcap: float) -> Features:
    return Features(
        packed_heads=query.shape[1] > key.shape[1], left_window=window[0] >= 0, softcap=softcap > 0
    )


def per_call(batch: int, seqlen_q: int, num_tiles: int, slices_per_section: int) -> tuple[int, ...]:
    """What of `PER_CALL` follows the addresses."""
    return 0, 0, batch, batch * seqlen_q, num_tiles, slices_per_section


def _plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    device: Device,
    window: tuple[int, int],
    softcap: float,
    softmax_scale: float,
    with_sinks: bool,
) -> LaunchPlan:
    batch, heads, seqlen_q, head_dim = query.shape
    kv_heads, seqlen_k = key.shape[1:3]
    tile = _tile(query, key, device, window, softcap)
    arguments = plan_arguments(query, key, value, output, tile.block_m, window, softcap, softmax_scale)
    num_tiles = arguments.tiles_per_sequence * batch
    if not portable.countable(seqlen_q * (heads // kv_heads), num_tiles * kv_heads):
        raise InputError(f"{batch * seqlen_q} query rows are more than a launch can count; split the batch")
    launcher = portable.launcher(tile, query.dtype, device, arguments)
    section = portable.section_keys(head_dim, head_dim, query.element_size(), device) // max(seqlen_k, 1)
    PER_CALL.pack_into(
        launcher.buffer, 0, *(0,) * 11, *per_call(batch, seqlen_q, num_tiles, min(kv_heads, max(1, section)))
    )
    launcher.config.grid[0] = num_tiles * kv_heads
    return LaunchPlan(_launch(launcher, with_sinks))


def _launch(launcher: Launcher, with_sinks: bool) -> Any:
    buffer, start, pack = launcher.buffer, launcher.start, _ADDRESSES.pack_into

    def launch(*addresses: int) -> None:
        query, key, value, *sinks, output, lse, stream = addresses
        pack(buffer, 0, query, key, value, output, lse, 0, 0, 0, 0, sinks[0] if with_sinks else 0, 0)
        start(stream)

    return launch


def _nothing(*addresses: int) -> None:
    """The launch of a call without output elements."""
