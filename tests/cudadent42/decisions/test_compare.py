from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cudadent42.decisions.compare import compare, control_offset
from cudadent42.decisions.statistics import estimate_ratio
from cudadent42.model.records import CacheState, Plan, Refusal, Sample, TimerKind, Verdict
from cudadent42.operations.attention.case import AttentionCase

CASES = tuple(AttentionCase(name, "bf16", 1, 1, 1, 64, 64, 64) for name in ("a", "b"))
BLOCKS = 25


def make_plan(*implementations: str, control: bool = True) -> Plan:
    return Plan(
        "test", "cpu", CASES, "pytorch", ("pytorch", *implementations), BLOCKS, 1, seed=3, control=control
    )


def make_samples(latency: dict[str, float], case: str = "a/bf16", flagged: int = 0) -> list[Sample]:
    random = np.random.default_rng(sum(case.encode()))
    return [
        Sample(
            case,
            name,
            block,
            position,
            float(base * random.normal(1.0, 0.005)),
            1,
            0.1,
            0.0,
            "preempted" if block < flagged else "",
        )
        for block in range(BLOCKS)
        for position, (name, base) in enumerate(latency.items())
    ]


TWICE = {"pytorch": 2.0, "pytorch_control": 2.0, "ours": 1.0, "peer": 2.0}


def test_one_faster_one_equal() -> None:
    samples = make_samples(TWICE) + make_samples({**TWICE, "ours": 0.5}, "b/bf16")
    results = compare(make_plan("ours", "peer"), samples, {}, {"fp32_gflops": 500.0})
    assert results.candidate == "ours"
    assert [case.verdict for case in results.cases] == [Verdict.FASTER] * 2
    assert [case.verdict for case in results.others] == [Verdict.EQUAL] * 2
    assert [case.verdict for case in results.control] == [Verdict.EQUAL] * 2
    assert results.speedup_geomean == pytest.approx(math.sqrt(2.0 * 4.0), rel=0.01)
    assert results.speedup_geomean_ci_low < results.speedup_geomean < results.speedup_geomean_ci_high
    assert results.verdict is Verdict.FASTER
    assert 0.0 < results.noise_floor < 0.01
    assert results.peaks == {"fp32_gflops": 500.0}
    assert results.detectable_effect == pytest.approx(2.8 * 1.2533 * 0.005 * 2**0.5 / 5, rel=0.5)
    first = results.cases[0]
    assert (first.name, first.dtype, first.blocks, first.baseline) == ("a", "bf16", BLOCKS, "pytorch")
    assert first.baseline_latency_ms == pytest.approx(2.0, rel=0.01)


def test_a_latency_that_is_not_even_positive_leaves_no_ratio_and_no_verdict() -> None:
    """Of one case among several, as an edited file of samples may have it, or a clock that stood still."""
    none, *others = make_samples(TWICE)
    samples = [replace(none, latency_ms=0.0), *others, *make_samples(TWICE, "b/bf16")]
    results = compare(make_plan("ours"), samples, {}, {})
    assert (results.verdict, results.refused) == (Verdict.UNDECIDED, Refusal.IMPOSSIBLE)
    assert math.isnan(results.speedup_geomean)
    assert [math.isnan(case.speedup) for case in results.cases] == [True, False]


def test_same_samples_same_result() -> None:
    plan, samples = make_plan("ours"), make_samples(TWICE)
    assert compare(plan, samples, {}, {}) == compare(plan, list(reversed(samples)), {}, {})


def test_skipped_are_left_out_and_named() -> None:
    samples = make_samples(TWICE) + make_samples(TWICE, "b/bf16")
    skipped = {"a/bf16/ours": "wrong after timing", "b/bf16": "worker died"}
    results = compare(make_plan("ours"), samples, skipped, {})
    assert results.cases == ()
    assert [case.name for case in results.control] == ["a"]
    assert results.skipped == skipped
    assert math.isnan(results.speedup_geomean)
    assert results.verdict is Verdict.UNDECIDED


