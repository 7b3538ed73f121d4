"""The diagnosis on counters recorded on an H200: it names each planted fault first, and does not cry wolf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from cudadent42.profiles import Profile, diagnose, text
from cudadent42.profiles.diagnosis import WORTH, shown
from cudadent42.profiles.metrics import SECTOR_BYTES
from cudadent42.profiles.quantities import main_launch, quantities, with_quantities
from cudadent42.profiles.records import Ablation, Certainty, Kind, Source
from cudadent42.profiles.rules import builtin_rules
from flashmoe_science.jit.records import Resources

Make = Callable[..., Profile]

FAULTS = {
    "unswizzled": "bank-conflicts",
    "serialised": "exposed-latency",
    "narrow-copy": "narrow-loads",
    "spilled": "spills",
    "wave-and-a-bit": "tail",
    "chase": "memory-latency",
    "reread": "l2",
    "shifts": "integer",
}
MENDED = {
    "product": "unswizzled",
    "wide-copy": "narrow-copy",
    "unspilled": "spilled",
    "one-wave": "wave-and-a-bit",
    "chase-many": "chase",
    "kept": "reread",
    "multiply-add": "shifts",
}
SILENT = (
    *("hopper-full", "hopper-causal", "hopper-d256", "decode"),
    *("torch-cudnn", "torch-matmul", "torch-elementwise", "wide-copy", "unspilled", "one-wave"),
    *("kept", "multiply-add"),
)


@pytest.mark.parametrize(("name", "rule"), FAULTS.items())
def test_a_planted_fault_is_named_first(profile_in_each: Make, name: str, rule: str) -> None:
    diagnosis = diagnose(profile_in_each(name))
    first = diagnosis.causes[0]
    assert first.rule == rule
    assert first.certainty is Certainty.MEASURED
    assert first.gain > 0.2
    assert first.evidence in "\n".join(one.evidence for one in diagnosis.causes)
    assert diagnosis.next_step == first.experiment


@pytest.mark.parametrize(("mended", "faulty"), MENDED.items())
def test_a_bound_on_the_gain_holds(profile_in_each: Make, mended: str, faulty: str) -> None:
    """Mending the fault took no more off the time than the diagnosis allowed (2 % for the runs' own spread)."""
    before, after = (profile_in_each(name).metrics["time_s"] for name in (faulty, mended))
    first = diagnose(profile_in_each(faulty)).causes[0]
    work = 1.1 if faulty == "wave-and-a-bit" else 1.0  # it does a tenth more
    assert 1 - after * work / before <= first.gain + 0.02


@pytest.mark.parametrize("name", SILENT)
def test_a_good_kernel_has_no_causes(profile_in_each: Make, name: str) -> None:
    diagnosis = diagnose(profile_in_each(name))
    assert diagnosis.causes == ()
    assert "Nothing found" in diagnosis.summary


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_loads_that_fetch_little_beside_bulk_copies_are_not_blamed(profile_of: Make, share: float) -> None:
    """As a flag that one thread polls, 4 bytes of a sector, in a kernel whose tiles come by TMA."""
    profile = profile_of("narrow-copy")
    metrics = {**profile.metrics, "load_bytes_used": 0.125, "memory_share": 0.75, "load_sectors": 1.0}
    metrics["load_requests"] = share * metrics["dram_read_bytes"] / SECTOR_BYTES
    causes = {one.rule for one in diagnose(dataclasses.replace(profile, metrics=metrics)).causes}
    assert (
        causes >= {"narrow-loads", "uncoalesced"}
        if share > 0.5
        else not causes & {"narrow-loads", "uncoalesced"}
    )


@pytest.mark.parametrize("name", MENDED)
def test_a_mended_kernel_does_not_have_the_fault(profile_in_each: Make, name: str) -> None:
    causes = [finding.rule for finding in diagnose(profile_in_each(name)).causes]
    assert FAULTS[MENDED[name]] not in causes


@pytest.mark.parametrize("name", ["torch-flash", "portable", "product"])
def test_mma_sync_on_hopper_is_what_holds_these_back(profile_in_each: Make, name: str) -> None:
    assert diagnose(profile_in_each(name)).causes[0].rule == "old-tensor-path"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("hopper-d64", "turns"),
        ("decode-long", "cluster-tail"),
        ("torch-softmax", "memory-below-peak"),
    ],
)
def test_what_is_left_in_good_kernels_is_named(profile_of: Make, name: str, rule: str) -> None:
    assert diagnose(profile_of(name)).causes[0].rule == rule


