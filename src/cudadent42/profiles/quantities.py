"""The numbers that rules speak of, each with where it comes from: counters, times and models, or the compiled code."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

from cudadent42.profiles import metrics
from cudadent42.profiles.records import Launch, Profile, Source
from flashmoe_science.errors import DeviceError
from flashmoe_science.jit.limits import limits, occupancy


class Origin(IntEnum):
    """Weakest first."""

    STATIC = 0
    """Read off the compiled kernel."""
    MODEL = 1
    """Worked out from times, shapes and measured ceilings."""
    MEASURED = 2
    """Counted on the chip, or timed with and without."""


@dataclass(frozen=True)
class Quantity:
    value: float
    origin: Origin


Quantities = dict[str, Quantity]

OURS = "cudadent42"
"""The implementation whose kernels can be built without parts of their work."""

_NONE = Quantity(0.0, Origin.STATIC)


def quantities(profile: Profile) -> Quantities:
    """Every quantity that is known; what is not, is not there."""
    derived: Quantities = {}

    def add(name: str, value: float, origin: Origin) -> None:
        if math.isfinite(value):
            derived[name] = Quantity(value, origin)

    counted = Origin.MEASURED if profile.source is Source.COUNTERS else Origin.MODEL
    for name, value in {**profile.metrics, **metrics.derive(profile.metrics)}.items():
        add(name, value, counted)
    _add_rates(profile, add_to=derived)
    _add_gaps(profile, add_to=derived)
    _add_static(profile, add_to=derived)
    add("on_cpu", float(profile.device == "cpu"), Origin.MEASURED)
    add("can_leave_parts_out", float(profile.implementation == OURS), Origin.MEASURED)
    main = main_launch(profile)
    if main is not None and not {"waves", "grid_blocks"} <= derived.keys():
        _add_launch(profile, main, add_to=derived)
    for ablation in profile.ablations:
        # What might be chance is not a cost.
        sure = ablation.saved if ablation.saved_low > 0 else 0.0
        add(f"ablation_{ablation.part}", sure, Origin.MEASURED)
        add(f"ablation_{ablation.part}_high", max(sure, ablation.saved_high), Origin.MEASURED)
    if "sm_share" in derived and "memory_share" in derived:
        busiest = max(derived["sm_share"].value, derived["memory_share"].value)
        add("busiest_share", busiest, counted)
    elif "roof_share" in derived:
        add("busiest_share", derived["roof_share"].value, Origin.MODEL)
    if "busiest_share" in derived:
        add("headroom", max(0.0, 1 - derived["busiest_share"].value), derived["busiest_share"].origin)
    _add_pipes(derived)
    if "shared_share" in derived and derived.get("sm_active_share", _NONE).value > 0:
        # Where some multiprocessors are idle, the others' path is busier than the average says.
        active = min(1.0, derived["shared_share"].value / derived["sm_active_share"].value)
        add("shared_share_active", active, derived["shared_share"].origin)
    _add_sum(derived, "working_share", ("selected_share", "not_selected_share", "math_pipe_throttle_share"))
    if "working_share" in derived:
        working = derived["working_share"]
        derived["latency_share"] = Quantity(max(0.0, 1 - working.value), working.origin)
    _add_sum(derived, "shared_stall_share", ("short_scoreboard_share", "mio_throttle_share"))
    return derived


def with_quantities(profile: Profile) -> Profile:
    """The profile with every known quantity among its metrics, for who reads the file without these rules."""
    return replace(profile, metrics={name: quantity.value for name, quantity in quantities(profile).items()})


def main_launch(profile: Profile) -> Launch | None:
    """The launch that takes longest, of those with the name of the profiled kernel if there are any."""
    named = [launch for launch in profile.launches if launch.kernel == profile.kernel]
    return max(named or profile.launches, key=lambda launch: launch.duration_s, default=None)


def peak_gflops(profile: Profile) -> float:
    """The matrix product's ceiling for the case's dtype; NaN where it was not measured."""
    of_dtype = _peak(profile, f"{profile.dtype}_gflops")
    return of_dtype if math.isfinite(of_dtype) else _peak(profile, "fp32_gflops")


def peak_copy_gbps(profile: Profile) -> float:
    """The rate of a copy in memory; NaN where it was not measured."""
    return _peak(profile, "copy_gbps")


def _peak(profile: Profile, name: str) -> float:
    """A ceiling that is no positive number was not measured."""
    value = profile.peaks.get(name, math.nan)
    return value if math.isfinite(value) and value > 0 else math.nan


def seconds(profile: Profile) -> float:
    """Of the kernel: by the profiler if it measured it, else by the trace, else of the whole call."""
    main = main_launch(profile)
    traced = main.duration_s if main is not None else math.nan
    for value in (profile.metrics.get("time_s", math.nan), traced, profile.latency_ms * 1e-3):
        if math.isfinite(value) and value > 0:
            return value
    return math.nan


def call_seconds(profile: Profile) -> float:
    """Of all the call's kernels, which together do the case's operations; of the kernel where it is the only one."""
    if len(profile.launches) <= 1:
        return seconds(profile)
    return sum(launch.duration_s for launch in profile.launches) or seconds(profile)


def _add_rates(profile: Profile, add_to: Quantities) -> None:
    """Rates against this machine's measured ceilings: the roofline of Williams et al., CACM 52(4), 2009.

    The case's operations and bytes are over the time of all kernels, counted traffic over that of the one counted.
    """
    time = call_seconds(profile)
    peak, copy = peak_gflops(profile), peak_copy_gbps(profile)
    values = {
        "achieved_gflops": profile.flops / time * 1e-9,
        "achieved_gbps": profile.bytes_min / time * 1e-9,
        "peak_gflops": peak,
        "copy_gbps": copy,
        "bytes_min": profile.bytes_min,
    }
    values["compute_share"] = values["achieved_gflops"] / peak
    values["traffic_share"] = values["achieved_gbps"] / copy
    roofs = [values[name] for name in ("compute_share", "traffic_share") if math.isfinite(values[name])]
    # One that is not known may be the higher one, unless the other is close to its ceiling.
    if len(roofs) == 2 or (roofs and roofs[0] > _AT_ROOF):
        values["roof_share"] = max(roofs)
        values["memory_leads"] = float(values["traffic_share"] == max(roofs))
    for name, value in values.items():
        if math.isfinite(value):
            add_to[name] = Quantity(value, Origin.MODEL)
    moved = metrics.derive(profile.metrics).get("dram_bytes", math.nan)
    time = seconds(profile)
    if math.isfinite(moved / time):
        add_to["dram_gbps"] = Quantity(moved / time * 1e-9, Origin.MEASURED)
        if math.isfinite(copy):
            add_to["dram_gbps_share"] = Quantity(moved / time * 1e-9 / copy, Origin.MEASURED)
        if profile.bytes_min > 0:
            add_to["dram_excess"] = Quantity(moved / profile.bytes_min, Origin.MEASURED)


def _add_gaps(profile: Profile, add_to: Quantities) -> None:
    """The share of the call's time in which none of its kernels runs."""
    if not profile.launches:
        return
    add_to["launch_count"] = Quantity(len(profile.launches), Origin.MODEL)
    running, latency = sum(launch.duration_s for launch in profile.launches), profile.latency_ms * 1e-3
    if running > 0 and math.isfinite(latency) and latency > 0:
        add_to["gap_share"] = Quantity(max(0.0, 1 - running / latency), Origin.MODEL)


