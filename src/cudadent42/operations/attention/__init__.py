"""Attention, as the lab sees it. Nothing here imports torch before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from cudadent42.base.errors import UsageError
from cudadent42.base.toml import MAX_SIZE, Table
from cudadent42.operations.attention.case import AttentionCase, overlap
from cudadent42.operations.interface import Configured, Definition, Numerics, Parts, other_size

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.model.implementations import Call, Implementation
    from cudadent42.operations.attention.inputs import AttentionInputs
    from flashmoe_science.cuda.choice import Tuned
    from flashmoe_science.cuda.device import Device
    from flashmoe_science.jit.nvrtc import CudaKernel

_ELEMENT_BF16 = {"bf16": 1, "fp16": 0}
"""The CUDA kernels' macro for the dtypes that they take."""
_FUNCTIONS = "attention_"
"""How the names of attention's CUDA kernels begin; a version of the library lists those of other operations too."""
_GRADIENTS = "attention_backward"
"""How those of its gradients begin, which no forward call leads to."""


def _parse_case(table: Table, name: str, dtype: str) -> AttentionCase:
    if table.has("seqlen") and (table.has("seqlen_q") or table.has("seqlen_k")):
        raise UsageError(f"{table.where}: give either seqlen or seqlen_q and seqlen_k, not both")
    both = table.integer("seqlen", 1, MAX_SIZE, None) if table.has("seqlen") else None
    num_heads = table.integer("num_heads", 1, MAX_SIZE, None)
    num_kv_heads = table.integer("num_kv_heads", 1, MAX_SIZE, num_heads)
    if num_heads % num_kv_heads:
        raise UsageError(
            f"{table.where}: num_heads = {num_heads} is not a multiple of num_kv_heads = {num_kv_heads}"
        )
    head_dim = table.integer("head_dim", 8, 512, None)
    if head_dim % 8:
        raise UsageError(f"{table.where}: head_dim = {head_dim}; expected a multiple of 8")
    case = AttentionCase(
        name=name,
        dtype=dtype,
        batch=table.integer("batch", 1, MAX_SIZE, None),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seqlen_q=table.integer("seqlen_q", 1, MAX_SIZE, both),
        seqlen_k=table.integer("seqlen_k", 1, MAX_SIZE, both),
        head_dim=head_dim,
        causal=table.value("causal", bool, "true or false", False),
        softmax_scale=_scale(table),
        query_strides=_strides(table, "query_strides"),
        key_strides=_strides(table, "key_strides"),
        value_strides=_strides(table, "value_strides"),
    )
    for tensor, (shape, strides) in zip(("query", "key", "value"), case.laid_out(), strict=True):
        if strides and overlap(shape, (*strides, 1)):
            raise UsageError(
                f"{table.where}: {tensor}_strides = {list(strides)}: rows of shape {list(shape)} would overlap"
            )
    return case


_LARGEST_SCALE = 1e38
_LARGEST_STRIDE = 1 << 40


def _scale(table: Table) -> float | None:
    if not table.has("softmax_scale"):
        return None
    scale = table.number("softmax_scale", _LARGEST_SCALE, "a number above 0", None)
    if scale == 0:
        raise UsageError(f"{table.where}: softmax_scale = 0; expected a number above 0")
    return scale


def _strides(table: Table, key: str) -> tuple[int, ...]:
    """Of batch, heads and rows; empty where the suite has none."""
    strides = table.value(key, list, "three whole numbers, of batch, heads and rows", [])
    if strides and (
        len(strides) != 3
        or any(type(each) is not int or not 1 <= each <= _LARGEST_STRIDE for each in strides)
    ):
        raise UsageError(
            f"{table.where}: {key} = {strides!r}; expected three whole numbers from 1: the elements between "
            "neighbours in batch, heads and rows"
        )
    return tuple(strides)


def _cells(case: AttentionCase) -> Mapping[str, object]:
    return {
        "batch_size": case.batch,
        "seq_len": case.seqlen_q,
        "hidden_dim": case.head_dim,
        "num_heads": case.num_heads,
        "causal": str(case.causal).lower(),
        "head_dim": case.head_dim,
        "seqlen_k": case.seqlen_k,
        "num_kv_heads": case.num_kv_heads,
    }


def _shape(case: AttentionCase) -> str:
    """``batch × heads × length × head dim``, with what differs from plain self-attention spelled out."""
    heads = f"{case.num_heads}"
    if case.num_kv_heads != case.num_heads:
        heads += f"/{case.num_kv_heads}"
    length = f"{case.seqlen_q}"
    if case.seqlen_k != case.seqlen_q:
        length += f"/{case.seqlen_k}"
    phrase = f"{case.batch} × {heads} × {length} × {case.head_dim}" + (" causal" if case.causal else "")
    if case.softmax_scale is not None:
        phrase += f" scale {case.softmax_scale:g}"
    return phrase + (" strided" if case.query_strides or case.key_strides or case.value_strides else "")


def _shape_legend(cases: Sequence[AttentionCase]) -> str:
    grouped = any(c.num_heads != c.num_kv_heads or c.seqlen_q != c.seqlen_k for c in cases)
    return "batch × heads × length × head dim" + ("; query/key where they differ" if grouped else "")


