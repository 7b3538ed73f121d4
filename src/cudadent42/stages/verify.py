"""Is the result right? Every case that will be timed, and adversarial inputs, against float64.

The bound follows PyTorch's own error on the same input, because a fixed tolerance goes blind where outputs
are small: at 32k keys a tolerance of 1e-2 accepts a result that is scaled wrongly by a fifth. See
docs/verifying.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cudadent42.correctness.norms import error_norms
from cudadent42.model.cases import Case
from cudadent42.model.device import synchronize, use_device, use_threads
from cudadent42.model.dtypes import DTYPES
from cudadent42.model.events import LOADING, Alive, CaseVerified, Doing, Event, Progress, Skipped
from cudadent42.model.implementations import NOT_DONE, Call, Implementation, why_not
from cudadent42.model.records import ErrorNorms, Plan, VerifiedCase, VerifyReport
from cudadent42.operations import numerics
from cudadent42.operations.interface import HardInput, Inputs, OnChunk
from cudadent42.registry import get, is_strict

ERROR_FACTOR = 2.0
"""How many times PyTorch's error is allowed."""

FLOOR_ULPS = ErrorNorms(max=2.0, rms=0.25, worst_row=0.5)
"""Allowed on top, in ulps of the dtype at the output's RMS: PyTorch's error can be zero by luck. Rounding a
right result to the dtype costs at most about 2 ulp for the largest entries and 0.2 to 0.3 ulp RMS. More
would hide a scale that is 1 % off in bf16."""

POISON_BLOCKS = 4
"""Freed NaN blocks of each buffer's size that an implementation's allocation can land on."""

RANDOM = "random"

ALIVE_INTERVAL_S = 1.0
"""Between two signs of life while a reference is computed."""

_UNIT_FLOPS = 2e7
"""Fixed cost of one check, in flops, for the estimate of progress."""

Emit = Callable[[Event], None]


Mark = Callable[[Doing], None]


def no_mark(doing: Doing) -> None:
    """For callers in the same process: nobody to tell."""


class DeviceLostError(Exception):
    """A kernel fault left this process's GPU context unusable; only a new process can go on."""


@dataclass(frozen=True)
class Unit:
    """One implementation on one input."""

    case: Case
    implementation: str
    hard: HardInput | None = None

    @property
    def kind(self) -> str:
        return RANDOM if self.hard is None else self.hard.kind

    @property
    def key(self) -> str:
        return f"{self.case.id}/{self.implementation}"

    def inputs(self, seed: int, device: str) -> Inputs:
        if self.hard is None:
            inputs: Inputs = numerics(self.case).input_sets(self.case, seed, 1, device)[0]
            return inputs
        return self.hard.make(seed, device)


def units(plan: Plan) -> list[Unit]:
    """What ``verify`` does, in order: the same for the same plan, so that a new worker can resume."""
    found = [Unit(case, name) for case in plan.cases for name in plan.implementations]
    strict = [name for name in plan.implementations if is_strict(name, plan.operation, plan.versions)]
    dtypes = dict.fromkeys(case.dtype for case in plan.cases)
    known = numerics(plan.cases[0])
    hard = [each for dtype in dtypes for each in known.hard_inputs(dtype)]
    hard += known.hard_cases(plan.cases, plan.device)
    return found + [Unit(each.case, name, each) for each in hard for name in strict]


