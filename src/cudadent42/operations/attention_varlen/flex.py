"""PyTorch's flex_attention as a peer: a mask of blocks says which keys of a packed batch each query sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cudadent42.model.implementations import Call, Planned, UnsupportedCaseError
from cudadent42.operations.attention_varlen.case import VarlenCase

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.operations.attention_varlen.inputs import VarlenInputs

SeenBy = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""Of numbers of a batch, a head, a query and a key of the packed batch: whether it is seen."""


Score = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""Of a score, and those numbers: what it becomes."""


class _Rows(NamedTuple):
    """Of queries or keys of the packed batch."""

    sequence: Tensor
    position: Tensor


def prepare_flex(case: VarlenCase, inputs: VarlenInputs) -> Call:
    """Compiled for the very case; the mask of blocks, which reads lengths on the host, is a step's plan."""
    from torch.nn.attention.flex_attention import create_block_mask

    if inputs.block_table is not None:
        raise UnsupportedCaseError(
            "flex_attention multiplies values that nobody sees by zero, and slots without a key are NaN here"
        )
    if case.tree or case.fp8_scales or case.sinks or case.softcap:
        raise UnsupportedCaseError(
            "flex_attention is not asked for trees, caches in FP8, sinks and soft caps"
        )
    if not case.tokens or not sum(case.seqlens_k):
        raise UnsupportedCaseError("flex_attention takes no batch without queries or keys")
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs.tensors)
    device = str(query.device)

    def make_mask() -> Any:
        seen = seen_by(case, device)
        return create_block_mask(seen, None, None, query.shape[2], key.shape[2], device=device)

    options: dict[str, Any] = {"block_mask": make_mask(), "enable_gqa": case.num_heads != case.num_kv_heads}
    if inputs.alibi_slopes is not None:
        options["score_mod"] = biased_by(case, inputs.alibi_slopes)
    attend = partial(_compiled(case), query, key, value, **options)

    def call() -> Tensor:
        output: Tensor = attend()[0].transpose(0, 1)
        return output

    return Planned(call, make_mask)


def _rows_of(case: VarlenCase, device: str) -> tuple[_Rows, _Rows]:
    """Those of queries and of keys."""
    import torch

    def numbered(lengths: tuple[int, ...]) -> _Rows:
        """A sequence's last row stands where its last key does."""
        counts, ends = (
            torch.tensor(each, dtype=torch.int64, device=device) for each in (lengths, case.seqlens_k)
        )
        sequences = torch.arange(len(lengths), dtype=torch.int64, device=device)
        sequence = torch.repeat_interleave(sequences, counts)
        rows = torch.arange(sum(lengths), dtype=torch.int64, device=device)
        return _Rows(sequence, rows + (ends - counts.cumsum(0))[sequence])

    return numbered(case.seqlens_q), numbered(case.seqlens_k)


def seen_by(case: VarlenCase, device: str) -> SeenBy:
    """Which keys of the packed batch a query sees: those of its own sequence, up to its position, in its window."""
    (of_query, query_at), (of_key, key_at) = _rows_of(case, device)
    left, right = case.sides

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        ahead = query_at[query] - key_at[key]
        is_seen = of_query[query] == of_key[key]
        if left >= 0:
            is_seen = is_seen & (ahead <= left)
        if right >= 0:
            is_seen = is_seen & (ahead >= -right)
        return is_seen

    return seen


def biased_by(case: VarlenCase, slopes: Tensor) -> Score:
    """ALiBi: less by the distance of query and key, times the head's slope."""
    (_, query_at), (_, key_at) = _rows_of(case, str(slopes.device))

    def biased(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query_at[query] - key_at[key]).abs()

    return biased


@cache
def _compiled(case: VarlenCase) -> Callable[..., Any]:
    """A function object of its own for each case: PyTorch gives up compiling one after a few shapes."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    def attention(*tensors: Any, **options: Any) -> Any:
        return flex_attention(*tensors, **options)

    compiled: Callable[..., Any] = torch.compile(attention, dynamic=False)
    return compiled
