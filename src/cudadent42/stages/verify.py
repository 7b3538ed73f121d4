"""Is the result right? Every case that will be timed, and adversarial inputs, against float64.

The bound follows PyTorch's own error on the same input, because a fixed tolerance goes blind where outputs
are small: at 32k keys a tolerance of 1e-2 accepts a result that is scaled wrongly by a fifth. See
docs/verifying.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cudadent42.base.seeds import derived_seed
from cudadent42.correctness.borrowed import Borrowed, look
from cudadent42.correctness.guards import damage, guarded, guarding_outputs
from cudadent42.correctness.poison import poison_freed_memory
from cudadent42.correctness.second_draw import MOST_DRAWS, decided, is_marginal
from cudadent42.correctness.truth import Truth, failure, find_truth, heartbeat, judge
from cudadent42.integrity.account import Account
from cudadent42.integrity.watch import Watch
from cudadent42.model.cases import Case
from cudadent42.model.device import raise_if_device_lost, synchronize, use_device, use_threads
from cudadent42.model.events import (
    RANDOM,
    CaseVerified,
    Doing,
    Emit,
    IntegrityFound,
    KeptApart,
    Mark,
    Progress,
    Skipped,
    no_mark,
)
from cudadent42.model.implementations import NOT_DONE, Call, Implementation
from cudadent42.model.integrity import Breach, Finding, Grade, peer_note
from cudadent42.model.records import Plan, Scope, VerifiedCase, VerifyReport
from cudadent42.model.text import clean
from cudadent42.operations import numerics
from cudadent42.operations.interface import HardInput, Inputs
from cudadent42.registry import is_strict, load_all, trusted

_UNIT_FLOPS = 2e7
"""Fixed cost of one check, in flops, for the estimate of progress."""


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


def units(plan: Plan, scope: Scope = Scope.ALL) -> list[Unit]:
    """What ``verify`` does, in order: the same for the same plan and scope, so that a new worker can resume."""
    planned = [Unit(case, name) for case in plan.cases for name in plan.implementations]
    strict = [name for name in plan.implementations if is_strict(name, plan.operation, plan.versions)]
    dtypes = dict.fromkeys(case.dtype for case in plan.cases)
    operation_numerics = numerics(plan.cases[0])
    hard: list[HardInput] = []
    if scope is not Scope.CASES:
        common = [each for dtype in dtypes for each in operation_numerics.hard_inputs(dtype)]
        hard += [each for each in common if each.asked_on(plan.device)]
    if scope is not Scope.COMMON:
        hard += operation_numerics.hard_cases(plan.cases, plan.device)
    unplanned = [Unit(each.case, name, each) for each in hard for name in strict]
    return unplanned if scope is Scope.COMMON else planned + unplanned


def verify(
    plan: Plan,
    *,
    emit: Emit,
    start: int = 0,
    barred: Mapping[str, str] | None = None,
    mark: Mark = no_mark,
    watch: Watch | None = None,
    scope: Scope = Scope.ALL,
) -> VerifyReport:
    """Checks ``units(plan, scope)[start:]`` in this process; one ``CaseVerified`` or ``Skipped`` event each.

    ``barred`` gives reasons to skip whole implementations; ``mark`` is told of each unit before it runs.
    Raises ``DeviceLostError`` after the event of a unit that left the GPU unusable, ``UsageError`` for an
    unknown implementation.
    """
    use_device(plan.device)
    use_threads(plan.timer)
    work = units(plan, scope)
    watch = watch or Watch()
    findings: list[Finding] = []
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        emit(KeptApart(text))

    def tell(finding: Finding) -> None:
        findings.append(finding)
        emit(IntegrityFound(finding))

    of_the_lab = trusted(plan)
    watch.begin(of_the_lab, tell)
    implementations, unusable = load_all(plan, barred or {}, start, mark, watch.loading)
    cost = [unit.case.flops + _UNIT_FLOPS for unit in work]
    verified: list[VerifiedCase] = []
    skipped: dict[str, str] = {}
    for name, why in unusable.items():
        skipped[name] = why
        emit(Skipped("verify", name, why))
    truth: Truth | None = None
    baseline = implementations.get(plan.baseline)
    whose = {
        name: _Whose(Borrowed(), baseline, watch.account)
        for name, each in implementations.items()
        if baseline is not None and name not in {*of_the_lab, *plan.versions, plan.baseline} and each.strict
    }
    last = {unit.implementation: index for index, unit in enumerate(work) if unit.hard is None}
    for index in range(start, len(work)):
        unit = work[index]
        mark(Doing(index, unit.case.id, unit.implementation, unit.kind))
        if unit.implementation in unusable:
            continue
        if truth is None or truth.case != unit.case:
            truth = find_truth(unit.case, unit.inputs(plan.seed, plan.device), heartbeat(emit))
        implementation = implementations[unit.implementation]
        with watch.turn(unit.implementation):
            asked = whose.get(unit.implementation) if unit.hard is None else None
            outcome = _check(implementation, truth, unit.kind, asked)
        for draw in ("second draw", "third draw")[: MOST_DRAWS - 1]:
            if not isinstance(outcome, VerifiedCase) or not is_marginal(outcome):
                break
            seed = derived_seed(plan.seed, draw)
            other = find_truth(unit.case, unit.inputs(seed, plan.device), heartbeat(emit))
            with watch.turn(unit.implementation):
                second = _check(implementation, other, unit.kind)
            outcome = decided(outcome, second) if isinstance(second, VerifiedCase) else outcome
        if isinstance(outcome, VerifiedCase):
            verified.append(outcome)
            emit(CaseVerified(outcome))
            if not outcome.passed:
                raise_if_device_lost(plan.device)
        else:
            skipped[unit.key] = outcome
            emit(Skipped("verify", unit.key, outcome))
        if asked is not None and (asked.seen.by_operators or index >= last[unit.implementation]):
            # It is decided, and told at once: the process may end in a later unit.
            del whose[unit.implementation]
            _tell_borrowed(watch, note, implementation, asked.seen)
        emit(Progress("verify", index + 1, len(work), unit.key, sum(cost[: index + 1]) / sum(cost)))
    return VerifyReport(tuple(verified), skipped, findings=tuple(findings), kept_apart=tuple(notes))


SAY_WHOSE = (
    "decline such cases with NotImplementedError, or say whose work it is: FUNCTION.peer_of = 'PyTorch'"
)


def _tell_borrowed(
    watch: Watch, note: Callable[[str], None], implementation: Implementation, seen: Borrowed
) -> None:
    """A finding, or a note where the implementation says itself whose work it runs."""
    name, peer = implementation.name, implementation.peer
    if not seen.evidence:
        return
    if peer:
        note(peer_note(name, clean(peer), seen.evidence))
        return
    watch.report(Breach.ANOTHER_NAME, Grade.SUSPECT, name, "", seen.evidence, SAY_WHOSE)


# ---------------------------------------------------------------- one input


@dataclass(frozen=True)
class _Whose:
    """Whether a call is the work of ``baseline`` or PyTorch is told to ``seen``."""

    seen: Borrowed
    baseline: Implementation
    account: Account


def _check(
    implementation: Implementation, truth: Truth, kind: str, whose: _Whose | None = None
) -> VerifiedCase | str:
    """The verdict on one call, or the reason why the implementation does not do this case."""
    before = truth.inputs.tensors
    (inputs,), guards = guarded([truth.inputs])
    try:
        with implementation.context(), guarding_outputs() as output_guards:
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
    if verdict.passed and (written := damage((*guards, *output_guards))):
        return replace(verdict, passed=False, detail=written)
    if verdict.passed and whose is not None:
        with whose.account.of("whose work"), implementation.context():
            look(whose.seen, truth, call, result, whose.baseline)
    return verdict


def poisoned_call(call: Call, inputs: Inputs) -> Tensor:
    """One call on memory that is full of NaN."""
    poison_freed_memory(inputs)
    return call()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Whole elements: comparing bytes would take twice the memory of expert weights that fill a sixth of a GPU.
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