def test_blocks_without_a_partner_do_not_count() -> None:
    samples = [s for s in make_samples(TWICE) if not (s.implementation == "ours" and s.block >= 20)]
    assert compare(make_plan("ours"), samples, {}, {}).cases[0].blocks == 20


def test_disturbed_blocks_are_counted_and_kept() -> None:
    samples = [
        replace(sample, flags=sample.flags.replace("preempted", "clock"))
        for sample in make_samples(TWICE, flagged=6)
    ]
    comparison = compare(make_plan("ours"), samples, {}, {}).cases[0]
    assert (comparison.blocks, comparison.flagged_blocks) == (BLOCKS, 6)
    assert comparison.disturbances == ("clock",)


@pytest.mark.parametrize("mark", ["preempted", "steal", "clock,preempted"])
def test_blocks_without_processors_never_count_in_wall_time(mark: str) -> None:
    """Two threads that spin at a barrier while one of them waits: 8 ms each time, whatever the code takes."""
    slices = [
        replace(sample, latency_ms=8.0, flags=mark)
        if sample.flags and sample.implementation.startswith("pytorch")
        else replace(sample, flags=mark if sample.flags else "")
        for sample in make_samples(TWICE, flagged=12)
    ]
    comparison = compare(make_plan("ours"), slices, {}, {}).cases[0]
    assert (comparison.blocks, comparison.flagged_blocks, comparison.left_out) == (13, 12, 12)
    assert comparison.speedup == pytest.approx(2.0, rel=0.01)
    assert (comparison.verdict, comparison.refused) == (Verdict.FASTER, None)


def test_mostly_without_processors_is_no_result() -> None:
    """As on a machine with other work on both cores: a tight interval around a time slice over a short call."""
    samples = make_samples({"pytorch": 8.0, "pytorch_control": 8.0, "ours": 0.01}, flagged=13)
    results = compare(make_plan("ours"), samples + make_samples(TWICE, "b/bf16"), {}, {})
    first, second = results.cases
    assert (first.verdict, first.refused, first.blocks) == (Verdict.UNDECIDED, Refusal.DISTURBED, BLOCKS)
    assert (second.verdict, second.refused) == (Verdict.FASTER, None)
    assert (results.verdict, results.refused) == (Verdict.UNDECIDED, Refusal.DISTURBED)


@pytest.mark.parametrize("timer", [TimerKind.CPU, TimerKind.GRAPH, TimerKind.QUEUE])
def test_time_that_stands_still_without_a_processor_is_not_refused_for_it(timer: TimerKind) -> None:
    plan = replace(make_plan("ours"), timer=timer)
    comparison = compare(plan, make_samples(TWICE, flagged=BLOCKS), {}, {}).cases[0]
    assert (comparison.verdict, comparison.refused, comparison.blocks) == (Verdict.FASTER, None, BLOCKS)


def test_older_rules_give_older_results() -> None:
    results = compare(make_plan("ours"), make_samples(TWICE, flagged=13), {}, {}, rules=1)
    assert (results.cases[0].verdict, results.rules) == (Verdict.FASTER, 1)


def windows(ours_ms: float, ours: int, pytorch: int) -> list[Sample]:
    """Quiet blocks, with so many calls in each side's windows."""
    latency = {"pytorch": 0.02, "pytorch_control": 0.02, "ours": ours_ms}
    return [
        replace(sample, inner=ours if sample.implementation == "ours" else pytorch)
        for sample in make_samples(latency)
    ]


def test_a_cold_call_is_not_held_against_warm_ones() -> None:
    """As recorded beside other work: 1 call a window against 127, since the first runs of calls took time slices. The
    blocks were quiet, and a kernel twice as fast was called slower, 0.38x."""
    samples = windows(0.053, ours=1, pytorch=127)
    results = compare(make_plan("ours"), samples, {}, {})
    (case,) = results.cases
    assert (case.verdict, case.refused) == (Verdict.UNDECIDED, Refusal.UNLIKE_WINDOWS)
    assert (results.verdict, results.refused) == (Verdict.UNDECIDED, Refusal.UNLIKE_WINDOWS)
    assert [each.refused for each in results.control] == [None]
    older = compare(make_plan("ours"), samples, {}, {}, rules=2).cases[0]
    assert (older.verdict, older.refused) == (Verdict.SLOWER, None)