def test_idle_multiprocessors_hold_nothing_back_where_memory_is_full(later_profile_of: Make) -> None:
    """32 clusters of 3 blocks leave 31 % of the chip idle, and read what the case needs at 95 % of a copy's rate."""
    profile = later_profile_of("decode-long")
    values = quantities(profile)
    assert values["grid_fill"].value < 0.8
    assert values["sm_idle_share"].value > 0.3
    assert diagnose(profile).causes == ()
    assert diagnose(later_profile_of("decode-long", counters=False)).causes == ()
    slower = dataclasses.replace(
        profile, peaks={**profile.peaks, "copy_gbps": 1.2 * profile.peaks["copy_gbps"]}
    )
    assert [one.rule for one in diagnose(slower).causes][:1] == ["small-grid"]


@pytest.mark.parametrize("name", ["wave-and-a-bit", "decode-long"])
def test_filling_the_chip_gives_no_more_than_its_busiest_unit_leaves(profile_of: Make, name: str) -> None:
    profile = profile_of(name)
    headroom = quantities(profile)["headroom"].value
    assert 0 < diagnose(profile).causes[0].gain <= headroom


def test_specialised_warps_are_allowed_few_warps(profile_of: Make) -> None:
    (occupancy,) = (one for one in diagnose(profile_of("hopper-full")).thresholds if one.name == "occupancy")
    assert occupancy.value < 0.2
    assert occupancy.met is None
    (of_others,) = (one for one in diagnose(profile_of("serialised")).thresholds if one.name == "occupancy")
    assert of_others.met is False


def test_what_a_kernel_runs_against(profile_of: Make) -> None:
    expected = {
        "hopper-full": "matrix products",
        "torch-matmul": "matrix products",
        "decode": "memory",
        "wide-copy": "memory",
        "unswizzled": "shared memory",
        "serialised": "latency",
        "chase": "latency",
        "reread": "the L2 cache",
        "shifts": "integer and logic",
        "one-wave": "instruction issue",
        "wave-and-a-bit": "idle multiprocessors",
    }
    assert {name: diagnose(profile_of(name)).bound for name in expected} == expected


def test_a_unit_of_a_chip_that_is_half_idle_is_not_called_busy(profile_of: Make) -> None:
    """The multiprocessors that have a block issue in 88 % of their cycles, and 45 % of the chip's time is idle."""
    profile = profile_of("wave-and-a-bit")
    assert profile.metrics["issue_share"] == pytest.approx(0.88, abs=0.01)
    diagnosis = diagnose(profile)
    assert diagnosis.bound_share == pytest.approx(0.88 * 0.55, abs=0.01)
    assert "its busiest unit works 48% of the time" in diagnosis.summary
    assert diagnosis.summary.startswith(
        "It does not fill the chip: multiprocessors have nothing to do for 45%"
    )


def test_conflicts_of_a_few_multiprocessors_are_bounded_by_how_busy_those_are(profile_of: Make) -> None:
    """A third of the chip does all the work in the same time: an average over all of it would allow a third."""
    whole = profile_of("unswizzled")
    third = {
        name: whole.metrics[name] / 3
        for name in ("sm_cycles_avg", "shared_share", "sm_share", "memory_share")
    }
    few = dataclasses.replace(whole, metrics={**whole.metrics, **third})
    of_all, of_few = (
        next(one for one in diagnose(profile).causes if one.rule == "bank-conflicts")
        for profile in (whole, few)
    )
    assert of_few.gain == pytest.approx(of_all.gain)
    assert of_few.evidence == of_all.evidence


