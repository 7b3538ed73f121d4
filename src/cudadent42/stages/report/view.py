"""What a report says about a run, derived from its records once for every format."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from functools import cached_property

from cudadent42.decisions.verdicts import REFUSALS
from cudadent42.model import text
from cudadent42.model.cases import Case
from cudadent42.model.records import Check, Comparison, Refusal, Status, TimerKind, Verdict, VerifiedCase
from cudadent42.operations import definition
from cudadent42.profiles.records import Diagnosis, Profile
from cudadent42.runs import instructions
from cudadent42.runs.run_folder import RunFolder, RunStatus
from cudadent42.stages.report.cases import AFTER_TIMING, RANDOM, CaseRow, shares_of_bound

TIMED = {
    TimerKind.CALL: "the whole call, launch included",
    TimerKind.CPU: "processor time on one thread",
    TimerKind.GRAPH: "GPU time alone, by graph replay",
    TimerKind.QUEUE: "GPU time alone, of calls launched ahead",
}


class Tone(str, Enum):
    """How a statement is to be taken."""

    GOOD = "good"
    BAD = "bad"
    WARN = "warn"
    NEUTRAL = "neutral"


@dataclass(frozen=True)
class Notice:
    """Something that a reader must see before the numbers."""

    tone: Tone
    title: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profiled:
    """The profile of one case, and an earlier one to put beside it."""

    profile: Profile
    diagnosis: Diagnosis
    before: Profile | None = None


@dataclass(frozen=True)
class View:
    """The run, ready to be laid out. Every list is in the plan's order."""

    run: RunFolder
    profiled: Profiled | None = None

    @property
    def name(self) -> str:
        return text.clean(self.run.path.name)

    @property
    def device(self) -> str:
        """The device's name where preflight found it, else ``cpu`` or ``cuda:N``."""
        return instructions.device_name(self.run.manifest)

    @property
    def instruction_set(self) -> str:
        """Of a run on CPU; empty where it is not known."""
        return instructions.instruction_set(self.run.manifest)

    @property
    def device_words(self) -> str:
        """The device, with the instruction set where ratios depend on it."""
        return instructions.device_words(self.run.manifest)

    @property
    def held_to(self) -> str:
        """The instruction set that a run on CPU was told to take, in place of the processor's best; empty if none."""
        return instructions.held_to(self.run.manifest)

    @property
    def baseline(self) -> str:
        return text.implementation(self.run.plan.baseline)

    @property
    def candidate(self) -> str:
        """Name of the implementation that the headline is about."""
        return text.implementation(self.candidate_name)

    @property
    def candidate_name(self) -> str:
        """``candidate`` as the records spell it."""
        if self.run.results:
            return self.run.results.candidate
        return next((name for name in self.run.plan.implementations if name != self.run.plan.baseline), "")

    @property
    def alone(self) -> bool:
        """Whether nothing but the baseline was planned."""
        return self.candidate_name in ("", self.run.plan.baseline)

    @property
    def control_name(self) -> str:
        """What samples of the A/A control are called."""
        return f"{self.run.plan.baseline}_control"

    @cached_property
    def rows(self) -> tuple[CaseRow, ...]:
        results, verify = self.run.results, self.run.verify
        comparisons = {c.case_id: c for c in results.cases} if results else {}
        control = {c.case_id: c for c in results.control} if results else {}
        others: dict[str, dict[str, Comparison]] = defaultdict(dict)
        for comparison in results.others if results else ():
            others[comparison.case_id][comparison.implementation] = comparison
        verified = {
            entry.case: entry
            for entry in (verify.cases if verify else ())
            if entry.input == RANDOM and entry.implementation == self.candidate_name
        }
        return tuple(
            CaseRow(
                case=case,
                comparison=comparisons.get(case.id),
                control=control.get(case.id),
                others=others.get(case.id, {}),
                reason=self._reason(case, case.id in comparisons),
                verified=verified.get(case.id),
            )
            for case in self.run.plan.cases
        )

    def _reason(self, case: Case, timed: bool) -> str:
        if timed:
            return ""
        kept = self._sampled[case.id]
        ended = f"the run ended before it was compared; {text.plural(kept, 'sample')} kept"
        return self.skip_reason(case) or (ended if kept else "the run ended before it")

    @cached_property
    def _sampled(self) -> Counter[str]:
        return Counter(sample.case for sample in self.run.samples)

    def skip_reason(self, case: Case) -> str:
        """Why the candidate or its baseline was left out on this case; empty where it was not."""
        skipped = self.run.results.skipped if self.run.results else {}
        for key in (case.id, f"{case.id}/{self.candidate_name}", f"{case.id}/{self.run.plan.baseline}"):
            if key in skipped:
                return text.clean(skipped[key])
        return ""

    @cached_property
    def timed(self) -> tuple[CaseRow, ...]:
        return tuple(row for row in self.rows if row.comparison)

    @cached_property
    def measured(self) -> tuple[CaseRow, ...]:
        """The timed cases whose ratios are such: nothing forbids a verdict."""
        return tuple(row for row in self.timed if row.measured)

    @property
    def shape_legend(self) -> str:
        """What the numbers of ``CaseRow.shape`` are."""
        cases = self.run.plan.cases
        legend: str = definition(cases[0].operation).shape_legend(cases) if cases else ""
        return legend

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.case.dtype for row in self.rows))

    @cached_property
    def other_names(self) -> tuple[str, ...]:
        """The implementations that are neither baseline nor candidate."""
        return tuple(
            dict.fromkeys(c.implementation for c in (self.run.results.others if self.run.results else ()))
        )

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """How many cases got each word, in the order of the enumeration."""
        count = Counter(row.comparison.verdict for row in self.timed if row.comparison)
        return {verdict: count[verdict] for verdict in Verdict if count[verdict]}

    @property
    def extremes(self) -> tuple[CaseRow, CaseRow] | None:
        """The cases with the smallest and the largest speed-up."""
        finite = [row for row in self.timed if row.measured and math.isfinite(row.speedup)]
        if not finite:
            return None
        return min(finite, key=lambda row: row.speedup), max(finite, key=lambda row: row.speedup)

    def dtype_geomean(self, dtype: str) -> float:
        """Geometric mean speed-up of one dtype's cases; NaN without any."""
        speedups = [row.speedup for row in self.timed if row.case.dtype == dtype]
        if not all(row.measured for row in self.timed if row.case.dtype == dtype):
            return math.nan
        if not speedups or not all(math.isfinite(value) and value > 0 for value in speedups):
            return math.nan
        return statistics.geometric_mean(speedups)

    def peak(self, dtype: str) -> tuple[str, float] | None:
        """Name and GFLOP/s of the measured ceiling for a dtype; None where there is none.

        On a CPU without one of its own, fp16 is computed in fp32, whose ceiling then holds.
        """
        peaks = self.run.results.peaks if self.run.results else {}
        names = (dtype, "fp32") if self.run.plan.device == "cpu" else (dtype,)
        for name in names:
            rate = peaks.get(f"{name}_gflops", math.nan)
            if rate > 0:
                return name, rate
        return None

    @property
    def bandwidth(self) -> float:
        """Measured copy bandwidth, 1e9 bytes per second; NaN where it was not measured."""
        return self.run.results.peaks.get("copy_gbps", math.nan) if self.run.results else math.nan

    # ------------------------------------------------------------ verification

    @property
    def failures(self) -> tuple[VerifiedCase, ...]:
        return tuple(c for c in (self.run.verify.cases if self.run.verify else ()) if not c.passed)

    @cached_property
    def checked(self) -> tuple[VerifiedCase, ...]:
        """The checks that count, as the terminal counts them."""
        return replace(self.run.verify, baseline=self.run.plan.baseline).counted if self.run.verify else ()

    @property
    def worst_of_bound(self) -> float:
        """Largest error over its bound, all checks and norms; NaN without a bound."""
        shares = [share for c in self.checked for share in shares_of_bound(c) if not math.isnan(share)]
        return max(shares, default=math.nan)

    @property
    def verification_line(self) -> str:
        """One sentence on what was checked."""
        if not self.checked:
            return "Nothing was verified."
        before = sum(c.input == RANDOM for c in self.checked)
        after = sum(c.input == AFTER_TIMING for c in self.checked)
        passed = sum(c.passed for c in self.checked)
        again = f", {after:,} on outputs of timed calls" if after else ""
        line = (
            f"{passed:,} of {text.plural(len(self.checked), 'check')} passed: {before:,} on random inputs, "
            f"{len(self.checked) - before - after:,} on adversarial ones{again}."
        )
        if math.isfinite(self.worst_of_bound):
            line += f" The worst error reached {text.figures(100 * self.worst_of_bound)} % of its bound."
        return line

    # ------------------------------------------------------------ statements

    @property
    def profile_alone(self) -> bool:
        """Whether the folder holds a profile of one case and was not meant to hold a comparison."""
        nothing = self.run.results is None and self.run.verify is None and not self.run.samples
        return nothing and self.profiled is not None and self.run.manifest.status is RunStatus.FINISHED

    @property
    def complete(self) -> bool:
        """Every case of the plan is either compared or skipped for a stated reason."""
        results = self.run.results
        if self.profile_alone:
            return True
        if results is None or self.run.manifest.status is not RunStatus.FINISHED:
            return False
        return self.alone or all(row.comparison or self.skip_reason(row.case) for row in self.rows)

    @property
    def partial(self) -> bool:
        """Whether there is a comparison, of a run that did not finish."""
        results = self.run.results
        return bool(results and results.cases) and self.run.manifest.status is not RunStatus.FINISHED

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        return ("Partial: " if self.partial else "") + self._headline

    @property
    def _headline(self) -> str:
        results = self.run.results
        if self.failures:
            names = dict.fromkeys(text.implementation(c.implementation) for c in self.failures)
            inputs = len({c.case for c in self.failures})
            return f"Verification failed: {', '.join(names)} on {text.plural(inputs, 'case')}"
        if self.profiled is not None and self.profile_alone:
            diagnosis = self.profiled.diagnosis
            first = diagnosis.causes[0].title if diagnosis.causes else "nothing stands out"
            return text.clean(f"Profile of {diagnosis.case}: {first[0].lower()}{first[1:]}")
        if results is not None and self.alone:
            return f"Only {self.baseline} was measured, so there is nothing to compare"
        if results is None:
            return "No result: the run did not get as far as a comparison"
        if not results.cases:
            return "No result: no case was timed"
        speed = text.ratio(results.speedup_geomean)
        return {
            Verdict.FASTER: f"{self.candidate} is faster than {self.baseline}: {speed}",
            Verdict.SLOWER: f"{self.candidate} is slower than {self.baseline}: {speed}",
            Verdict.EQUAL: f"{self.candidate} is as fast as {self.baseline}: {speed}",
            Verdict.UNDECIDED: f"Undecided whether {self.candidate} is faster or slower than {self.baseline}",
        }[results.verdict]

    @property
    def tone(self) -> Tone:
        results = self.run.results
        if self.failures:
            return Tone.BAD
        if self.profile_alone:
            return Tone.NEUTRAL
        if results is None or not results.cases:
            return Tone.WARN
        if results.refused is Refusal.IMPOSSIBLE:
            return Tone.BAD
        return {Verdict.FASTER: Tone.GOOD, Verdict.SLOWER: Tone.BAD}.get(results.verdict, Tone.NEUTRAL)

    @property
    def what_is_timed(self) -> str:
        """Where it is less than the whole call, which a reader would take it for; else empty."""
        timer = self.run.plan.timer
        return "" if timer is TimerKind.CALL or self.profile_alone else f"Timed: {TIMED[timer]}"

    @property
    def subline(self) -> str:
        """What the headline's number rests on."""
        results = self.run.results
        if self.profiled is not None and self.profile_alone:
            return f"{text.implementation(self.profiled.profile.implementation)} on {self.device_words}"
        if results is None or not results.cases:
            return f"{text.plural(len(self.run.plan.cases), 'case')} planned on {self.device_words}"
        if results.refused is not None:
            return f"No ratio ({results.refused.value}): {REFUSALS[results.refused]}. On {self.device_words}"
        mean = f" {text.ratio(results.speedup_geomean)}" if self.failures else ""
        interval = text.interval(results.speedup_geomean_ci_low, results.speedup_geomean_ci_high)
        if len(self.rows) == 1:
            return f"One case{mean}, 95 % interval {interval}, on {self.device_words}"
        scope = "all" if len(self.timed) == len(self.rows) else f"{len(self.timed)} of"
        cases = text.plural(len(self.rows), "case")
        return f"Geometric mean{mean} over {scope} {cases}, 95 % interval {interval}, on {self.device_words}"

    @property
    def warnings(self) -> tuple[Check, ...]:
        """Preflight checks that did not pass."""
        return tuple(c for c in self.run.machine.checks if c.status in (Status.WARN, Status.FAIL))

    # ------------------------------------------------------------ provenance

    @property
    def command(self) -> str:
        return text.clean(shlex.join(self.run.manifest.command))

    @property
    def date(self) -> str:
        """Day and minute of the start, UTC."""
        return text.clean(self.run.manifest.started[:16].replace("T", " ")) + " UTC"

    @property
    def duration_s(self) -> float:
        """Wall time of the run where it has ended, else until its last sample; NaN without either."""
        manifest = self.run.manifest
        if manifest.ended:
            try:
                return (
                    datetime.fromisoformat(manifest.ended) - datetime.fromisoformat(manifest.started)
                ).total_seconds()
            except ValueError:
                return math.nan
        return max((sample.timestamp_s for sample in self.run.samples), default=math.nan)
