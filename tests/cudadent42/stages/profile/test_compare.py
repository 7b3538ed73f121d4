"""Two profiles side by side, and the times of one call by its clocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from cudadent42.base.errors import UsageError
from cudadent42.profiles import Profile, diagnose, text
from cudadent42.profiles.compare import changes, load
from cudadent42.profiles.records import Ablation, Clock
from cudadent42.profiles.times import apart, times

# ---------------------------------------------------------------- before and after


def test_a_mended_fault_shows(profile_of: Callable[..., Profile]) -> None:
    before = dataclasses.replace(profile_of("unswizzled"), case="x/bf16")
    after = dataclasses.replace(profile_of("product"), case="x/bf16")
    lines = "\n".join(changes(before, after))
    assert "(4.12x as fast)" in lines or "x as fast" in lines
    assert "shared-memory conflicts: 86% -> " in lines
    assert "careful" not in lines


def test_what_cannot_be_compared_is_said(profile_of: Callable[..., Profile]) -> None:
    lines = changes(profile_of("unswizzled"), profile_of("product", counters=False))
    assert lines[0].startswith("careful: unswizzled/bf16 before")
    assert "counters" in lines[1]


def test_equal_profiles_have_no_changes(profile_of: Callable[..., Profile]) -> None:
    assert changes(profile_of("decode"), profile_of("decode")) == ("no number changed by more than 2 %",)


def test_a_change_that_does_not_show_is_none(profile_of: Callable[..., Profile]) -> None:
    """One conflict more among a million is a change of 100 %, from 0.0 % to 0.0 %."""
    whole = profile_of("decode")
    before, after = (
        dataclasses.replace(
            whole, metrics={**whole.metrics, "shared_conflicts": conflicts, "shared_wavefronts": 1e6}
        )
        for conflicts in (1.0, 2.0)
    )
    assert changes(before, after) == ("no number changed by more than 2 %",)


def test_a_number_of_one_profile_alone_does_not_read_as_unchanged(profile_of: Callable[..., Profile]) -> None:
    whole = profile_of("decode")
    metrics = {name: value for name, value in whole.metrics.items() if name != "shared_conflicts"}
    partial = dataclasses.replace(whole, metrics=metrics)
    for pair in ((whole, partial), (partial, whole)):
        assert changes(*pair) == (
            "not compared, since only one of the two profiles has them: shared-memory conflicts",
        )


def test_a_folder_without_a_profile_cannot_be_compared(run: Path) -> None:
    with pytest.raises(UsageError, match="has no profile"):
        load(run)


def test_a_folder_that_is_not_there_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        load(tmp_path / "nowhere")


def test_profiles_without_counters_show_a_change_of_time(profile_of: Callable[..., Profile]) -> None:
    before = dataclasses.replace(profile_of("portable", counters=False), case="x/bf16")
    faster = dataclasses.replace(before.launches[0], duration_s=before.launches[0].duration_s / 2)
    after = dataclasses.replace(before, latency_ms=before.latency_ms / 2, launches=(faster,))
    lines = changes(before, after)
    assert lines[0].startswith("time in the driver's trace: ")
    assert lines[0].endswith("(2.00x as fast)")
    assert any(line.startswith("of the roofline: ") for line in lines)


def test_times_of_one_clock_only_are_compared(profile_of: Callable[..., Profile]) -> None:
    counted = dataclasses.replace(profile_of("portable"), latency_ms=9.0, launches=())
    called = dataclasses.replace(profile_of("portable", counters=False), latency_ms=3.0, launches=())
    assert "time called: 9 ms -> 3 ms (3.00x as fast)" in changes(counted, called)
    nothing = dataclasses.replace(called, latency_ms=math.nan)
    assert "time: no clock measured both" in changes(counted, nothing)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device_name": "NVIDIA L4"}, "careful: measured on NVIDIA H200 before, NVIDIA L4 after"),
        (
            {"tool": "Nsight Compute 2024.1"},
            "careful: read by Nsight Compute 2025.3.1 before, Nsight Compute 2024.1",
        ),
        ({"implementation": "pytorch"}, "careful: subject before, pytorch after"),
    ],
)
def test_what_else_may_make_the_difference_is_said(
    profile_of: Callable[..., Profile], change: dict[str, str], said: str
) -> None:
    before = dataclasses.replace(profile_of("decode"), tool="Nsight Compute 2025.3.1")
    assert not any("careful" in line for line in changes(before, before))
    assert changes(before, dataclasses.replace(before, **change))[0].startswith(said)  # type: ignore[arg-type]


def test_two_cases_have_no_speed_up(profile_of: Callable[..., Profile]) -> None:
    lines = "\n".join(changes(profile_of("unswizzled"), profile_of("product")))
    assert "time" in lines
    assert "as fast" not in lines


# ---------------------------------------------------------------- the times of one call


def test_every_clock_is_said_and_how_far_they_are_apart(profile_of: Callable[..., Profile]) -> None:
    whole = profile_of("decode")
    ablation = Ablation("loads", 0.05, 0.08, 0.1, 0.05, 0.15)
    profile = dataclasses.replace(whole, latency_ms=0.075, ablations=(ablation,), run_latency_ms=0.07)
    by_clock = {one.clock: one for one in times(profile)}
    assert set(by_clock) == set(Clock)
    assert apart(times(profile)) == pytest.approx(0.08 / by_clock[Clock.COUNTED].latency_ms - 1)
    assert [clock for clock, one in by_clock.items() if one.judged] == [Clock.COUNTED]
    lines = list(text.lines(diagnose(profile)))
    (line,) = (line for line in lines if line.startswith("times of a call: "))
    for words in (
        "under Nsight Compute",
        "driver's trace",
        "0.075 ms called",
        "0.08 ms called in the race",
        "the run",
    ):
        assert words in line
    assert any(
        line.startswith(f"careful: these differ by {apart(diagnose(profile).times):.0%}") for line in lines
    )
    assert any("loads 10.0% (5.0% to 15.0%)" in line for line in lines)


def test_times_that_agree_need_no_warning(profile_of: Callable[..., Profile]) -> None:
    assert not any("differ by" in line for line in text.lines(diagnose(profile_of("decode"))))


def test_counters_of_one_of_several_kernels_are_no_time_of_the_call(
    profile_of: Callable[..., Profile],
) -> None:
    one = profile_of("decode")
    assert Clock.COUNTED not in {t.clock for t in times(dataclasses.replace(one, launches=one.launches * 2))}