def test_a_lowered_clock_is_a_limit_not_a_cause(profile_of: Make) -> None:
    diagnosis = diagnose(profile_of("hopper-full"))
    assert [finding.rule for finding in diagnosis.limits] == ["power"]


@pytest.mark.parametrize("counters", [True, False])
def test_every_finding_is_bounded_and_ranked(
    recorded: dict[str, Any], profile_of: Make, counters: bool
) -> None:
    for subject in recorded["subjects"]:
        diagnosis = diagnose(profile_of(subject["name"], counters=counters))
        for finding in (*diagnosis.causes, *diagnosis.minor, *diagnosis.limits):
            assert 0 <= finding.gain <= 1
            assert "{" not in finding.evidence
            assert "unknown" not in finding.evidence
        assert all(finding.gain >= WORTH for finding in diagnosis.causes)
        assert all(finding.gain < WORTH for finding in diagnosis.minor)
        assert all(finding.kind is not Kind.LIMIT for finding in diagnosis.causes)


def test_the_bound_of_a_part_is_the_end_of_its_interval(profile_of: Make) -> None:
    part = Ablation("exponentials", 0.8, 1.0, saved=0.2, saved_low=0.15, saved_high=0.26)
    without = dataclasses.replace(profile_of("hopper-full", counters=False), ablations=(part,))
    first = diagnose(without).causes[0]
    assert (first.rule, first.gain) == ("exposed-exponentials", pytest.approx(0.26))
    assert "20% less time" in first.evidence


def test_sums_that_blocks_add_up_in_turn_are_a_cause(profile_of: Make) -> None:
    part = Ablation("sums", 0.9, 1.0, saved=0.1, saved_low=0.08, saved_high=0.12)
    without = dataclasses.replace(profile_of("hopper-full", counters=False), ablations=(part,))
    assert "exposed-sums" in [finding.rule for finding in diagnose(without).causes]


# ---------------------------------------------------------------- calls of several kernels


def _with_launches(profile: Profile, count: int, latency_factor: float) -> Profile:
    """The case's work in ``count`` equal launches, in a call that lasts longer than they do by a factor."""
    (launch,) = profile.launches
    return dataclasses.replace(
        profile,
        launches=(launch,) * count,
        latency_ms=count * launch.duration_s * 1e3 * latency_factor,
    )


@pytest.mark.parametrize("counters", [True, False])
def test_the_case_s_work_is_over_the_time_of_all_its_kernels(profile_of: Make, counters: bool) -> None:
    one = profile_of("wide-copy", counters=counters)
    values, of_four = quantities(one), quantities(_with_launches(one, 4, 1.0))
    assert of_four["achieved_gbps"].value == pytest.approx(values["achieved_gbps"].value / 4)
    assert of_four["roof_share"].value == pytest.approx(values["roof_share"].value / 4)
    assert of_four["gap_share"].value == pytest.approx(0.0)
    if counters:  # of the one kernel that was counted
        assert of_four["dram_gbps"] == values["dram_gbps"]


def test_time_between_kernels_is_named(profile_of: Make) -> None:
    whole = profile_of("hopper-full")
    first = diagnose(_with_launches(whole, 3, 1.25)).causes[0]
    assert (first.rule, first.gain) == ("gaps", pytest.approx(0.2))
    assert "3 kernels" in first.evidence
    assert "20%" in first.evidence
    for calm in (
        _with_launches(whole, 3, 1.05),
        _with_launches(whole, 3, 1.2),  # a lower clock under load makes as much
        _with_launches(whole, 1, 1.25),
        _with_launches(whole, 3, 0.9),
    ):
        assert "gaps" not in [finding.rule for finding in diagnose(calm).causes]


