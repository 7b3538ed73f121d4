"""``torch.ops.flashmoe_science.attention_varlen``."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.operators.library import define
from flashmoe_science.operators.recording import below_autograd, is_recorded, reject_tangents
from flashmoe_science.varlen.arguments import Inputs, Options, check
from flashmoe_science.varlen.launch import launch, reject_gradients


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    split_keys: int | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    chunk: int = 0,
    tree_mask: torch.Tensor | None = None,
) -> tuple[Inputs, Options, int, int]:
    """What the operator's arguments are; the dispatcher leaves out those that have their default."""
    inputs = Inputs(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        seqused_k,
        sinks,
        alibi_slopes,
        None,
        key_scale,
        value_scale,
        tree_mask,
    )
    window = window_left, window_right
    options = Options(causal, window, softcap, softmax_scale, split_keys, True, chunk)
    return inputs, options, max_seqlen_q, max_seqlen_k


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = launch(*_call(*arguments))
    assert lse is not None
    return output, lse


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, options, *_ = _call(*arguments)
    if isinstance(options.softmax_scale, torch.SymFloat):
        options = options._replace(softmax_scale=None)
    check(inputs, options)
    query, value = inputs.query, inputs.value
    tokens, heads, _ = query.shape
    return (
        query.new_empty((tokens, heads, value.shape[-1])),
        query.new_empty((tokens, heads), dtype=torch.float32),
    )


def _recorded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> Any:
    sinks, alibi_slopes = others[4:6]
    differentiable = (query, key, value, sinks, alibi_slopes)
    reject_tangents("attention_varlen", *differentiable)
    if is_recorded(*differentiable):
        reject_gradients(*differentiable)
    return below_autograd(VARLEN, query, key, value, *others)


VARLEN = define(
    "attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? block_table, Tensor? seqused_k, Tensor? sinks, Tensor? alibi_slopes, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, bool causal=True, int window_left=-1, int window_right=-1, float softcap=0.0,"
    " float? softmax_scale=None, int? split_keys=None, Tensor? key_scale=None, Tensor? value_scale=None,"
    " int chunk=0, Tensor? tree_mask=None)"
    " -> (Tensor output, Tensor lse)",
    cpu=_forward,
    cuda=_forward,
    fake=_fake,
    recorded=_recorded,
    flops="lengths lie on the device, where no formula of shapes reads them",
    sharding=None,
)
"""`flashmoe_science.attention_varlen` with its log-sum-exp; arguments, results and errors as there."""