def verify(
    plan: Plan,
    *,
    emit: Emit,
    start: int = 0,
    barred: Mapping[str, str] | None = None,
    mark: Mark = no_mark,
) -> VerifyReport:
    """Checks ``units(plan)[start:]`` in this process; one ``CaseVerified`` or ``Skipped`` event each.

    ``barred`` gives reasons to skip whole implementations; ``mark`` is told of each unit before it runs.
    Raises ``DeviceLostError`` after the event of a unit that left the GPU unusable, ``UsageError`` for an
    unknown implementation.
    """
    use_device(plan.device)
    use_threads(plan.timer)
    work = units(plan)
    implementations, unusable = load_all(plan, barred or {}, start, mark)
    cost = [unit.case.flops + _UNIT_FLOPS for unit in work]
    verified: list[VerifiedCase] = []
    skipped: dict[str, str] = {}
    for name, why in unusable.items():
        skipped[name] = why
        emit(Skipped("verify", name, why))
    truth: Truth | None = None
    for index in range(start, len(work)):
        unit = work[index]
        mark(Doing(index, unit.case.id, unit.implementation, unit.kind))
        if unit.implementation in unusable:
            continue
        if truth is None or truth.case != unit.case:
            truth = find_truth(unit.case, unit.inputs(plan.seed, plan.device), heartbeat(emit))
        outcome = _check(implementations[unit.implementation], truth, unit.kind)
        if isinstance(outcome, VerifiedCase):
            verified.append(outcome)
            emit(CaseVerified(outcome))
            if not outcome.passed:
                raise_if_device_lost(plan.device)
        else:
            skipped[unit.key] = outcome
            emit(Skipped("verify", unit.key, outcome))
        emit(Progress("verify", index + 1, len(work), unit.key, sum(cost[: index + 1]) / sum(cost)))
    return VerifyReport(tuple(verified), skipped)


def load_all(
    plan: Plan, barred: Mapping[str, str], index: int, mark: Mark
) -> tuple[dict[str, Implementation], dict[str, str]]:
    """The plan's implementations that can run on its device, and the reasons why the others cannot."""
    usable: dict[str, Implementation] = {}
    reasons = {name: barred[name] for name in plan.implementations if name in barred}
    for name in plan.implementations:
        if name in reasons:
            continue
        mark(Doing(index, "", name, LOADING))
        implementation = get(name, plan.operation, plan.versions)
        reason = why_not(implementation, plan.device)
        if reason is None:
            usable[name] = implementation
        else:
            reasons[name] = reason
    return usable, reasons


def not_timed(plan: Plan, verified: VerifyReport) -> dict[str, str]:
    """``case/implementation`` of the plan that must not be timed, with the reason.

    An implementation that fails an adversarial input is not timed on any case of that dtype.
    """
    reasons: dict[str, str] = {}
    cases = {case.id for case in plan.cases}
    for result in verified.cases:
        if result.passed:
            continue
        if result.case in cases:
            reasons.setdefault(
                f"{result.case}/{result.implementation}", f"failed verification: {result.detail}"
            )
            continue
        dtype = result.case.rpartition("/")[2]
        for case in plan.cases:
            if case.dtype == dtype:
                reason = f"failed verification on {result.case}: {result.detail}"
                reasons.setdefault(f"{case.id}/{result.implementation}", reason)
    for case in plan.cases:
        for name in plan.implementations:
            key = f"{case.id}/{name}"
            for skipped in (key, name):
                if skipped in verified.skipped:
                    reasons.setdefault(key, verified.skipped[skipped])
    return reasons


# ---------------------------------------------------------------- one input


@dataclass(frozen=True)
class Truth:
    """One input with its float64 result and what PyTorch makes of it in the same dtype."""

    case: Case
    inputs: Inputs
    reference: Tensor
    pytorch: Tensor
    pytorch_error: ErrorNorms

    @property
    def bound(self) -> ErrorNorms:
        ulp = torch.finfo(DTYPES[self.case.dtype]).eps
        return ErrorNorms(
            max=ERROR_FACTOR * self.pytorch_error.max + FLOOR_ULPS.max * ulp,
            rms=ERROR_FACTOR * self.pytorch_error.rms + FLOOR_ULPS.rms * ulp,
            worst_row=ERROR_FACTOR * self.pytorch_error.worst_row + FLOOR_ULPS.worst_row * ulp,
        )


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
    known = numerics(case)
    reference = known.float64(case, inputs, on_chunk)
    pytorch = known.pytorch(case, inputs)
    yardstick = pytorch
    if (_kind_of_number(pytorch) != _kind_of_number(reference)).any():
        # A NaN of PyTorch's own would leave no error to measure against.
        yardstick = known.pytorch_plain(case, inputs)
    return Truth(case, inputs, reference, pytorch, error_norms(yardstick, reference))