def test_the_launch_is_that_of_the_kernel_that_was_counted(profile_of: Make) -> None:
    """With --kernel that need not be the one that takes longest."""
    whole = profile_of("hopper-full")
    (counted,) = whole.launches
    longer = dataclasses.replace(counted, kernel="merge", duration_s=2 * counted.duration_s, grid_blocks=1)
    both = dataclasses.replace(whole, launches=(longer, counted))
    assert main_launch(both) == counted
    assert main_launch(dataclasses.replace(both, kernel="of another name")) == longer


# ---------------------------------------------------------------- what is missing is not zero


def test_a_missing_counter_silences_its_rule_and_is_named(profile_of: Make) -> None:
    whole = profile_of("unswizzled")
    metrics = {name: value for name, value in whole.metrics.items() if name != "shared_conflicts"}
    reason = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum is not a number"
    diagnosis = diagnose(dataclasses.replace(whole, metrics=metrics, missing={"shared_conflicts": reason}))
    assert "bank-conflicts" not in [finding.rule for finding in diagnosis.causes]
    assert "bank-conflicts" in diagnosis.not_examined
    (threshold,) = (one for one in diagnosis.thresholds if "bank conflicts" in one.name)
    assert threshold.met is None
    assert math.isnan(threshold.value)


def test_what_was_not_asked_is_always_said(profile_of: Make) -> None:
    whole = profile_of("hopper-full")
    assert not any("not asked" in line for line in text.lines(diagnose(whole)))
    metrics = {name: value for name, value in whole.metrics.items() if name != "shared_conflicts"}
    reason = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum is not a number"
    diagnosis = diagnose(dataclasses.replace(whole, metrics=metrics, missing={"shared_conflicts": reason}))
    said = f"1 of {len(builtin_rules())} rules were not asked: bank_conflicts is not known"
    assert said in list(text.lines(diagnosis))
    assert "Nothing" not in diagnosis.summary + diagnosis.next_step
    assert "1 of" in diagnosis.summary
    assert "bank_conflicts" in diagnosis.next_step


def test_a_rule_that_is_answered_needs_nothing_more(profile_of: Make) -> None:
    """Where one of its conditions is known not to hold, what is missing would not change it."""
    one_kernel = dataclasses.replace(profile_of("hopper-full"), latency_ms=math.nan)
    assert "gaps" not in diagnose(one_kernel).not_examined
    assert "gaps" in diagnose(dataclasses.replace(one_kernel, launches=one_kernel.launches * 2)).not_examined


def test_what_is_not_known_does_not_read_as_all_clear(recorded: dict[str, Any], profile_of: Make) -> None:
    """Whichever counter is missing from a good kernel's, no line says that all was looked at."""
    whole = profile_of("torch-matmul")
    assert "Nothing" in diagnose(whole).summary
    unit_shares = (
        "tensor_share",
        "dram_share",
        "l2_share",
        "shared_share",
        "xu_share",
        "alu_share",
        "issue_share",
    )
    for name in (
        *unit_shares,
        "shared_conflicts",
        "local_loads",
        "waves",
        "sm_cycles_avg",
        "stall_long_scoreboard",
    ):
        metrics = {key: value for key, value in whole.metrics.items() if key != name}
        partial = dataclasses.replace(whole, metrics=metrics, missing={name: "not counted"}, launches=())
        diagnosis = diagnose(partial)
        assert diagnosis.not_examined, name
        assert "Nothing" not in diagnosis.summary + diagnosis.next_step, name


def test_clusters_of_which_the_room_was_not_counted_are_not_called_in_order(profile_of: Make) -> None:
    whole = profile_of("decode-long")
    assert diagnose(whole).causes[0].rule == "cluster-tail"
    metrics = {key: value for key, value in whole.metrics.items() if key != "clusters_fit"}
    assert "cluster-tail" in diagnose(dataclasses.replace(whole, metrics=metrics)).not_examined
    # A launch without clusters lacks nothing.
    assert "cluster-tail" not in diagnose(profile_of("wave-and-a-bit")).not_examined