@pytest.mark.parametrize(
    ("ours_ms", "ours", "pytorch"),
    [
        (0.01, 300, 150),  # each as many as fill a window
        (2.1, 1, 150),  # a long call fills one
        (0.01, 7, 7),  # versions, which have the same number
        (0.053, 1, 1),  # cold calls of both
    ],
)
def test_windows_that_can_be_compared(ours_ms: float, ours: int, pytorch: int) -> None:
    assert compare(make_plan("ours"), windows(ours_ms, ours, pytorch), {}, {}).cases[0].refused is None


@pytest.mark.parametrize(
    "other", [{"timer": TimerKind.CPU}, {"cache": CacheState.COLD}, {"device": "cuda:0"}]
)
def test_other_clocks_have_other_windows(other: dict[str, object]) -> None:
    plan = replace(make_plan("ours"), **other)  # type: ignore[arg-type]
    assert compare(plan, windows(0.053, 1, 127), {}, {}).cases[0].refused is None


def test_too_few_blocks_is_said() -> None:
    few = [sample for sample in make_samples(TWICE) if sample.block < 5]
    results = compare(make_plan("ours"), few, {}, {})
    assert results.cases[0].refused is results.refused is Refusal.TOO_FEW_BLOCKS


def test_the_most_frequent_disturbance_is_named_first() -> None:
    samples = [
        replace(each, flags="clock,throttled" if each.block < 3 else "throttled")
        for each in make_samples(TWICE)
    ]
    assert compare(make_plan("ours"), samples, {}, {}).cases[0].disturbances == ("throttled", "clock")


def test_without_control_there_is_no_noise_floor() -> None:
    samples = [s for s in make_samples(TWICE) if s.implementation != "pytorch_control"]
    results = compare(make_plan("ours", control=False), samples, {}, {})
    assert math.isnan(results.noise_floor)
    assert results.control == ()
    assert results.cases[0].verdict is Verdict.FASTER


def test_baseline_alone() -> None:
    results = compare(make_plan(), make_samples(TWICE), {}, {})
    assert (results.candidate, results.cases, results.verdict) == ("pytorch", (), Verdict.UNDECIDED)


def test_control_far_from_one_silences_its_case() -> None:
    samples = make_samples({"pytorch": 2.0, "pytorch_control": 2.4, "ours": 1.8})
    results = compare(make_plan("ours"), samples, {}, {})
    assert results.cases[0].verdict is Verdict.UNDECIDED
    assert results.noise_floor == pytest.approx(1 / 6, rel=0.05)


def test_a_control_that_is_off_as_a_whole_silences_the_headline() -> None:
    latency = {"pytorch": 2.0, "pytorch_control": 2.2, "ours": 1.9}
    samples = make_samples(latency) + make_samples(latency, "b/bf16")
    assert compare(make_plan("ours"), samples, {}, {}).verdict is Verdict.UNDECIDED
    without = [sample for sample in samples if sample.implementation != "pytorch_control"]
    assert compare(make_plan("ours", control=False), without, {}, {}).verdict is Verdict.FASTER


def test_an_unsteady_control_silences_even_a_large_difference() -> None:
    """A control whose ratios scatter by factors says nothing by a centre that happens to be near 1."""
    random = np.random.default_rng(5)
    scatter = np.exp(random.normal(0.0, 2.0, BLOCKS))
    steady = make_samples({"pytorch": 2.0, "pytorch_control": 2.0, "ours": 1.6})
    unsteady = [
        replace(sample, latency_ms=sample.latency_ms * float(scatter[sample.block]))
        if sample.implementation == "pytorch_control"
        else sample
        for sample in steady
    ]
    plan = make_plan("ours")
    assert compare(plan, steady, {}, {}).cases[0].verdict is Verdict.FASTER
    assert compare(plan, unsteady, {}, {}).cases[0].verdict is Verdict.UNDECIDED
    # Its own scatter, not its centre, is what counts.
    assert control_offset(estimate_ratio(scatter, np.ones(BLOCKS), seed=1), 0.02) > 0.25