def _add_static(profile: Profile, add_to: Quantities) -> None:
    if profile.resources is not None:
        spilled = profile.resources.spill_load_bytes + profile.resources.spill_store_bytes
        add_to["spill_bytes"] = Quantity(spilled, Origin.STATIC)
    counts = profile.instructions
    if counts:
        for name, value in counts.items():
            add_to[f"static_{name}"] = Quantity(value, Origin.STATIC)
        loads = sum(counts.get(f"load_{bits}", 0) for bits in (8, 16, 32, 64, 128))
        if loads:
            narrow = sum(counts.get(f"load_{bits}", 0) for bits in (8, 16, 32))
            add_to["static_narrow_load_share"] = Quantity(narrow / loads, Origin.STATIC)
    specialised = profile.metrics.get("wgmma_instructions", 0) > 0 or counts.get("register_moves", 0) > 0
    if specialised or "wgmma_instructions" in profile.metrics or counts:
        add_to["asynchronous"] = Quantity(float(specialised), Origin.MEASURED)
    capability = profile.architecture.removeprefix("sm_").rstrip("af")
    if capability.isdigit():
        add_to["capability"] = Quantity(int(capability), Origin.MEASURED)


def _add_launch(profile: Profile, launch: Launch, add_to: Quantities) -> None:
    """Blocks, waves and the occupancy that fits, from the launch's own shape, where they were not counted."""
    multiprocessors = profile.metrics.get("multiprocessors")
    add_to.setdefault("grid_blocks", Quantity(launch.grid_blocks, Origin.MODEL))
    fill = launch.grid_blocks / multiprocessors if multiprocessors else math.nan
    if math.isfinite(fill):
        add_to.setdefault("grid_fill", Quantity(fill, Origin.MODEL))
    try:
        fits = occupancy(profile.architecture, launch.block_threads, launch.registers, launch.shared_bytes)
        limits(profile.architecture)
    except DeviceError:  # an architecture without a table
        return
    add_to.setdefault("occupancy_limit", Quantity(fits.fraction, Origin.MODEL))
    if multiprocessors and fits.blocks_per_sm:
        waves = launch.grid_blocks / (multiprocessors * fits.blocks_per_sm)
        tail = metrics.derive({"waves": waves}).get("tail_share", 0.0)
        add_to.setdefault("waves", Quantity(waves, Origin.MODEL))
        add_to.setdefault("tail_share", Quantity(tail, Origin.MODEL))
        # Blocks of a first wave go one to a multiprocessor as long as there is one without.
        idle = tail if waves > 1 else max(0.0, 1 - fill)
        add_to.setdefault("sm_idle_share", Quantity(idle, Origin.MODEL))


