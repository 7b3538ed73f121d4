"""Units, missing values and derived ratios."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.profiles.metrics import COUNTERS, RawMetric, base_value, derive, light_set, read_counters


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (50.0, "%", 0.5),
        (2.5, "ms", 2.5e-3),
        (2752512.0, "ns", 2.752512e-3),
        (348.736, "us", 348.736e-6),
        (203.0, "Mbyte", 203e6),
        (57.5, "Kbyte/block", 57.5e3),
        (1.25, "Gbyte", 1.25e9),
        (1.63, "Ghz", 1.63e9),
        (1810735203.9, "hz", 1810735203.9),
        (12.0, "register/thread", 12.0),
        (3.0, "", 3.0),
        (16.0, "sector", 16.0),
    ],
)
def test_units_are_brought_to_their_base(value: float, unit: str, expected: float) -> None:
    assert base_value(RawMetric(value, unit)) == pytest.approx(expected)


def test_missing_and_nan_are_named_and_never_zero() -> None:
    raw = {
        "gpu__time_duration.sum": RawMetric(5.0, "us"),
        "launch__grid_size": RawMetric(math.nan),
    }
    counted = read_counters("kernel", raw)
    assert counted.values == {"time_s": pytest.approx(5e-6)}
    assert counted.missing["grid_blocks"] == "launch__grid_size is not a number"
    assert counted.missing["dram_share"].startswith("the report has no dram__throughput")
    assert set(counted.values) | set(counted.missing) == set(COUNTERS)


def test_another_name_of_a_counter_is_taken() -> None:
    raw = {"dram__bytes_op_read.sum": RawMetric(1.0, "Mbyte")}
    assert read_counters("kernel", raw).values["dram_read_bytes"] == 1e6


def test_names_to_ask_for_are_unique() -> None:
    assert len(set(light_set())) == len(light_set())


def test_ratios_without_their_parts_are_left_out() -> None:
    assert derive({"shared_conflicts": 5.0}) == {}
    assert derive({"shared_conflicts": 0.0, "shared_wavefronts": 0.0}) == {"bank_conflicts": 0.0}


@pytest.mark.parametrize(("waves", "tail"), [(1.0, 0.0), (1.1, 0.45), (2.0, 0.0), (0.5, 0.0), (7.76, 0.03)])
def test_tail_of_the_last_wave(waves: float, tail: float) -> None:
    assert derive({"waves": waves})["tail_share"] == pytest.approx(tail, abs=1e-9)


def test_clusters_have_waves_of_their_own() -> None:
    derived = derive({"cluster_blocks": 8.0, "clusters_fit": 15.0, "grid_blocks": 128.0})
    assert derived["clusters"] == 16
    assert derived["cluster_waves"] == pytest.approx(16 / 15)
    assert derived["cluster_tail_share"] == pytest.approx(1 - 16 / 30)


_POSITIVE = st.just(0.0) | st.floats(min_value=1e-6, max_value=1e12)


@given(st.dictionaries(st.sampled_from(sorted(COUNTERS)), _POSITIVE))
def test_derived_ratios_are_finite(values: dict[str, float]) -> None:
    assert all(math.isfinite(value) for value in derive(values).values())


@given(
    local=_POSITIVE, rest=st.floats(min_value=1, max_value=1e12), waits=st.floats(min_value=0, max_value=1)
)
def test_the_cost_of_spills_is_a_share(local: float, rest: float, waits: float) -> None:
    derived = derive(
        {
            "local_loads": local,
            "local_stores": 0.0,
            "instructions": local + rest,
            "load_requests": rest,
            "store_requests": 0.0,
            "stall_lg_throttle": waits,
            "stall_long_scoreboard": 0.0,
            "warp_latency": 1.0,
        }
    )
    assert derived["local_share"] - 1e-12 <= derived["local_cost_share"] <= 1
