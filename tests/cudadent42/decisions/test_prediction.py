"""A script's prediction: Amdahl's law, and an interval that holds what is uncertain."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cudadent42.decisions.compare import candidate_ratios, compare
from cudadent42.decisions.prediction import NO_RATIO, OURS, predict
from cudadent42.decisions.statistics import RatioEstimate
from cudadent42.model.records import Plan, Sample
from cudadent42.model.script import CallTimes, Script, Unchanged
from cudadent42.operations.attention.case import AttentionCase

shares = st.just(0.0) | st.floats(1e-6, 0.9)
speedups = st.floats(0.1, 20.0)


def exactly(ratio: float) -> RatioEstimate:
    return RatioEstimate(ratio, np.full(100, ratio), 25)


def about(ratio: float, spread: float) -> RatioEstimate:
    noise = np.random.default_rng(1).normal(0.0, spread, 4000)
    return RatioEstimate(ratio, ratio * np.exp(noise), 25)


def script(*calls: CallTimes, seconds: tuple[float, ...] = (1.0,), **others: object) -> Script:
    return replace(Script("r", ("train.py",), "cpu", seconds, calls), **others)  # type: ignore[arg-type]


def times(case: str, *seconds: float, **others: object) -> CallTimes:
    return replace(CallTimes(case, 100, seconds), **others)  # type: ignore[arg-type]


@given(share=shares, speedup=speedups, total=st.floats(1e-3, 1e4))
def test_amdahl(share: float, speedup: float, total: float) -> None:
    recorded = script(times("a/fp32", share * total), seconds=(total,))
    prediction = predict(recorded, {"a/fp32": exactly(speedup)})
    assert prediction.speedup == pytest.approx(1 / (1 - share + share / speedup))
    assert prediction.predicted_seconds == pytest.approx(total / prediction.speedup)
    # Nothing is uncertain: the interval is a point.
    assert prediction.ci_low == pytest.approx(prediction.speedup)
    assert prediction.ci_high == pytest.approx(prediction.speedup)
    assert prediction.speedup <= 1 / (1 - share) + 1e-9


@given(first=shares, second=shares, speedup=speedups, more=st.floats(1.01, 3.0))
def test_faster_calls_and_larger_shares(first: float, second: float, speedup: float, more: float) -> None:
    assume(first + second < 0.95)
    both = script(times("a/fp32", first), times("b/fp32", second))
    ratios = {"a/fp32": exactly(speedup), "b/fp32": exactly(speedup)}
    prediction = predict(both, ratios)
    # Calls may be divided among cases at will.
    whole = predict(script(times("a/fp32", first + second)), ratios)
    assert prediction.speedup == pytest.approx(whole.speedup)
    faster = predict(both, {**ratios, "b/fp32": exactly(speedup * more)})
    assert faster.speedup >= prediction.speedup - 1e-12
    assert prediction.share == pytest.approx(first + second)
    if first + second > 0:
        assert prediction.calls_speedup == pytest.approx(speedup)
        assert min(speedup, 1.0) - 1e-9 <= prediction.speedup <= max(speedup, 1.0) + 1e-9


def test_the_mean_of_the_calls_is_weighted_by_their_time() -> None:
    recorded = script(times("a/fp32", 0.3), times("b/fp32", 0.1))
    prediction = predict(recorded, {"a/fp32": exactly(3.0), "b/fp32": exactly(0.5)})
    assert prediction.calls_speedup == pytest.approx(0.4 / (0.1 + 0.2))
    assert prediction.predicted_seconds == pytest.approx(0.6 + 0.1 + 0.2)


def test_what_has_no_ratio_stays_and_is_named() -> None:
    recorded = script(
        times("a/fp32", 0.2),
        times("b/fp32", 0.2),
        times("c/fp32", 0.1, ours=True),
        times("d/fp32", 0.1),
        unchanged=(Unchanged("attention", "dropout", 3, (0.05,)),),
    )
    ratios = {"a/fp32": exactly(2.0), "c/fp32": exactly(2.0), "d/fp32": exactly(math.nan)}
    prediction = predict(recorded, ratios, left_out={"d/fp32": "failed verification"})
    assert prediction.speedup == pytest.approx(1 / 0.9)
    assert prediction.left_out == {"b/fp32": NO_RATIO, "c/fp32": OURS, "d/fp32": "failed verification"}
    assert prediction.unchanged_share == pytest.approx(0.45)
    nothing = predict(recorded, {})
    assert (nothing.speedup, nothing.share, nothing.ci_low, nothing.ci_high) == (1.0, 0.0, 1.0, 1.0)
    assert math.isnan(nothing.calls_speedup)


def test_each_source_of_spread_widens_the_interval() -> None:
    ratios = {"a/fp32": exactly(2.0)}
    point = predict(script(times("a/fp32", 0.5)), ratios)
    by_ratio = predict(script(times("a/fp32", 0.5)), {"a/fp32": about(2.0, 0.1)})
    by_calls = predict(script(times("a/fp32", 0.5, spread=1.0)), ratios)
    by_runs = predict(script(times("a/fp32", 0.5, 0.3, 0.4), seconds=(1.0, 1.0, 1.0)), ratios)
    assert point.ci_low == pytest.approx(point.ci_high)
    for wide in (by_ratio, by_calls, by_runs):
        assert wide.ci_low < wide.speedup < wide.ci_high
    # 100 calls, each as uncertain as it is long: a tenth in their sum.
    assert by_calls.share_high - by_calls.share_low == pytest.approx(2 * 1.96 * 0.05, rel=0.1)
    assert (by_runs.share_low, by_runs.share_high) == (0.3, 0.5)


@given(
    data=st.lists(st.tuples(st.floats(0.0, 2.0), speedups, st.floats(0.0, 3.0)), min_size=1, max_size=5),
    total=st.floats(0.1, 3.0),
)
def test_no_spread_makes_more_of_a_script_than_there_is(
    data: list[tuple[float, float, float]], total: float
) -> None:
    calls = [times(f"{i}/fp32", seconds, spread=spread) for i, (seconds, _, spread) in enumerate(data)]
    ratios = {f"{i}/fp32": about(ratio, 0.05) for i, (_, ratio, _) in enumerate(data)}
    prediction = predict(script(*calls, seconds=(total,)), ratios)
    assert 0.0 <= prediction.share_low <= prediction.share_high <= 1.0 + 1e-9
    assert 0.0 < prediction.ci_low <= prediction.ci_high
    assert prediction.predicted_seconds > 0.0


def test_the_interval_covers() -> None:
    """Of scripts with calls and ratios as uncertain as they are said to be, 95 of 100 lie inside."""
    random = np.random.default_rng(7)
    inside = 0
    for _ in range(200):
        ratio, share = 2.0 * np.exp(random.normal(0, 0.05)), 0.5 * (1 + random.normal(0, 0.1))
        prediction = predict(
            script(times("a/fp32", share, spread=1.0)), {"a/fp32": about(ratio, 0.05)}, seed=3
        )
        inside += prediction.ci_low <= 1 / (1 - 0.5 + 0.5 / 2.0) <= prediction.ci_high
    assert inside >= 180


def test_results_hold_it_for_the_device_that_the_script_ran_on() -> None:
    cases = (AttentionCase("a", "fp32", 1, 1, 1, 64, 64, 64),)
    plan = Plan("s", "cpu", cases, "pytorch", ("pytorch", "ours"), 10, 1, seed=3, control=False)
    plan = replace(plan, script=script(times("a/fp32", 0.5)))
    samples = [
        Sample("a/fp32", name, block, position, latency, 1, 0.1, 0.0)
        for block in range(10)
        for position, (name, latency) in enumerate({"pytorch": 2.0, "ours": 1.0}.items())
    ]
    prediction = compare(plan, samples, {}, {}).prediction
    assert prediction is not None
    assert prediction.speedup == pytest.approx(1 / 0.75)
    ratios, reasons = candidate_ratios(plan, samples, {}, {})
    assert ratios["a/fp32"].ratio == pytest.approx(2.0)
    assert reasons == {}
    assert compare(replace(plan, device="cuda:0"), samples, {}, {}).prediction is None
    assert compare(replace(plan, script=None), samples, {}, {}).prediction is None
    wrong = compare(plan, samples, {"a/fp32/ours": "failed verification"}, {}).prediction
    assert wrong is not None
    assert (wrong.speedup, wrong.left_out) == (1.0, {"a/fp32": "failed verification"})
