"""Attention over sequences of any lengths on the CPU: the kernel in kernels/cpu and its launch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from enum import IntEnum

import torch

from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cpu.library import ELEMENT_TYPES, load_function
from flashmoe_science.errors import InputError
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.varlen import dequantized
from flashmoe_science.varlen.problem import REPEATED, Problem, Repeat, Repeatable, Run, Sizes, Tensors

__all__ = ["prepare"]


class _Problem(ctypes.Structure):
    """VarlenProblem of varlen_problem.h."""

    _fields_ = (
        ("element_type", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("query_stride", ctypes.c_int64 * 2),
        ("key_stride", ctypes.c_int64 * 3),
        ("value_stride", ctypes.c_int64 * 3),
        ("out_stride", ctypes.c_int64 * 2),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("split_keys", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("softmax_scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    )


class _Call(ctypes.Structure):
    """VarlenCall of varlen_problem.h."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("seqused_k", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("alibi_slopes", ctypes.c_void_p),
        ("tree_mask", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("table_row", ctypes.c_int64),
        ("table_pages", ctypes.c_int64),
        ("alibi_row", ctypes.c_int64),
        ("fault_index", ctypes.c_int64),
        ("fault_number", ctypes.c_int64),
    )


_NONE = dict.fromkeys(Tensors._fields)
_PLACES = {name: word for word, (name, kind) in enumerate(_Call._fields_) if kind is ctypes.c_void_p}
"""Which word of a `_Call` has the address of what has that name."""


class _Repeat(ctypes.Structure):
    """VarlenRepeat of attention_varlen.cpp."""

    _fields_ = (("call", _Call), ("given", ctypes.c_int64), ("place", ctypes.c_int64 * len(_PLACES)))


class _Status(IntEnum):
    """Status of problem.h and VarlenStatus of varlen_problem.h, without those that raise MemoryError."""

    SUCCESS = 0
    NULL_TENSOR = 2
    QUERY_FAULT = 3
    KEY_FAULT = 4
    USED_FAULT = 5
    PAGE_FAULT = 6


def prepare(problem: Problem, device: torch.device, instruction_set: InstructionSet | None = None) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`.

    Args:
        instruction_set: whose code; the CPU's best unless given.
    """
    if problem.quantized is not None:
        return dequantized.prepare(
            problem, torch.float32, lambda wide: prepare(wide, device, instruction_set)
        )
    size = problem.dtype.itemsize
    native = _Problem(
        element_type=ELEMENT_TYPES[problem.dtype],
        heads=problem.num_heads,
        kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        page_size=problem.page_size,
        query_stride=tuple(stride * size for stride in problem.query_strides),
        key_stride=tuple(stride * size for stride in problem.key_strides),
        value_stride=tuple(stride * size for stride in problem.value_strides),
        out_stride=tuple(stride * size for stride in problem.output_strides),
        window_left=problem.window_left,
        window_right=problem.window_right,
        split_keys=problem.split_keys,
        chunk=problem.chunk,
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
    )
    chosen = instruction_set or host.choose_instruction_set()
    launch = _load(chosen, "flashmoe_varlen_method")
    again = _load(chosen, "flashmoe_varlen_repeat_method")

    def run(tensors: Tensors, sizes: Sizes) -> None:
        call = _call(tensors, sizes)
        status = launch(ctypes.addressof(native), ctypes.addressof(call), torch.get_num_threads())
        if status != _Status.SUCCESS:
            _refuse(_Status(status), call, tensors)

    def repeat(tensors: Tensors, sizes: Sizes, own_output: bool) -> Repeat:
        like = {**tensors._asdict(), "out": tensors.output if own_output else None}
        names = [name for name in REPEATED if like[name] is not None]
        kept = _Repeat(
            call=_call(tensors, sizes),
            given=len(names),
            place=tuple(_PLACES[name] for name in names),
        )
        address_of, num_threads = ctypes.addressof, torch.get_num_threads

        def call(given: tuple[torch.Tensor, ...], output: torch.Tensor, lse: torch.Tensor | None) -> None:
            if again(
                address_of(native),  # not once: the call keeps what it reads
                address_of(kept),
                num_threads(),
                output.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                *[tensor.data_ptr() for tensor in given],
            ):
                # Nothing was touched. It says what is wrong.
                named = dict(zip(names, given, strict=True))
                named.pop("out", None)
                run(Tensors(**{**_NONE, **named, "output": output, "lse": lse}), sizes)  # type: ignore[arg-type]

        return Repeat(call)

    return Repeatable(run, repeat)


def _call(tensors: Tensors, sizes: Sizes) -> _Call:
    query, key, value, output, lse, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, sinks, slopes = (
        tensors[:11]
    )
    return _Call(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        output.data_ptr(),
        _address("lse", lse),
        cu_seqlens_q.data_ptr(),
        _address("cu_seqlens_k", cu_seqlens_k),
        _address("block_table", block_table),
        _address("seqused_k", seqused_k),
        _address("sinks", sinks),
        _address("alibi_slopes", slopes),
        _address("tree_mask", tensors.tree_mask),
        sizes.batch,
        query.shape[0],
        key.shape[0],
        0 if block_table is None else block_table.stride(0),
        0 if block_table is None else block_table.shape[1],
        0 if slopes is None or slopes.dim() == 1 else slopes.stride(0),
    )


def _address(name: str, tensor: torch.Tensor | None) -> int | None:
    """None where nothing is given. Raises InputError for a tensor without memory: the kernel would take it for that."""
    if tensor is None:
        return None
    address = tensor.data_ptr()
    if not address:
        reject_without_memory(**{name: tensor})
    return address


def _refuse(status: _Status, call: _Call, tensors: Tensors) -> None:
    """Raise InputError for what the kernel did not take."""
    index, number = call.fault_index, call.fault_number
    if status is _Status.NULL_TENSOR:
        reject_without_memory(
            **{name: tensor for name, tensor in tensors._asdict().items() if tensor is not None}
        )
        raise AssertionError("every tensor has memory")
    if status is _Status.QUERY_FAULT or status is _Status.KEY_FAULT:
        of_query = status is _Status.QUERY_FAULT
        name, rows = ("cu_seqlens_q", "query") if of_query else ("cu_seqlens_k", "key")
        raise InputError(
            f"{name}[{index}] is {number}; expected {name} to begin with 0, never to fall, and to end at "
            f"{call.tokens if of_query else call.keys}, the rows of {rows}, at most"
        )
    if status is _Status.USED_FAULT:
        raise InputError(
            f"seqused_k[{index}] is {number}; expected at least 0 and no more keys than the sequence's "
            + ("pages hold" if tensors.block_table is not None else "part of the packed keys has")
        )
    raise InputError(
        f"block_table names page {number} for sequence {index}; expected pages from 0 to {call.keys - 1} for all keys "
        "that a query sees"
    )


@functools.cache
def _load(instruction_set: InstructionSet, method: str) -> Callable[..., int]:
    return load_function("attention_varlen", method, instruction_set)
