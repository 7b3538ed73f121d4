"""What is looked at between the blocks of a case: inputs are new, outputs belong to them, and nothing else goes on.

The blocks themselves are not touched. Which block of a visit is looked at is random, and so are the inputs' values:
their seeds come from the parent when they are needed.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from cudadent42.correctness.forms import wrong_kind
from cudadent42.correctness.second_draw import is_marginal
from cudadent42.correctness.truth import Truth, failure, find_truth, heartbeat, judge
from cudadent42.decisions.schedule import control_name
from cudadent42.integrity.outputs import copies, differs, grossly_differs, same
from cudadent42.integrity.persisting import persisting_cache
from cudadent42.integrity.refill import FreshInputs
from cudadent42.integrity.watch import OWN_SETTINGS, Watch
from cudadent42.model.cases import Case
from cudadent42.model.device import synchronize
from cudadent42.model.events import CaseVerified, Emit, Skipped
from cudadent42.model.implementations import Call
from cudadent42.model.integrity import Breach, Grade
from cudadent42.model.records import Plan
from cudadent42.operations import numerics
from cudadent42.timing.timers import Reading

WHILE_TIMED = "while timed"
"""``VerifiedCase.input`` of outputs of a random block."""

TAIL_MS, TAIL_SHARE = 0.02, 0.2
"""How long the GPU may be busy after a stop event: what waiting for it takes on the host, and a share of the call."""

TAIL_FACTOR = 3.0
"""Beyond so many times the baseline's own tail in the block: on a GPU that others use, every call has one."""

LOOK_SHARE = 0.005
"""Of the stage's processor time, up to which functions and helpers are looked at between a case's first block and its
end."""

SETTINGS_CHANCE = 0.25
"""Of a block whose outputs are not checked, that settings are looked at in one of its passes. What a call leaves
changed stays so until then."""

BESIDE_CHANCE = 1 / 3
"""Of a case but the first, that others are looked for beside a turn of the baseline's at its end."""

_LOOKS = ("functions", "threads", "rest")
"""The parts of a look."""

LOOK_CHANCE = 0.05
"""Of a look beyond that: a candidate can make looking dear, but not so dear that nobody looks."""

JOIN = "let the stream that it is called on wait for every other one before the call returns"

SeedSource = Callable[[], int]
"""A seed that nobody knew before it was asked for."""


def random_seed() -> int:
    """Of this process's own."""
    return secrets.randbits(63)


