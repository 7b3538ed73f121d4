"""Query, key and value tensors for a case, reproducible from a seed and a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from numpy import frombuffer, int16
from numpy.random import SFC64
from numpy.typing import NDArray
from torch import Tensor

from cudadent42.base.seeds import derived_seed
from cudadent42.model.dtypes import DTYPES
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.interface import HardInput

MOST_HARD_SCORES = {"cpu": 1 << 20, "cuda": 1 << 31}
"""Largest shape for adversarial values at a timed shape. Its float64 reference takes milliseconds on CPU,
and up to a second on a GPU with slow float64."""


@dataclass(frozen=True)
class AttentionInputs:
    """query (batch, heads, seqlen_q, head_dim); key, value (batch, kv_heads, seqlen_k, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    softmax_scale: float | None = None
    """None: 1/sqrt(head_dim)."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value

    @property
    def result_like(self) -> Tensor:
        return self.query

    @property
    def buffer_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(self.query.shape),)

    @property
    def scale(self) -> float:
        head_dim = self.query.shape[-1]
        return float(head_dim) ** -0.5 if self.softmax_scale is None else self.softmax_scale


def input_sets(case: AttentionCase, seed: int, count: int, device: str) -> list[AttentionInputs]:
    """``count`` independent sets."""
    return [random_inputs(case, seed, index, device) for index in range(count)]


def random_inputs(case: AttentionCase, seed: int, index: int, device: str) -> AttentionInputs:
    """Standard normal values, rounded to the case's dtype. ``index`` numbers the sets of one case."""
    generator = torch.Generator(device=device).manual_seed(derived_seed(seed, case.id, index))

    def normal(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        return _laid_out(values.to(DTYPES[case.dtype]), strides)

    query, key, value = (normal(*each) for each in case.laid_out())
    return AttentionInputs(query, key, value, case.softmax_scale)


def _laid_out(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The values in memory of these strides."""
    if not strides:
        return values
    spanned = 1 + sum(
        (size - 1) * stride for size, stride in zip(values.shape, (*strides, 1), strict=True) if size
    )
    memory = torch.zeros(spanned, dtype=values.dtype, device=values.device)
    return memory.as_strided(values.shape, (*strides, 1)).copy_(values)


def refresh(case: AttentionCase, inputs: AttentionInputs, seed: int) -> tuple[Tensor, ...]:
    """New standard normal values in the place of all three."""
    for index, tensor in enumerate(inputs.tensors):
        write_normal(tensor, derived_seed(seed, case.id, index))
    return inputs.tensors


def write_normal(tensor: Tensor, seed: int) -> None:
    """The same values whatever the strides: what normal_ gives to entries that are apart depends on their order."""
    dense = tensor.detach()
    if not tensor.is_contiguous():
        dense = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if tensor.device.type == "cpu" and tensor.element_size() == _SHORT:
        _write_quantiles(dense, seed)
    else:
        dense.normal_(generator=torch.Generator(device=dense.device).manual_seed(seed))
    if not tensor.is_contiguous():
        tensor.copy_(dense)


_SHORT = 2
"""Bytes of an entry that one of 65,536 values is drawn for."""

_AT_ONCE, _NUMBERS = 1 << 15, 4
"""Entries, whose numbers fit a processor's cache; and how many of these are in one that is drawn."""


_AT_A_TIME = 1 << 13
"""Quantiles that are computed together: too few for PyTorch to wake its threads, which a process that forks may not
have."""


def _bits_of_quantiles(dtype: torch.dtype) -> bytes:
    count = 1 << (8 * _SHORT)
    parts = [
        (torch.arange(first, first + _AT_A_TIME, dtype=torch.float64, device="cpu") + 0.5) / count
        for first in range(0, count, _AT_A_TIME)
    ]
    return b"".join(torch.special.ndtri(part).to(dtype).view(torch.int16).numpy().tobytes() for part in parts)


_FP16_QUANTILES, _BF16_QUANTILES = map(_bits_of_quantiles, (torch.float16, torch.bfloat16))
"""Bytes, computed ahead of any candidate's code: nobody writes to them by their name, and
`cudadent42.integrity.originals` sees where they are others. Who makes all values zero knows all results."""


def _write_quantiles(dense: Tensor, seed: int) -> None:
    """Each entry one of the normal distribution's quantiles, all as likely: a third of the time of normal_, and
    without PyTorch's threads, which would spin after it."""
    source, quantiles = SFC64(seed), _quantiles(dense.dtype)
    written = dense.view(-1).view(torch.int16).numpy()
    for first in range(0, len(written), _AT_ONCE):
        part = written[first : first + _AT_ONCE]
        numbers = source.random_raw(-(-len(part) // _NUMBERS)).view("u2")[: len(part)]
        quantiles.take(numbers, out=part, mode="clip")  # an array's own: numpy.take can be exchanged


def _quantiles(dtype: torch.dtype) -> NDArray[int16]:
    """Bits of the quantiles, not to be written to."""
    return frombuffer(_FP16_QUANTILES if dtype == torch.float16 else _BF16_QUANTILES, "i2")


# ---------------------------------------------------------------- inputs that are hard to get right

Change = Callable[[AttentionInputs], AttentionInputs]


def hard_inputs(dtype: str) -> tuple[HardInput, ...]:
    """The adversarial inputs for one dtype, smallest sequences last."""

    def hard(
        kind: str,
        change: Change = _unchanged,
        *,
        heads: tuple[int, int] = (2, 2),
        seqlens: tuple[int, int] = (200, 200),
        head_dim: int = 64,
        causal: bool = False,
    ) -> HardInput:
        case = AttentionCase(kind, dtype, 2, heads[0], heads[1], seqlens[0], seqlens[1], head_dim, causal)
        return _hard_input(kind, case, change)

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


def hard_cases(cases: Sequence[AttentionCase], device: str) -> tuple[HardInput, ...]:
    """Hard values at shapes that will be timed: a small shape may be served by another kernel.

    For each dtype, head_dim, mask and head grouping the largest case of up to ``MOST_HARD_SCORES`` scores.
    """
    most_scores = MOST_HARD_SCORES[device.partition(":")[0]]
    largest: dict[tuple[object, ...], AttentionCase] = {}
    for case in sorted(cases, key=lambda case: case.scores):
        if 0 < case.scores <= most_scores:
            group = (case.dtype, case.head_dim, case.causal, case.num_heads == case.num_kv_heads)
            largest[group] = case
    return tuple(
        _hard_input(kind, replace(case, name=f"{kind}@{case.name}"), change)
        for case in largest.values()
        for kind, change in AT_TIMED_SHAPES.items()
    )


def _hard_input(kind: str, case: AttentionCase, change: Change) -> HardInput:
    return HardInput(kind, case, partial(_changed, case, change))


def _changed(case: AttentionCase, change: Change, seed: int, device: str) -> AttentionInputs:
    return change(random_inputs(case, seed, 0, device))


def _unchanged(inputs: AttentionInputs) -> AttentionInputs:
    return inputs


def _large_logits(inputs: AttentionInputs) -> AttentionInputs:
    """Scores in the hundreds: exp overflows unless the maximum is taken off first."""
    return AttentionInputs(inputs.query * 16, inputs.key * 8, inputs.value)


def _dominant_key(inputs: AttentionInputs) -> AttentionInputs:
    """One key, late in the sequence, takes nearly all of the weight of every query."""
    query, key = inputs.query.abs(), inputs.key.clone()
    key[:, :, -min(3, key.shape[2])] = 4.0
    return AttentionInputs(query, key, inputs.value)


def _equal_rows(inputs: AttentionInputs) -> AttentionInputs:
    """Every score equal: the result is the mean of the values."""
    query = inputs.query[:, :, :1].expand_as(inputs.query).contiguous()
    key = inputs.key[:, :, :1].expand_as(inputs.key).contiguous()
    return AttentionInputs(query, key, inputs.value)


def _rising_maximum(inputs: AttentionInputs) -> AttentionInputs:
    """Scores grow along the keys, so an online softmax must rescale in every block."""
    steps = torch.linspace(0.0, 4.0, inputs.key.shape[2], dtype=torch.float32, device=inputs.key.device)
    key = inputs.key * 0.1 + steps[:, None].to(inputs.key.dtype)
    return AttentionInputs(inputs.query.abs(), key, inputs.value)


def _negative_scale(inputs: AttentionInputs) -> AttentionInputs:
    return AttentionInputs(inputs.query, inputs.key, inputs.value, softmax_scale=-0.25)


def _transposed(inputs: AttentionInputs) -> AttentionInputs:
    """The same values laid out as (batch, seq, heads, head_dim) in memory."""

    def relaid(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    return AttentionInputs(relaid(inputs.query), relaid(inputs.key), relaid(inputs.value))


def _nan_query(inputs: AttentionInputs) -> AttentionInputs:
    """One row of the result is NaN, no other."""
    query = inputs.query.clone()
    query[0, 0, min(17, query.shape[2] - 1)] = float("nan")
    return AttentionInputs(query, inputs.key, inputs.value)


def _nan_key(inputs: AttentionInputs) -> AttentionInputs:
    """Under a causal mask: NaN in the rows that see the key, none in those that do not."""
    key = inputs.key.clone()
    key[0, 0, min(90, key.shape[2] - 1)] = float("nan")
    return AttentionInputs(inputs.query, key, inputs.value)


def _nan_value(inputs: AttentionInputs) -> AttentionInputs:
    """One column of one head is NaN."""
    value = inputs.value.clone()
    value[0, 1, 90, 5] = float("nan")
    return AttentionInputs(inputs.query, inputs.key, value)


def _inf_key(inputs: AttentionInputs) -> AttentionInputs:
    """Queries with a negative first entry give the key no weight, the others give NaN."""
    key = inputs.key.clone()
    key[0, 0, 90, 0] = float("inf")
    return AttentionInputs(inputs.query, key, inputs.value)


def _inf_value(inputs: AttentionInputs) -> AttentionInputs:
    value = inputs.value.clone()
    value[0, 1, 90, 5] = float("-inf")
    return AttentionInputs(inputs.query, inputs.key, value)


AT_TIMED_SHAPES: dict[str, Change] = {
    "large_logits": _large_logits,
    "dominant_key": _dominant_key,
    "equal_rows": _equal_rows,
    "rising_maximum": _rising_maximum,
    "nan_query": _nan_query,
    "nan_key": _nan_key,
}
"""Hard values that a shape of any size takes."""