def test_a_unit_that_was_not_counted_may_be_the_busy_one(profile_of: Make) -> None:
    whole = profile_of("hopper-d64")
    metrics = {key: value for key, value in whole.metrics.items() if key not in ("tensor_share", "xu_share")}
    diagnosis = diagnose(dataclasses.replace(whole, metrics=metrics))
    assert diagnosis.bound == "unknown"
    assert "these units were not counted: matrix products, the special function unit" in diagnosis.summary


@pytest.mark.parametrize("name", ["hopper-full", "wide-copy"])
def test_without_counters_silence_is_not_praise(profile_of: Make, name: str) -> None:
    lines = list(text.lines(diagnose(profile_of(name, counters=False))))
    assert "Nothing found" not in " ".join(lines)
    assert "say nothing of bank conflicts" in lines[1]
    assert any(line.startswith("not known, so not shown to be in order: ") for line in lines)


@pytest.mark.parametrize("name", ["unswizzled", "reread", "shifts", "chase"])
def test_without_counters_a_distance_to_the_roof_is_not_called_latency(profile_of: Make, name: str) -> None:
    """With counters three of these run against shared memory, L2 and integers; without, nothing tells which it is."""
    diagnosis = diagnose(profile_of(name, counters=False))
    assert diagnosis.bound == "unknown"
    assert diagnosis.bound_share < 0.1
    assert "latency" not in diagnosis.summary
    assert "neither at the ceiling for arithmetic nor at the one for memory" in diagnosis.summary
    assert "only counters show" in diagnosis.causes[0].meaning


@pytest.mark.parametrize("unknown", ["flops", "copy"])
def test_a_roof_that_is_not_known_may_be_the_higher_one(profile_of: Make, unknown: str) -> None:
    far = profile_of("portable" if unknown == "copy" else "hopper-full", counters=False)
    change = {"flops": math.nan} if unknown == "flops" else {"peaks": {**far.peaks, "copy_gbps": 0.0}}
    diagnosis = diagnose(dataclasses.replace(far, **change))  # type: ignore[arg-type]
    assert diagnosis.bound == "unknown"
    assert "below-roof" not in [finding.rule for finding in diagnosis.causes]


def test_without_ceilings_it_is_said_that_they_are_missing(profile_of: Make) -> None:
    profile = dataclasses.replace(profile_of("hopper-full", counters=False), peaks={})
    diagnosis = diagnose(profile)
    assert "this machine's ceilings were not all measured" in diagnosis.not_examined.values()
    assert "Nothing" not in diagnosis.summary


def test_what_evidence_lacks_is_in_words(profile_of: Make) -> None:
    whole = profile_of("wave-and-a-bit")
    metrics = {key: value for key, value in whole.metrics.items() if key != "grid_blocks"}
    first = diagnose(dataclasses.replace(whole, metrics=metrics, launches=())).causes[0]
    assert first.evidence.startswith("an unknown number of blocks are 1.10 waves")


def test_an_empty_profile_says_that_nothing_is_known(profile_of: Make) -> None:
    empty = dataclasses.replace(
        profile_of("decode", counters=False), metrics={}, peaks={}, launches=(), latency_ms=math.nan
    )
    diagnosis = diagnose(empty)
    assert diagnosis.bound == "unknown"
    assert diagnosis.causes == ()


@pytest.mark.parametrize("counters", [True, False])
@pytest.mark.parametrize("ceiling", [0.0, -1.0, math.inf])
def test_a_ceiling_that_cannot_be_is_not_known(profile_of: Make, ceiling: float, counters: bool) -> None:
    whole = profile_of("hopper-full", counters=counters)
    values = quantities(dataclasses.replace(whole, peaks=dict.fromkeys(whole.peaks, ceiling)))
    assert not {"compute_share", "traffic_share", "roof_share", "peak_gflops", "copy_gbps"} & values.keys()
    assert "achieved_gflops" in values
    without_copy = diagnose(dataclasses.replace(whole, peaks={**whole.peaks, "copy_gbps": ceiling}))
    assert without_copy.bound == "matrix products"


