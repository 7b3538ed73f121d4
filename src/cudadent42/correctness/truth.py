"""What a result ought to be, how far off it may be, and the judgement on one.

The bound follows PyTorch's own error on the same input: docs/verifying.md says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cudadent42.correctness.blocks import Part, find_parts, nearest_block, over_bounds, part_errors
from cudadent42.correctness.forms import wrong_kind
from cudadent42.correctness.norms import all_finite, error_norms
from cudadent42.model.cases import Case
from cudadent42.model.dtypes import DTYPES
from cudadent42.model.events import Alive, Emit
from cudadent42.model.records import ErrorNorms, VerifiedCase
from cudadent42.operations import numerics
from cudadent42.operations.interface import Exact, Inputs, OnChunk

ERROR_FACTOR = 2.0
"""How many times PyTorch's error is allowed."""

FLOOR_ULPS = ErrorNorms(max=2.0, rms=0.25, worst_row=0.5)
"""Allowed on top, in ulps of the dtype at the output's RMS: PyTorch's error can be zero by luck. Rounding a
right result to the dtype costs at most about 2 ulp for the largest entries and 0.2 to 0.3 ulp RMS. More
would hide a scale that is 1 % off in bf16."""

ALIVE_INTERVAL_S = 1.0
"""Between two signs of life while a reference is computed."""


@dataclass(frozen=True)
class Truth:
    """One input with its float64 result and what PyTorch makes of it in the same dtype."""

    case: Case
    inputs: Inputs
    reference: Tensor
    pytorch: Tensor
    pytorch_error: ErrorNorms
    limit: Tensor | None = None
    """Of the absolute error of each entry; None where the operation gives none."""
    parts: tuple[Part, ...] = ()
    """That are judged apart; none where the operation names none."""

    @property
    def bound(self) -> ErrorNorms:
        """Where parts are judged apart, the bounds of their blocks count in the place of ``worst_row``."""
        floor = _floor(self.case)
        worst_row = ERROR_FACTOR * self.pytorch_error.worst_row + floor.worst_row
        if self.limit is not None and not self.parts:
            # Each entry of a row has a limit of its own. PyTorch is no yardstick for a row where terms cancel: a kernel
            # that takes their mean from the stored, rounded output is off by that rounding, as PyTorch's fused kernels
            # are; its plain way, which it takes where those decline, cancels exactly.
            limit = self.limit.expand_as(self.reference)
            worst_row = max(worst_row, error_norms(self.reference + limit, self.reference).worst_row)
        return ErrorNorms(
            max=ERROR_FACTOR * self.pytorch_error.max + floor.max,
            rms=ERROR_FACTOR * self.pytorch_error.rms + floor.rms,
            worst_row=worst_row,
        )


def _floor(case: Case) -> ErrorNorms:
    ulp = torch.finfo(DTYPES[case.dtype]).eps
    return ErrorNorms(FLOOR_ULPS.max * ulp, FLOOR_ULPS.rms * ulp, FLOOR_ULPS.worst_row * ulp)


def heartbeat(emit: Emit) -> Callable[[], None]:
    """Emits ``Alive`` when called, at most once in ``ALIVE_INTERVAL_S``."""
    last_s = time.monotonic()

    def beat() -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= ALIVE_INTERVAL_S:
            emit(Alive())
            last_s = time.monotonic()

    return beat


def _unheard() -> None:
    return


def find_truth(case: Case, inputs: Inputs, on_chunk: OnChunk = _unheard) -> Truth:
    """The float64 result and PyTorch's error; ``on_chunk`` is called while it is computed."""
    operation_numerics = numerics(case)
    float64 = operation_numerics.float64(case, inputs, on_chunk)
    if isinstance(float64, Exact):
        reference, limit, blocks = float64.value, float64.limit, float64.blocks
    else:
        reference, limit, blocks = float64, None, ()
    pytorch = operation_numerics.pytorch(case, inputs)
    yardstick = pytorch
    if not _are_of_one_kind(pytorch, reference):
        # A NaN of PyTorch's own would leave no error to measure against.
        yardstick = operation_numerics.pytorch_plain(case, inputs)
    if limit is not None:
        own = (yardstick.double() - reference).abs().nan_to_num(0.0, posinf=0.0).amax(-1, keepdim=True)
        limit = limit.maximum(ERROR_FACTOR * own)
    parts = find_parts(blocks, reference, yardstick, ERROR_FACTOR, _floor(case))
    return Truth(case, inputs, reference, pytorch, error_norms(yardstick, reference), limit, parts)


