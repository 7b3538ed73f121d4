"""Attention over a batch of sequences, as the lab sees it. Nothing here imports torch before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from cudadent42.base.errors import UsageError
from cudadent42.base.toml import MAX_SIZE, Table
from cudadent42.operations.attention_varlen.case import FP8_SCALES, VarlenCase
from cudadent42.operations.attention_varlen.trees import MOST_NODES, TREES
from cudadent42.operations.interface import Definition, Numerics, columns_with, other_size

if TYPE_CHECKING:
    from cudadent42.model.implementations import Call, Implementation
    from cudadent42.operations.attention_varlen.inputs import VarlenInputs
    from flashmoe_science.jit.nvrtc import CudaKernel

_ELEMENT_BF16 = {"bf16": 1, "fp16": 0}
"""The CUDA kernels' macro for the dtypes that they take."""
_MOST_SOFTCAP = 1e4
_FUNCTIONS = ("attention_decode", "attention_decode_hopper", "attention_hopper_varlen", "attention_varlen")


def _parse_case(table: Table, name: str, dtype: str) -> VarlenCase:
    num_heads = table.integer("num_heads", 1, MAX_SIZE, None)
    num_kv_heads = table.integer("num_kv_heads", 1, MAX_SIZE, num_heads)
    if num_heads % num_kv_heads:
        raise UsageError(
            f"{table.where}: num_heads = {num_heads} is not a multiple of num_kv_heads = {num_kv_heads}"
        )
    head_dim = table.integer("head_dim", 8, 512, None)
    value_dim = table.integer("value_dim", 0, 512, 0)
    for key, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if dim % 8:
            raise UsageError(f"{table.where}: {key} = {dim}; expected a multiple of 8")
    longest = table.integer("longest", 1, MAX_SIZE, None)
    batch = table.integer("batch", 1, MAX_SIZE, None)
    fp8_scales = table.value("fp8_scales", str, "a text", "")
    if fp8_scales and fp8_scales not in FP8_SCALES:
        raise UsageError(
            f"{table.where}: fp8_scales = {fp8_scales!r}; expected one of {', '.join(FP8_SCALES)}, or none"
        )
    if fp8_scales and dtype == "fp32":
        raise UsageError(f"{table.where}: a cache of FP8 has queries of fp16 or bf16, not fp32")
    case = VarlenCase(
        name=name,
        dtype=dtype,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        longest=longest,
        shortest=table.integer("shortest", 0, longest, longest),
        head_dim=head_dim,
        queries=table.integer("queries", 0, MAX_SIZE, 1),
        chunks=table.integer("chunks", 0, batch, 0),
        chunk=table.integer("chunk", 0, MAX_SIZE, 0),
        page_size=table.integer("page_size", 0, MAX_SIZE, 0),
        causal=table.value("causal", bool, "true or false", True),
        window=table.integer("window", -1, MAX_SIZE, -1),
        draw=table.integer("draw", 0, MAX_SIZE, 0),
        fp8_scales=fp8_scales,
        tree=table.value("tree", str, "a text", ""),
        sinks=table.value("sinks", bool, "true or false", False),
        softcap=table.number("softcap", _MOST_SOFTCAP, f"a number from 0 to {_MOST_SOFTCAP:.0f}", 0.0),
        value_dim=0 if value_dim == head_dim else value_dim,
        alibi=table.value("alibi", bool, "true or false", False),
    )
    _check_tree(table, case)
    return case


def _check_tree(table: Table, case: VarlenCase) -> None:
    """UsageError for a tree that no kernel takes, or whose queries are not its nodes."""
    if not case.tree:
        return
    if case.tree not in TREES:
        raise UsageError(f"{table.where}: tree = {case.tree!r}; expected one of {', '.join(TREES)}, or none")
    if not 1 <= case.queries <= MOST_NODES:
        raise UsageError(
            f"{table.where}: queries = {case.queries}; expected 1 to {MOST_NODES} with a tree, whose nodes they are"
        )
    for name, is_given in (("window", case.window >= 0), ("alibi", case.alibi)):
        if is_given:
            raise UsageError(
                f"{table.where}: {name} and tree are both given; expected one: {name} goes by a query's position"
            )


def _cells(case: VarlenCase) -> Mapping[str, object]:
    return {
        "batch_size": case.batch,
        "seq_len": max(case.seqlens_q),
        "hidden_dim": case.head_dim,
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "seqlen_k": max(case.seqlens_k),
        "keys": sum(case.seqlens_k),
        "page_size": case.page_size,
        "window": case.window,
        "fp8_scales": case.fp8_scales,
        "tree": case.tree,
        "sinks": case.sinks,
        "softcap": case.softcap,
        "value_dim": case.head_dim_v,
        "alibi": case.alibi,
    }