def test_a_profile_with_its_quantities_is_judged_alike(recorded: dict[str, Any], profile_of: Make) -> None:
    """What is written into the file for others to read changes nothing when it is read back."""
    for subject in recorded["subjects"]:
        for counters in (True, False):
            profile = profile_of(subject["name"], counters=counters)
            assert diagnose(with_quantities(profile)) == diagnose(profile)


# ---------------------------------------------------------------- without counters


@pytest.mark.parametrize("name", ["hopper-full", "hopper-causal", "wide-copy", "torch-matmul"])
def test_without_counters_a_good_kernel_is_left_alone(profile_of: Make, name: str) -> None:
    diagnosis = diagnose(profile_of(name, counters=False))
    assert diagnosis.causes == ()
    assert "without counters" in diagnosis.summary


def test_without_counters_the_tail_is_inferred(profile_of: Make) -> None:
    first = diagnose(profile_of("wave-and-a-bit", counters=False)).causes[0]
    assert first.rule == "tail"
    assert first.certainty is Certainty.INFERRED


def test_without_counters_the_blocks_are_counted(profile_of: Make) -> None:
    profile = profile_of("wave-and-a-bit", counters=False)
    (launch,) = profile.launches
    assert f"{launch.grid_blocks:,} blocks are" in diagnose(profile).causes[0].evidence


def test_without_counters_a_small_grid_is_inferred(profile_of: Make) -> None:
    profile = profile_of("torch-flash", counters=False)
    (launch,) = profile.launches
    small = dataclasses.replace(profile, launches=(dataclasses.replace(launch, grid_blocks=33),))
    causes = {finding.rule: finding for finding in diagnose(small).causes}
    assert causes["small-grid"].certainty is Certainty.INFERRED
    assert causes["small-grid"].evidence.startswith("33 blocks for 132 multiprocessors; 75%")


def test_without_counters_spills_are_suspected(profile_of: Make) -> None:
    table = Resources(32, 492, 496, 272, 0, 0, 256, 8, 1.0)
    profile = dataclasses.replace(profile_of("spilled", counters=False), resources=table)
    causes = {finding.rule: finding for finding in diagnose(profile).causes}
    assert causes["compiled-spills"].certainty is Certainty.SUSPECTED


def test_without_counters_narrow_loads_are_suspected(profile_of: Make) -> None:
    counts = {"load_32": 1, "store_32": 1, "total": 12}
    profile = dataclasses.replace(profile_of("narrow-copy", counters=False), instructions=counts)
    first = diagnose(profile).causes[0]
    assert first.rule == "compiled-narrow-loads"


@pytest.mark.parametrize("name", ["unswizzled", "serialised", "torch-flash"])
def test_without_counters_a_slow_kernel_is_seen_to_be_slow(profile_of: Make, name: str) -> None:
    diagnosis = diagnose(profile_of(name, counters=False))
    assert diagnosis.source is Source.MODEL
    assert diagnosis.causes[0].rule == "below-roof"
    assert "counters" in diagnosis.next_step


@pytest.mark.parametrize(
    ("value", "style", "words"),
    [
        (0.5, "%", "50%"),
        (0.023, "%", "2.3%"),
        (0.0, "%", "0%"),
        (1234567.0, "count", "1,234,567"),
        (2.5e9, "bytes", "2.5 GB"),
        (780000.0, "rate", "780 TFLOP/s"),
        (1.63e9, "hz", "1.63 GHz"),
        (4.0, ".1", "4.0"),
    ],
)
def test_quantities_in_words(value: float, style: str, words: str) -> None:
    assert shown(value, style) == words