def judge(truth: Truth, implementation: str, result: Tensor, kind: str) -> VerifiedCase:
    """Compares one result with the truth."""
    if computes_later := wrong_kind(result):
        return failure(truth.case.id, implementation, kind, computes_later)
    return judge_gathered(truth, implementation, numerics(truth.case).gathered(result), kind)


def judge_gathered(truth: Truth, implementation: str, result: Tensor, kind: str) -> VerifiedCase:
    """The same for a result that is one tensor already."""
    wrong = _wrong_form(truth, result) or _wrong_pattern(truth, result)
    if wrong:
        return failure(truth.case.id, implementation, kind, wrong)
    error, own, bound = error_norms(result, truth.reference), truth.pytorch_error, truth.bound
    parts = part_errors(truth.parts, truth.reference, result)
    if parts:
        block = nearest_block(parts)
        error = replace(error, worst_row=block.error)
        own, bound = replace(own, worst_row=block.reference_error), replace(bound, worst_row=block.bound)
    over = [
        f"{name} error {measured:.3g} over the bound {allowed:.3g} (PyTorch {pytorchs:.3g})"
        for name, measured, allowed, pytorchs in _norms(error, bound, own)
        if not measured <= allowed and not (parts and name == "worst row")
    ]
    over += [*over_bounds(parts), *_beyond_limits(truth, result)]
    passed, detail = not over, "; ".join(over)
    return VerifiedCase(truth.case.id, implementation, kind, error, own, bound, passed, detail, parts)


def _beyond_limits(truth: Truth, result: Tensor) -> list[str]:
    """The worst row of those in which an entry's error exceeds its bound."""
    if truth.limit is None or truth.limit.numel() == 0:
        return []
    excess = (result.double() - truth.reference).abs() / truth.limit
    worst = excess.nan_to_num(0.0).amax(-1).flatten()
    row = int(worst.argmax())
    if worst[row] <= 1.0:
        return []
    return [
        f"{int((worst > 1.0).sum())} of {worst.numel()} rows have an entry over its own bound, "
        f"row {row} by {float(worst[row]):.3g} times"
    ]


def failure(case: str, implementation: str, kind: str, detail: str) -> VerifiedCase:
    """A result that cannot be judged by size: none, of the wrong form, or NaN where it must not be."""
    return VerifiedCase(case, implementation, kind, None, None, None, False, detail)


def _norms(*norms: ErrorNorms) -> Iterator[tuple[str, float, float, float]]:
    for name in ("max", "rms", "worst_row"):
        measured, allowed, own = (getattr(item, name) for item in norms)
        yield name.replace("_", " "), measured, allowed, own


def _wrong_form(truth: Truth, result: object) -> str:
    like = truth.inputs.result_like
    if not isinstance(result, Tensor):
        return f"returned a {type(result).__name__}; expected a tensor"
    if result.shape != like.shape:
        return f"returned shape {tuple(result.shape)}; expected {tuple(like.shape)}"
    if result.dtype != like.dtype or result.device != like.device:
        return f"returned {result.dtype} on {result.device}; expected {like.dtype} on {like.device}"
    return ""


def _wrong_pattern(truth: Truth, result: Tensor) -> str:
    """Each entry must be finite, NaN or infinite as in the float64 result, or as in PyTorch's."""
    if _are_of_one_kind(result, truth.reference):
        return ""
    wrong = _kind_of_number(result) != _kind_of_number(truth.reference)
    wrong &= _kind_of_number(result) != _kind_of_number(truth.pytorch)
    count = int(wrong.sum())
    if count == 0:
        return ""
    where = tuple(wrong.nonzero()[0].tolist())
    actual, expected = float(result[where]), float(truth.reference[where])
    return f"{count} of {wrong.numel()} entries wrong: at {where} found {actual:.3g}, expected {expected:.3g}"


def _are_of_one_kind(one: Tensor, other: Tensor) -> bool:
    """Whether each entry is finite, NaN or infinite as the other's is. Mostly all are finite, which takes one pass."""
    if all_finite(one) and all_finite(other):
        return True
    return not bool((_kind_of_number(one) != _kind_of_number(other)).any())


def _kind_of_number(tensor: Tensor) -> Tensor:
    kind = torch.isnan(tensor).to(torch.int8)
    return kind + 2 * torch.isposinf(tensor) + 3 * torch.isneginf(tensor)