class Checks:
    """Those of one bench stage."""

    def __init__(self, plan: Plan, watch: Watch, emit: Emit, fresh_seed: SeedSource) -> None:
        self.plan = plan
        self.watch = watch
        self.account = watch.account
        self.emit = emit
        self._fresh_seed = fresh_seed
        self._random = random.Random(fresh_seed())
        self._began_s = time.process_time()
        self._spent_before_s = self.account.processor_s(*_LOOKS)
        self._visited: set[str] = set()
        """``Case.id``."""
        self._is_first_end = True
        """Of cases."""
        self._persisting = persisting_cache(plan.device)
        self.wrong: set[str] = set()
        """``Case.id/implementation`` that were found wrong between blocks."""

    def refill(self, inputs: FreshInputs) -> None:
        """Before a visit, and after preparation."""
        with self.account.of("refill"):
            inputs.refill(self._fresh_seed())

    def before_block(self) -> None:
        """What one side left in the GPU's cache for good does not speed up its next block."""
        if self._persisting is not None:
            with self.account.of("cache"):
                self._persisting.reset()

    def chosen(self, blocks: range) -> int:
        """The block of a visit whose outputs are checked, a warm-up block where it has no other.

        Never a case's very last block: its outputs are verified in any case."""
        if blocks.stop == self.plan.repeats:
            blocks = blocks[:-1] or blocks
        return self._random.choice(blocks or [-1])

    def chosen_pass(self, passes: int) -> int:
        """The pass of a block in which settings are looked at, and outputs where the block is checked."""
        return self._random.randrange(passes)

    def looks_at_settings(self) -> bool:
        """Of a block that is not checked."""
        return self._random.random() < SETTINGS_CHANCE

    def finished(self, name: str, case: Case, call: Call, inputs: FreshInputs) -> None:
        """One call on new values, whose result may not change any more when it is handed out."""
        self.refill(inputs)
        with self.account.of("finished"):
            output = call()
            before = copies(output)
            self.watch.rest((name,), case.id, first=True)
            synchronize(self.plan.device)
            stayed = same(output, before)
        if not stayed:
            on_gpu = self.plan.device.startswith("cuda")
            breach = Breach.UNJOINED_WORK if on_gpu else Breach.LATE_WORK
            where = "the stream it was called in" if on_gpu else "the call"
            evidence = (
                f"its output went on changing after it was returned: work is left running after {where}"
            )
            self.watch.report(breach, Grade.FAILED, name, case.id, evidence)

    def after_block(
        self, case: Case, inputs: FreshInputs, readings: Mapping[str, Reading], *, counted: bool
    ) -> None:
        """Outputs of the block just taken, against the baseline's or PyTorch's on the inputs of now.

        Functions and helpers are looked at after a case's first block that counts, at its end, and in between as often
        as ``LOOK_SHARE`` of the time allows; now and then whatever that takes."""
        names = self.judged(readings)
        self._look_at_the_gpu(case, names, readings)
        first = counted and case.id not in self._visited
        if first or self._may_look() or self._random.random() < LOOK_CHANCE:
            self.look(case, names)
        if counted:
            self._visited.add(case.id)
        if not inputs.refillable or self.were_changed(case, inputs, names):
            return
        references: dict[int, Tensor] = {}
        base = readings.get(self.plan.baseline)
        if base is not None:
            references[base.input_set] = numerics(case).gathered(base.output)
        with self.account.of("outputs"):
            for name in names:
                if name != self.plan.baseline and f"{case.id}/{name}" not in self.wrong:
                    self._screen(case, name, readings[name], inputs, references)

    def judged(self, readings: Mapping[str, Reading]) -> list[str]:
        """Whose outputs are looked at: all but the control's, which is the baseline once more."""
        return [name for name in readings if name != control_name(self.plan.baseline)]

    def look(self, case: Case, names: Sequence[str]) -> None:
        """Whether functions are what they were, and nothing else goes on."""
        self.watch.look(names, case.id)
        # What a GPU's driver does to timers and to code in memory was never looked at.
        if self.plan.device == "cpu":
            self.watch.look_underneath(names, case.id)
        self.watch.rest(names, case.id)

    def look_at_end(self, case: Case, names: Sequence[str], turn: Callable[[], object]) -> None:
        """Of a case: the same, and whether anything goes on in a ``turn`` of the baseline's that does not count."""
        self.look(case, names)
        if self.plan.device == "cpu" and (self._is_first_end or self._random.random() < BESIDE_CHANCE):
            self._is_first_end = False
            self.watch.beside(names, case.id, turn)

    def were_changed(self, case: Case, inputs: FreshInputs, names: Sequence[str]) -> bool:
        """Whether anybody wrote into the inputs; then nobody can say any more what is right for them."""
        with self.account.of("refill"):
            evidence = inputs.reformed
            if not evidence and inputs.changed:
                evidence = "its inputs' values are not those that were written before the block"
        if evidence:
            self._report(Breach.CHANGED_INPUTS, Grade.FAILED, names, case, evidence)
        return bool(evidence)

    def _may_look(self) -> bool:
        spent_s = self.account.processor_s(*_LOOKS) - self._spent_before_s
        return spent_s < LOOK_SHARE * (time.process_time() - self._began_s)

    def _look_at_the_gpu(self, case: Case, names: Sequence[str], readings: Mapping[str, Reading]) -> None:
        base = readings.get(self.plan.baseline)
        shared_ms = (
            base.tail_ms if base is not None else 0.0
        )  # others on the same GPU hold the baseline up as well
        for name in names:
            reading = readings[name]
            if reading.tail_ms > TAIL_MS + TAIL_SHARE * reading.latency_ms + TAIL_FACTOR * shared_ms:
                evidence = (
                    f"the GPU worked on for {reading.tail_ms:.3g} ms after the stop event of a call of "
                    f"{reading.latency_ms:.3g} ms: work is on a stream that was not joined"
                )
                self._report(Breach.UNJOINED_WORK, Grade.SUSPECT, [name], case, evidence, JOIN)
        if self._persisting is not None and (size := self._persisting.set_aside_bytes):
            evidence = f"{size} bytes of the L2 were set aside for persisting data while it was timed"
            self._report(Breach.LEFT_SETTINGS, Grade.SUSPECT, names, case, evidence, OWN_SETTINGS)

    def _screen(
        self, case: Case, name: str, reading: Reading, inputs: FreshInputs, references: dict[int, Tensor]
    ) -> None:
        """One output. Only where it is far off is the float64 reference computed, which decides."""
        wrong = wrong_kind(reading.output)
        if wrong:
            self._fail(case, name, wrong)
            return
        number = reading.input_set
        if number not in references:
            references[number] = numerics(case).pytorch(case, inputs.sets[number])
        result = numerics(case).gathered(reading.output)
        if not differs(result, references[number]):
            return
        verdict = judge(self._truth(case, inputs, number), name, reading.output, WHILE_TIMED)
        if verdict.passed or is_marginal(verdict):
            return  # the baseline was the one that was off; or chance, on which the case's last outputs decide
        if self._is_earlier(case, inputs, number, result):
            evidence = "it returned the result of values that its inputs had earlier, so it did not compute"
            self.watch.report(Breach.KEPT_RESULT, Grade.FAILED, name, case.id, evidence)
        else:
            evidence = f"an output of a timed block is wrong, as no verified call's was: {verdict.detail}"
            self.watch.report(Breach.WRONG_WHILE_TIMED, Grade.FAILED, name, case.id, evidence)
        self._fail(case, name, verdict.detail)

    def _truth(self, case: Case, inputs: FreshInputs, number: int) -> Truth:
        return find_truth(case, inputs.sets[number], heartbeat(self.emit))

    def _is_earlier(self, case: Case, inputs: FreshInputs, number: int, result: Tensor) -> bool:
        operation_numerics = numerics(case)
        return any(
            not grossly_differs(result, operation_numerics.pytorch(case, earlier))
            for earlier in inputs.earlier(number)
        )

    def _fail(self, case: Case, name: str, detail: str) -> None:
        self.wrong.add(f"{case.id}/{name}")
        self.emit(CaseVerified(failure(case.id, name, WHILE_TIMED, detail)))
        self.emit(Skipped("bench", f"{case.id}/{name}", f"its output while it was timed is wrong: {detail}"))

    def _report(
        self,
        breach: Breach,
        grade: Grade,
        names: Sequence[str],
        case: Case,
        evidence: str,
        clears: str = "",
    ) -> None:
        self.watch.report(breach, grade, self.watch.blamed(names), case.id, evidence, clears)
