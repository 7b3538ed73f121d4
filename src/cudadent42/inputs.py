"""Query, key and value tensors for a case, reproducible from a seed and a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cudadent42.records import Case
from cudadent42.seeds import derived_seed

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """query (batch, heads, seqlen_q, head_dim); key, value (batch, kv_heads, seqlen_k, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    softmax_scale: float | None = None
    """None: 1/sqrt(head_dim)."""

    @property
    def scale(self) -> float:
        head_dim = self.query.shape[-1]
        return float(head_dim) ** -0.5 if self.softmax_scale is None else self.softmax_scale


def random_inputs(case: Case, seed: int, index: int, device: str) -> Inputs:
    """Standard normal values, rounded to the case's dtype. ``index`` numbers the sets of one case."""
    generator = torch.Generator(device=device).manual_seed(derived_seed(seed, case.id, index))

    def normal(heads: int, seqlen: int) -> Tensor:
        shape = (case.batch, heads, seqlen, case.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[case.dtype])

    return Inputs(
        normal(case.num_heads, case.seqlen_q),
        normal(case.num_kv_heads, case.seqlen_k),
        normal(case.num_kv_heads, case.seqlen_k),
    )


# ---------------------------------------------------------------- inputs that are hard to get right


@dataclass(frozen=True)
class HardInput:
    """One adversarial input: a small case and how its random values are changed."""

    kind: str
    case: Case
    change: Callable[[Inputs], Inputs]

    def make(self, seed: int, device: str) -> Inputs:
        return self.change(random_inputs(self.case, seed, 0, device))


def hard_inputs(dtype: str) -> tuple[HardInput, ...]:
    """The adversarial inputs for one dtype, smallest sequences last."""

    def hard(
        kind: str,
        change: Callable[[Inputs], Inputs] = _unchanged,
        *,
        heads: tuple[int, int] = (2, 2),
        seqlens: tuple[int, int] = (200, 200),
        head_dim: int = 64,
        causal: bool = False,
    ) -> HardInput:
        case = Case(kind, dtype, 2, heads[0], heads[1], seqlens[0], seqlens[1], head_dim, causal)
        return HardInput(kind, case, change)

    return (
        hard("large_logits", _large_logits),
        hard("large_logits_causal", _large_logits, causal=True),
        hard("dominant_key", _dominant_key),
        hard("equal_rows", _equal_rows),
        hard("rising_maximum", _rising_maximum, seqlens=(70, 1100)),
        hard("long_keys", seqlens=(48, 4096)),
        hard("negative_scale", _negative_scale),
        hard("odd_lengths", seqlens=(67, 131)),
        hard("odd_lengths_causal", seqlens=(67, 131), causal=True),
        hard("more_queries_causal", seqlens=(131, 67), causal=True),
        hard("one_query_causal", seqlens=(1, 129), causal=True),
        hard("one_key", seqlens=(33, 1)),
        hard("grouped_heads", heads=(6, 2), seqlens=(100, 180)),
        hard("grouped_heads_causal", heads=(4, 1), seqlens=(100, 180), causal=True),
        hard("wide_head", head_dim=128, seqlens=(90, 150), causal=True),
        hard("transposed", _transposed, seqlens=(130, 130), causal=True),
        hard("nan_query", _nan_query),
        hard("nan_key_causal", _nan_key, causal=True),
        hard("nan_value", _nan_value),
        hard("inf_key", _inf_key),
        hard("inf_value", _inf_value),
        hard("no_keys", seqlens=(5, 0)),
        hard("no_queries", seqlens=(0, 5)),
    )


def hard_cases(cases: Sequence[Case], most_scores: int) -> tuple[HardInput, ...]:
    """Hard values at shapes that will be timed: a small shape may be served by another kernel.

    For each dtype, head_dim, mask and head grouping the largest case of up to ``most_scores`` scores.
    """
    largest: dict[tuple[object, ...], Case] = {}
    for case in sorted(cases, key=lambda case: case.scores):
        if 0 < case.scores <= most_scores:
            group = (case.dtype, case.head_dim, case.causal, case.num_heads == case.num_kv_heads)
            largest[group] = case
    changes = {
        "large_logits": _large_logits,
        "dominant_key": _dominant_key,
        "equal_rows": _equal_rows,
        "rising_maximum": _rising_maximum,
        "nan_query": _nan_query,
        "nan_key": _nan_key,
    }
    return tuple(
        HardInput(kind, replace(case, name=f"{kind}@{case.name}"), change)
        for case in largest.values()
        for kind, change in changes.items()
    )


def _unchanged(inputs: Inputs) -> Inputs:
    return inputs


def _large_logits(inputs: Inputs) -> Inputs:
    """Scores in the hundreds: exp overflows unless the maximum is taken off first."""
    return Inputs(inputs.query * 16, inputs.key * 8, inputs.value)


def _dominant_key(inputs: Inputs) -> Inputs:
    """One key, late in the sequence, takes nearly all of the weight of every query."""
    query, key = inputs.query.abs(), inputs.key.clone()
    key[:, :, -min(3, key.shape[2])] = 4.0
    return Inputs(query, key, inputs.value)


def _equal_rows(inputs: Inputs) -> Inputs:
    """Every score equal: the result is the mean of the values."""
    query = inputs.query[:, :, :1].expand_as(inputs.query).contiguous()
    key = inputs.key[:, :, :1].expand_as(inputs.key).contiguous()
    return Inputs(query, key, inputs.value)


def _rising_maximum(inputs: Inputs) -> Inputs:
    """Scores grow along the keys, so an online softmax must rescale in every block."""
    steps = torch.linspace(0.0, 4.0, inputs.key.shape[2], device=inputs.key.device)
    key = inputs.key * 0.1 + steps[:, None].to(inputs.key.dtype)
    return Inputs(inputs.query.abs(), key, inputs.value)


def _negative_scale(inputs: Inputs) -> Inputs:
    return Inputs(inputs.query, inputs.key, inputs.value, softmax_scale=-0.25)


def _transposed(inputs: Inputs) -> Inputs:
    """The same values laid out as (batch, seq, heads, head_dim) in memory."""

    def relaid(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    return Inputs(relaid(inputs.query), relaid(inputs.key), relaid(inputs.value))


def _nan_query(inputs: Inputs) -> Inputs:
    """One row of the result is NaN, no other."""
    query = inputs.query.clone()
    query[0, 0, min(17, query.shape[2] - 1)] = float("nan")
    return Inputs(query, inputs.key, inputs.value)


def _nan_key(inputs: Inputs) -> Inputs:
    """Under a causal mask: NaN in the rows that see the key, none in those that do not."""
    key = inputs.key.clone()
    key[0, 0, min(90, key.shape[2] - 1)] = float("nan")
    return Inputs(inputs.query, key, inputs.value)


def _nan_value(inputs: Inputs) -> Inputs:
    """One column of one head is NaN."""
    value = inputs.value.clone()
    value[0, 1, 90, 5] = float("nan")
    return Inputs(inputs.query, inputs.key, value)


def _inf_key(inputs: Inputs) -> Inputs:
    """Queries with a negative first entry give the key no weight, the others give NaN."""
    key = inputs.key.clone()
    key[0, 0, 90, 0] = float("inf")
    return Inputs(inputs.query, key, inputs.value)


def _inf_value(inputs: Inputs) -> Inputs:
    value = inputs.value.clone()
    value[0, 1, 90, 5] = float("-inf")
    return Inputs(inputs.query, inputs.key, value)