_MOST_HIDDEN_LENGTH = 1024
"""Of shapes that are in no plan: their float64 reference is to take milliseconds."""


def _unplanned(cases: Sequence[AttentionCase], chance: Random, count: int) -> Sequence[AttentionCase]:
    """Other lengths, of keys alone where the queries' are fixed as in decoding."""
    unplanned = []
    for number in range(count):
        case = chance.choice(cases)
        keys = other_size([each.seqlen_k for each in cases], _MOST_HIDDEN_LENGTH, chance)
        queries = case.seqlen_q
        if case.seqlen_q == case.seqlen_k:
            queries = keys
        elif case.seqlen_q > 1:
            queries = other_size([each.seqlen_q for each in cases], _MOST_HIDDEN_LENGTH, chance)
        hidden = replace(case, name=f"hidden-{number}", batch=1, seqlen_q=queries, seqlen_k=keys)
        unplanned.append(replace(hidden, query_strides=(), key_strides=(), value_strides=()))
    return unplanned


def _implementations() -> tuple[Implementation, ...]:
    from cudadent42.operations.attention.implementations import ALL

    return ALL


def _plug_in(function: Callable[..., Any]) -> Callable[[AttentionCase, AttentionInputs], Call]:
    """Called as ``function(query, key, value, *, causal, softmax_scale)``."""

    def prepare(case: AttentionCase, inputs: AttentionInputs) -> Call:
        query, key, value, scale = inputs.query, inputs.key, inputs.value, inputs.softmax_scale
        causal = case.causal

        def call() -> Tensor:
            result: Tensor = function(query, key, value, causal=causal, softmax_scale=scale)
            return result

        return call

    return prepare


def _cuda_kernels(architectures: Sequence[str]) -> list[CudaKernel]:
    from cudadent42.operations.cuda_kernels import kernels_of
    from flashmoe_science.cuda import attention

    return kernels_of(architectures, attention.kernels)


def _needed(kernels: Sequence[CudaKernel], cases: Sequence[AttentionCase]) -> list[CudaKernel]:
    return needed_with_gradients(
        [kernel for kernel in kernels if not kernel.function.startswith(_GRADIENTS)], cases
    )


def needed_with_gradients(kernels: Sequence[CudaKernel], cases: Sequence[AttentionCase]) -> list[CudaKernel]:
    """Those of both passes, of a case's dtype and, per kernel, of the smallest compiled head dim that holds it."""
    kernels = [kernel for kernel in kernels if kernel.function.startswith(_FUNCTIONS)]
    # A kernel that was compiled for no head dim takes all that others do.
    largest = max((kernel.macros.get("HEAD_DIM", 0) for kernel in kernels), default=0)

    def head_dim(kernel: CudaKernel) -> int:
        return kernel.macros.get("HEAD_DIM", largest)

    compiled: dict[str, set[int]] = {}
    for kernel in kernels:
        compiled.setdefault(kernel.function, set()).add(head_dim(kernel))
    taken = set()
    for case in cases:
        for function, head_dims in compiled.items():
            fitting = [size for size in head_dims if size >= case.head_dim]
            if fitting and case.dtype in _ELEMENT_BF16:
                taken.add((function, min(fitting), _ELEMENT_BF16[case.dtype]))
    return [
        kernel
        for kernel in kernels
        if (kernel.function, head_dim(kernel), kernel.macros["ELEMENT_BF16"]) in taken
    ]


def _compiled(case: AttentionCase, device: Device) -> CudaKernel:
    from cudadent42.operations.attention.parts import compiled

    return compiled(case, device)


def _without(case: AttentionCase, inputs: AttentionInputs) -> Parts:
    from cudadent42.operations.attention.parts import without

    return without(case, inputs)


def _configured(name: str, case: AttentionCase, device: Device) -> Configured:
    from cudadent42.operations.attention.configured import configured

    return configured(name, case, device)


def _tuned() -> Tuned[Any]:
    from flashmoe_science.cuda.attention.select import TUNED

    return TUNED


def _numerics() -> Numerics[AttentionCase, AttentionInputs]:
    from cudadent42.operations.attention.numerics import NUMERICS

    return NUMERICS


OPERATION = Definition(
    case_type=AttentionCase,
    baseline="pytorch",
    case_keys=frozenset(
        (
            *("batch", "num_heads", "num_kv_heads", "seqlen", "seqlen_q", "seqlen_k", "head_dim", "causal"),
            *("softmax_scale", "query_strides", "key_strides", "value_strides"),
        )
    ),
    parse_case=_parse_case,
    columns=(
        *("implementation", "dtype", "batch_size", "seq_len", "hidden_dim", "num_heads", "latency_ms"),
        *("throughput_tokens_per_sec", "memory_mb", "case", "causal", "head_dim", "block", "seed"),
        *("seqlen_k", "num_kv_heads", "position", "inner", "timestamp_s", "flags"),
    ),
    cells=_cells,
    shape=_shape,
    shape_legend=_shape_legend,
    implementations=_implementations,
    plug_in=_plug_in,
    function="flash_attention",
    cpu_kernels=("attention_forward",),
    cuda_kernels=_cuda_kernels,
    needed=_needed,
    compiled=_compiled,
    without=_without,
    configured=_configured,
    tuned=_tuned,
    numerics=_numerics,
    unplanned=_unplanned,
)
