"""Inputs of the mixture of experts that are hard to get right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cudadent42.operations.interface import HardInput
from cudadent42.operations.moe.activations import ACTIVATIONS
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe.inputs import MoeInputs, random_inputs

MOST_HARD_FLOPS = {"cpu": 2e8, "cuda": 1e12}
"""Largest case for adversarial values at a timed shape. Its float64 reference takes a fraction of a second on either
device."""

FEW, MANY = 5, 577
"""Tokens: kernels for few and for many differ, and neither number fills a tile."""

UNEVEN_ROWS = (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 200)
"""Rows of the experts around the edges of every tile that a kernel may have."""

Change = Callable[[MoeInputs], MoeInputs]


def hard_inputs(dtype: str) -> tuple[HardInput, ...]:
    """The adversarial inputs for one dtype."""

    def hard(kind: str, change: Change, *, tokens: int = FEW, **sizes: int | str) -> HardInput:
        case = MoeCase(kind, dtype, tokens, hidden=64, intermediate=48, experts=8, top_k=2)
        return _hard_input(kind, replace(case, **sizes), change)  # type: ignore[arg-type]

    def both(kind: str, change: Change, **sizes: int) -> tuple[HardInput, ...]:
        """With few tokens and with many."""
        return (
            hard(kind, change, tokens=FEW, **sizes),
            hard(f"{kind}_many", change, tokens=MANY, **sizes),
        )

    return (
        *both("one_expert", _one_expert, top_k=1),
        *both("same_expert_twice", _same_expert_twice),
        *both("idle_experts", _idle_experts, experts=70),
        *both("ids_out_of_range", _ids_out_of_range),
        *both("no_valid_id", _no_valid_id),
        *both("ids_int64", _ids_int64),
        *both("large_values", _large_values),
        *both("nan_token", _nan_token),
        *both("inf_token", _inf_token),
        *both("nan_weight", _nan_weight),
        *both("nan_expert", _nan_expert),
        *both("nan_idle_expert", _nan_idle_expert, experts=9),
        *both("signed_weights", _signed_weights),
        *both("every_expert", _unchanged, top_k=8),
        *both("wide_odd_sizes", _unchanged, hidden=592, intermediate=336, experts=3),
        *(hard(name, _unchanged, tokens=67, activation=name) for name in ACTIVATIONS),
        hard("uneven_rows", _uneven_rows, tokens=sum(UNEVEN_ROWS), experts=len(UNEVEN_ROWS), top_k=1),
        hard("one_token", _unchanged, tokens=1),
        hard("no_tokens", _unchanged, tokens=0),
    )


def hard_cases(cases: Sequence[MoeCase], device: str) -> tuple[HardInput, ...]:
    """Adversarial values at shapes that will be timed: a small shape may be served by another kernel.

    For each dtype, model, activation and form of weights the smallest case and the largest of up to
    ``MOST_HARD_FLOPS``.
    """
    most = MOST_HARD_FLOPS[device.partition(":")[0]]
    groups: dict[tuple[object, ...], list[MoeCase]] = {}
    for case in sorted(cases, key=lambda case: case.tokens):
        if case.flops <= most:
            sizes = case.hidden, case.intermediate, case.experts, case.top_k
            form = case.weight_bits, case.group, case.bias, case.w13_layout
            key = case.dtype, *sizes, case.activation, *form
            groups.setdefault(key, []).append(case)
    chosen = dict.fromkeys(case for group in groups.values() for case in (group[0], group[-1]))
    changes: dict[str, Change] = {
        "one_expert": _one_expert,
        "ids_out_of_range": _ids_out_of_range,
        "large_values": _large_values,
        "nan_token": _nan_token,
    }
    return tuple(
        _hard_input(kind, replace(case, name=f"{kind}@{case.name}"), change)
        for case in chosen
        for kind, change in changes.items()
    )


def _hard_input(kind: str, case: MoeCase, change: Change) -> HardInput:
    return HardInput(kind, case, partial(_changed, case, change))


def _changed(case: MoeCase, change: Change, seed: int, device: str) -> MoeInputs:
    return change(random_inputs(case, seed, device))


def _unchanged(inputs: MoeInputs) -> MoeInputs:
    return inputs


def _one_expert(inputs: MoeInputs) -> MoeInputs:
    """Every token on the last expert, k times where k is more than 1."""
    return replace(inputs, topk_ids=torch.full_like(inputs.topk_ids, inputs.w13.shape[0] - 1))


def _same_expert_twice(inputs: MoeInputs) -> MoeInputs:
    """Each token has its first choice twice: both contribute."""
    ids = inputs.topk_ids.clone()
    ids[:, 1] = ids[:, 0]
    return replace(inputs, topk_ids=ids)


def _idle_experts(inputs: MoeInputs) -> MoeInputs:
    """Only every 23rd expert is ever chosen."""
    experts = inputs.w13.shape[0]
    return replace(inputs, topk_ids=(inputs.topk_ids // 23 * 23).clamp(max=experts - 1))


def _ids_out_of_range(inputs: MoeInputs) -> MoeInputs:
    """Sentinels of expert parallelism and worse, the first token with nothing else; they contribute nothing."""
    ids = inputs.topk_ids.clone()
    experts = inputs.w13.shape[0]
    flat = ids.view(-1)
    for offset, wrong in enumerate((-1, experts, 2**31 - 1, -(2**31))):
        flat[offset + ids.shape[1] :: 7] = wrong
    ids[0] = -1
    return replace(inputs, topk_ids=ids)


def _no_valid_id(inputs: MoeInputs) -> MoeInputs:
    """The result is zero."""
    return replace(inputs, topk_ids=torch.full_like(inputs.topk_ids, -1))


def _ids_int64(inputs: MoeInputs) -> MoeInputs:
    """64-bit ids, some of which would be experts if their upper half were dropped."""
    ids = inputs.topk_ids.to(torch.int64)
    ids[1::3, 0] += 1 << 32
    ids[2::5, 0] -= 1 << 33
    return replace(inputs, topk_ids=ids)


def _large_values(inputs: MoeInputs) -> MoeInputs:
    """Gates in the dozens, where exp over- and underflows; results that float16 still holds."""
    return replace(inputs, hidden_states=inputs.hidden_states * 24)


def _nan_token(inputs: MoeInputs) -> MoeInputs:
    """One row of the result is NaN, no other."""
    return _with_token(inputs, float("nan"))


def _inf_token(inputs: MoeInputs) -> MoeInputs:
    return _with_token(inputs, float("inf"))


def _with_token(inputs: MoeInputs, value: float) -> MoeInputs:
    hidden_states = inputs.hidden_states.clone()
    hidden_states[len(hidden_states) // 2, 3] = value
    return replace(inputs, hidden_states=hidden_states)


def _nan_weight(inputs: MoeInputs) -> MoeInputs:
    """One token's row is NaN."""
    weights = inputs.topk_weights.clone()
    weights[len(weights) // 2, -1] = float("nan")
    return replace(inputs, topk_weights=weights)


def _nan_expert(inputs: MoeInputs) -> MoeInputs:
    """NaN in the rows of the tokens that chose the expert, in one column only."""
    w2 = inputs.w2.clone()
    w2[int(inputs.topk_ids[0, 0]), 7, 5] = float("nan")
    return replace(inputs, w2=w2)


def _nan_idle_expert(inputs: MoeInputs) -> MoeInputs:
    """An expert that nobody chose is all NaN; nothing of it reaches the result."""
    idle = inputs.w13.shape[0] - 1
    w13, w2 = inputs.w13.clone(), inputs.w2.clone()
    w13[idle] = float("nan")
    w2[idle] = float("nan")
    ids = torch.where(inputs.topk_ids == idle, 0, inputs.topk_ids)
    return replace(inputs, w13=w13, w2=w2, topk_ids=ids)


def _signed_weights(inputs: MoeInputs) -> MoeInputs:
    """Weights below zero and zero."""
    weights = inputs.topk_weights * 2 - 1
    weights[::2, 0] = 0.0
    return replace(inputs, topk_weights=weights)


def _uneven_rows(inputs: MoeInputs) -> MoeInputs:
    """Expert e gets ``UNEVEN_ROWS[e]`` rows, its tokens scattered."""
    rows = torch.tensor(UNEVEN_ROWS, dtype=torch.int64, device="cpu")
    ids: Tensor = torch.repeat_interleave(rows)
    order = torch.randperm(
        len(ids), generator=torch.Generator("cpu").manual_seed(0), dtype=torch.int64, device="cpu"
    )
    return replace(inputs, topk_ids=ids[order].to(inputs.topk_ids)[:, None].contiguous())