def _shape(case: VarlenCase) -> str:
    """``sequences × heads × query/keys × head dim``, with what else differs spelled out."""
    keys = f"{case.shortest}–{case.longest}" if case.shortest != case.longest else f"{case.longest}"
    phrase = f"{case.batch} × {case.num_heads}/{case.num_kv_heads} × {case.queries or 'all'}/{keys} × {_dims(case)}"
    if case.chunks:
        phrase += f", {case.chunks} chunk{'' if case.chunks == 1 else 's'} of {case.chunk}"
    if case.page_size:
        phrase += f", pages of {case.page_size}"
    if case.window >= 0:
        phrase += f", window {case.window}"
    if case.fp8_scales:
        phrase += f", FP8 scaled by {case.fp8_scales}"
    if case.tree:
        phrase += f", {case.tree} trees"
    if case.sinks:
        phrase += ", sinks"
    if case.softcap:
        phrase += f", soft cap {case.softcap:g}"
    if case.alibi:
        phrase += ", ALiBi"
    return phrase + ("" if case.causal else ", full")


def _dims(case: VarlenCase) -> str:
    return f"{case.head_dim}/{case.head_dim_v}" if case.value_dim else f"{case.head_dim}"


def _shape_legend(cases: Sequence[VarlenCase]) -> str:
    of_values = ", of keys/values where they differ" if any(case.value_dim for case in cases) else ""
    return f"sequences × query/key heads × queries/keys of each × head dim{of_values}"


_MOST_HIDDEN_KEYS = 1024
"""Of sequences that are in no plan: their float64 reference is to take milliseconds."""


def _unplanned(cases: Sequence[VarlenCase], chance: Random, count: int) -> Sequence[VarlenCase]:
    """Other lengths, of a few sequences."""
    unplanned = []
    for number in range(count):
        case = chance.choice(cases)
        longest = other_size([each.longest for each in cases], _MOST_HIDDEN_KEYS, chance)
        unplanned.append(
            replace(
                case,
                name=f"hidden-{number}",
                batch=min(case.batch, 4),
                longest=longest,
                shortest=min(case.shortest, longest),
                chunks=min(case.chunks, 1),
                chunk=min(case.chunk, longest),
                draw=number,
            )
        )
    return unplanned


def _implementations() -> tuple[Implementation, ...]:
    from cudadent42.operations.attention_varlen.implementations import ALL

    return ALL


def _plug_in(function: Callable[..., Any]) -> Callable[[VarlenCase, VarlenInputs], Call]:
    """Called as `flashmoe_science.attention_varlen` is."""

    def prepare(case: VarlenCase, inputs: VarlenInputs) -> Call:
        from functools import partial

        from cudadent42.operations.attention_varlen.implementations import arguments

        return partial(function, inputs.query, inputs.key, inputs.value, **arguments(case, inputs))

    return prepare


def _cuda_kernels(architectures: Sequence[str]) -> list[CudaKernel]:
    """Those of common calls, and of the cache that they read; others compile at their first call."""
    from cudadent42.operations.cuda_kernels import kernels_of
    from flashmoe_science.cuda import varlen
    from flashmoe_science.cuda.varlen import append

    return kernels_of(architectures, varlen.kernels, append.kernels)


def _needed(kernels: Sequence[CudaKernel], cases: Sequence[VarlenCase]) -> list[CudaKernel]:
    """Those of a case's dtype and head dim, for packed keys or pages. None is built ahead for a cache of FP8."""
    from flashmoe_science.configs.attention.decode_hopper import box_rows

    taken = {
        (case.head_dim, case.head_dim_v, _ELEMENT_BF16[case.dtype], case.page_size)
        for case in cases
        if case.dtype in _ELEMENT_BF16 and not case.fp8_scales
    }

    def fits(macros: Mapping[str, int]) -> bool:
        box = macros.get("BOX_ROWS")
        return any(
            (macros["HEAD_DIM"], macros.get("VALUE_DIM", macros["HEAD_DIM"])) == (head_dim, value_dim)
            and macros["ELEMENT_BF16"] == bf16
            and macros.get("PAGED", int(page_size > 0)) == int(page_size > 0)
            and (box is None or (page_size > 0 and box == box_rows(page_size)))
            for head_dim, value_dim, bf16, page_size in taken
        )

    return [kernel for kernel in kernels if kernel.function in _FUNCTIONS and fits(kernel.macros)]


def _numerics() -> Numerics[VarlenCase, VarlenInputs]:
    from cudadent42.operations.attention_varlen.numerics import NUMERICS

    return NUMERICS


OPERATION = Definition(
    case_type=VarlenCase,
    baseline="pytorch",
    case_keys=frozenset(
        (
            *(
                "batch",
                "num_heads",
                "num_kv_heads",
                "longest",
                "shortest",
                "head_dim",
                "queries",
                "chunks",
                "chunk",
            ),
            *("page_size", "causal", "window", "draw", "fp8_scales", "tree", "sinks", "softcap"),
            *("value_dim", "alibi"),
        )
    ),
    parse_case=_parse_case,
    columns=columns_with(
        *(
            "num_kv_heads",
            "seqlen_k",
            "keys",
            "page_size",
            "window",
            "fp8_scales",
            "tree",
            "sinks",
            "softcap",
        ),
        *("value_dim", "alibi"),
    ),
    cells=_cells,
    shape=_shape,
    shape_legend=_shape_legend,
    implementations=_implementations,
    plug_in=_plug_in,
    function="attention_varlen",
    cpu_kernels=("attention_varlen",),
    cuda_kernels=_cuda_kernels,
    needed=_needed,
    numerics=_numerics,
    unplanned=_unplanned,
)