_AT_ROOF = 0.6
"""From this share of one ceiling on, the other is not what holds a kernel back."""

_NEAR = 0.8
"""Two units of which one works this much of the other's time are equally responsible."""

_PIPES = ("tensor_share", "xu_share", "fma_share", "alu_share", "lsu_share", "shared_share", "dram_share")


_OF_ACTIVE_CYCLES = ("xu_share", "fma_share", "alu_share", "lsu_share", "issue_share")
"""Counted as shares of the cycles in which a multiprocessor has warps; the other units' are of all cycles."""


def elapsed_share(available: Quantities, name: str) -> float:
    """The share of the kernel's time in which a unit works, over all multiprocessors, idle ones too."""
    value = available[name].value
    if name in _OF_ACTIVE_CYCLES and "sm_active_share" in available:
        value *= available["sm_active_share"].value
    return value


def _add_pipes(derived: Quantities) -> None:
    """Which of the units leads, where all of them were counted."""
    if not all(name in derived for name in _PIPES):
        return
    shares = {name: elapsed_share(derived, name) for name in _PIPES}
    ordered = sorted(shares.values(), reverse=True)
    origin = derived["tensor_share"].origin
    derived["tensor_leads"] = Quantity(float(shares["tensor_share"] == ordered[0]), origin)
    derived["memory_leads"] = Quantity(float(shares["dram_share"] == ordered[0]), origin)
    derived["second_pipe_share"] = Quantity(ordered[1], origin)
    derived["xu_leads"] = Quantity(float(shares["xu_share"] == ordered[0]), origin)
    derived["alu_leads"] = Quantity(float(shares["alu_share"] == ordered[0]), origin)
    derived["leading_pipe_share"] = Quantity(ordered[0], origin)
    both = {shares["tensor_share"], shares["xu_share"]} == set(ordered[:2])
    near = min(shares["tensor_share"], shares["xu_share"]) > _NEAR * ordered[0]
    derived["units_take_turns"] = Quantity(float(both and near), origin)
    turns = min(shares["tensor_share"], shares["xu_share"]) if both and near else 0.0
    derived["turns_share"] = Quantity(turns, origin)
    if "l2_share" in derived:
        # What memory moves goes through L2 too, so that near memory's share its own says nothing.
        l2 = derived["l2_share"].value
        derived["l2_leads"] = Quantity(float(l2 > ordered[0] and shares["dram_share"] < _NEAR * l2), origin)
        derived["l2_next_share"] = Quantity(ordered[0], origin)


def _add_sum(derived: Quantities, name: str, parts: tuple[str, ...]) -> None:
    terms = [derived[part] for part in parts if part in derived]
    if len(terms) == len(parts):
        derived[name] = Quantity(sum(part.value for part in terms), min(part.origin for part in terms))
