"""Launches that do not fill the chip: what is said of profiles recorded on an H200, with less work in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from cudadent42.profiles import Profile, diagnose

Make = Callable[..., Profile]


def _on_part_of_the_chip(whole: Profile, part: float) -> Profile:
    """The same kernel in a grid that only this part of the multiprocessors gets a block of."""
    fewer = {name: whole.metrics[name] * part for name in ("sm_cycles_avg", "grid_blocks", "waves")}
    of_all = {name: value * part for name, value in whole.metrics.items() if name in OF_ALL_CYCLES}
    return dataclasses.replace(whole, metrics={**whole.metrics, **fewer, **of_all}, launches=())


OF_ALL_CYCLES = ("tensor_share", "dram_share", "l2_share", "shared_share", "sm_share", "memory_share")
"""Shares that idle multiprocessors lower."""


@pytest.mark.parametrize(
    ("part", "bound"), [(0.9, "latency"), (0.5, "idle multiprocessors"), (0.25, "idle multiprocessors")]
)
def test_a_grid_that_leaves_multiprocessors_without_work_is_named_as_that(
    profile_of: Make, part: float, bound: str
) -> None:
    """Also where those that have work wait most of the time: half a chip with nothing to do comes first."""
    profile = _on_part_of_the_chip(profile_of("chase"), part)
    diagnosis = diagnose(profile)
    assert diagnosis.bound == bound
    if part < 0.9:
        assert diagnosis.causes[0].rule == "small-grid"
        assert diagnosis.summary.startswith("It does not fill the chip")


def test_a_kernel_that_ends_before_the_chip_has_begun_is_named(profile_of: Make) -> None:
    whole = profile_of("one-wave")
    metrics = {**whole.metrics, "sm_cycles_elapsed": 2 * whole.metrics["sm_cycles_elapsed"]}
    diagnosis = diagnose(dataclasses.replace(whole, metrics=metrics))
    assert diagnosis.bound == "idle multiprocessors"
    assert diagnosis.causes[0].rule == "short-kernel"


def test_imbalance_is_asked_of_a_launch_that_leaves_room_for_more_blocks(profile_of: Make) -> None:
    """A launch of half of what fits has no last wave that could explain it."""
    whole = profile_of("one-wave")
    metrics = {**whole.metrics, "waves": 0.5, "sm_cycles_avg": 0.6 * whole.metrics["sm_cycles_max"]}
    diagnosis = diagnose(dataclasses.replace(whole, metrics=metrics, launches=()))
    assert diagnosis.causes[0].rule == "imbalance"
    (tail,) = (one for one in diagnosis.thresholds if one.name == "idle last wave")
    assert (tail.value, tail.met) == (0.0, True)


def test_too_few_warps_for_want_of_blocks_is_not_laid_to_resources(profile_of: Make) -> None:
    """One block to a multiprocessor, where 32 fit: no register or byte of shared memory bounds that."""
    findings = {one.rule: one for one in diagnose(profile_of("chase")).causes}
    assert "occupancy" not in findings
    assert findings["few-blocks"].evidence.startswith("132 blocks are 3.1% of what would run at once")
    assert "occupancy" in {one.rule for one in diagnose(profile_of("serialised")).causes}