def judge(truth: Truth, implementation: str, result: Tensor, kind: str) -> VerifiedCase:
    """Compares one result with the truth."""
    wrong = _wrong_form(truth, result) or _wrong_pattern(truth, result)
    if wrong:
        return failure(truth.case.id, implementation, kind, wrong)
    error, bound = error_norms(result, truth.reference), truth.bound
    over = [
        f"{name} error {found:.3g} over the bound {allowed:.3g} (PyTorch {own:.3g})"
        for name, found, allowed, own in _norms(error, bound, truth.pytorch_error)
        if not found <= allowed
    ]
    return VerifiedCase(
        truth.case.id, implementation, kind, error, truth.pytorch_error, bound, not over, "; ".join(over)
    )


def failure(case: str, implementation: str, kind: str, detail: str) -> VerifiedCase:
    """A result that cannot be judged by size: none, of the wrong form, or NaN where it must not be."""
    return VerifiedCase(case, implementation, kind, None, None, None, False, detail)


def _norms(*norms: ErrorNorms) -> Iterator[tuple[str, float, float, float]]:
    for name in ("max", "rms", "worst_row"):
        found, allowed, own = (getattr(item, name) for item in norms)
        yield name.replace("_", " "), found, allowed, own


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
    wrong = _kind_of_number(result) != _kind_of_number(truth.reference)
    wrong &= _kind_of_number(result) != _kind_of_number(truth.pytorch)
    count = int(wrong.sum())
    if count == 0:
        return ""
    where = tuple(wrong.nonzero()[0].tolist())
    found, expected = float(result[where]), float(truth.reference[where])
    return f"{count} of {wrong.numel()} entries wrong: at {where} found {found:.3g}, expected {expected:.3g}"


def _kind_of_number(tensor: Tensor) -> Tensor:
    kind = torch.isnan(tensor).to(torch.int8)
    return kind + 2 * torch.isposinf(tensor) + 3 * torch.isneginf(tensor)


def _check(implementation: Implementation, truth: Truth, kind: str) -> VerifiedCase | str:
    """The verdict on one call, or the reason why the implementation does not do this case."""
    inputs = truth.inputs
    before = [tensor.clone() for tensor in inputs.tensors]
    try:
        with implementation.context():
            call = implementation.prepare(truth.case, inputs)
            result = poisoned_call(call, inputs)
        synchronize(str(inputs.result_like.device))
    except NOT_DONE as error:
        return str(error) or "not supported"
    except Exception as error:  # noqa: BLE001 - a candidate may raise anything, and that is a result
        detail = f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return failure(truth.case.id, implementation.name, kind, detail)
    verdict = judge(truth, implementation.name, result, kind)
    if verdict.passed and not all(_same_bits(a, b) for a, b in zip(before, inputs.tensors, strict=True)):
        return replace(verdict, passed=False, detail="changed its inputs")
    return verdict


def poisoned_call(call: Call, inputs: Inputs) -> Tensor:
    """One call after filling and freeing blocks of the output's and the scratch memory's sizes with NaN.

    PyTorch's CUDA allocator hands such a block to the next request of that size; so does malloc on CPU as a
    rule. A result that the call did not write is then NaN, and not the right answer of whoever ran before.
    """
    like = inputs.result_like
    blocks = [
        like.new_full(shape, float("nan")) for shape in inputs.buffer_shapes for _ in range(POISON_BLOCKS)
    ]
    del blocks
    return call()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Whole elements: comparing bytes would take twice the memory of expert weights that fill a sixth of a GPU.
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def raise_if_device_lost(device: str) -> None:
    """After a failure on CUDA: whether the context still works. Raises ``DeviceLostError`` if not."""
    try:
        synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError(str(error)) from error
