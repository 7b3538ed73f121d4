"""The counters that a profile reads: our short names, Nsight Compute's names, and one unit for each.

A metric is a fraction (0 to 1), seconds, bytes, hertz or a plain count, whatever unit the tool printed. One that is
missing or not a number is reported as such, never as zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle"),
    *("long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction"),
    *("not_selected", "selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
"""Why a warp did not issue, by Nsight Compute's names. ``selected`` is the cycle in which it did."""

_ELAPSED = "avg.pct_of_peak_sustained_elapsed"
_ACTIVE = "avg.pct_of_peak_sustained_active"
_L1_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
_L1_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared"

COUNTERS: dict[str, tuple[str, ...]] = {
    "time_s": ("gpu__time_duration.sum",),
    "max_clock_khz": ("device__attribute_max_gpu_frequency_khz", "device__attribute_clock_rate"),
    "clock_hz": ("smsp__cycles_elapsed.avg.per_second",),
    "sm_share": (f"sm__throughput.{_ELAPSED}",),
    "memory_share": (f"gpu__compute_memory_throughput.{_ELAPSED}",),
    "waves": ("launch__waves_per_multiprocessor",),
    "grid_blocks": ("launch__grid_size",),
    "block_threads": ("launch__block_size",),
    "registers": ("launch__registers_per_thread",),
    "shared_bytes": ("launch__shared_mem_per_block_allocated", "launch__shared_mem_per_block"),
    "multiprocessors": ("launch__sm_count", "device__attribute_multiprocessor_count"),
    "cluster_blocks": ("launch__cluster_size",),
    "clusters_fit": ("launch__cluster_max_active",),
    "fit_registers": ("launch__occupancy_limit_registers",),
    "fit_shared": ("launch__occupancy_limit_shared_mem",),
    "fit_warps": ("launch__occupancy_limit_warps",),
    "fit_blocks": ("launch__occupancy_limit_blocks",),
    "fit_barriers": ("launch__occupancy_limit_barriers",),
    "occupancy": (f"sm__warps_active.{_ACTIVE}",),
    "occupancy_limit": ("sm__maximum_warps_per_active_cycle_pct",),
    "tensor_share": (f"sm__pipe_tensor_cycles_active.{_ELAPSED}",),
    "tensor_share_active": (f"sm__pipe_tensor_cycles_active.{_ACTIVE}",),
    "tensor_instructions": ("sm__inst_executed_pipe_tensor.sum",),
    "wgmma_instructions": ("sm__inst_executed_pipe_tensor_op_gmma.sum",),
    "xu_share": (f"sm__inst_executed_pipe_xu.{_ACTIVE}",),
    "fma_share": (f"sm__inst_executed_pipe_fma.{_ACTIVE}",),
    "alu_share": (f"sm__inst_executed_pipe_alu.{_ACTIVE}",),
    "lsu_share": (f"sm__inst_executed_pipe_lsu.{_ACTIVE}",),
    "issue_share": ("smsp__issue_active.avg.per_cycle_active",),
    "eligible_warps": ("smsp__warps_eligible.avg.per_cycle_active",),
    "warp_latency": ("smsp__average_warp_latency_per_inst_issued.ratio",),
    "threads_per_instruction": ("smsp__thread_inst_executed_per_inst_executed.ratio",),
    "instructions": ("smsp__inst_executed.sum",),
    "local_loads": ("smsp__inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_ld.sum"),
    "local_stores": ("smsp__inst_executed_op_local_st.sum", "smsp__sass_inst_executed_op_local_st.sum"),
    "shared_conflicts": (f"{_L1_CONFLICTS}.sum",),
    "shared_wavefronts": (f"{_L1_WAVEFRONTS}.sum",),
    "shared_share": (f"{_L1_WAVEFRONTS}.{_ELAPSED}",),
    "l1_share": (f"l1tex__throughput.{_ACTIVE}",),
    "l2_share": (f"lts__throughput.{_ELAPSED}",),
    "l2_hit": ("lts__t_sector_hit_rate.pct",),
    "dram_share": (f"dram__throughput.{_ELAPSED}", f"gpu__dram_throughput.{_ELAPSED}"),
    "dram_read_bytes": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write_bytes": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "load_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",),
    "load_sectors": ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",),
    "load_bytes_used": ("smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct",),
    "store_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",),
    "store_sectors": ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",),
    "sm_cycles_avg": ("sm__cycles_active.avg",),
    "sm_cycles_max": ("sm__cycles_active.max",),
    "sm_cycles_min": ("sm__cycles_active.min",),
    "sm_cycles_elapsed": ("sm__cycles_elapsed.max",),
    **{
        f"stall_{name}": (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio",)
        for name in STALLS
    },
}
"""Short name to Nsight Compute's, the first that a report has; in a few passes of the kernel."""

_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SCALED = re.compile(r"(?P<prefix>[numkKMGT]?)(?P<unit>s|second|byte|hz|Hz|hertz)(?P<per>/.*)?")


@dataclass(frozen=True)
class RawMetric:
    """One metric as the tool gave it."""

    value: float
    """NaN where it gave none, or no number."""
    unit: str = ""


@dataclass(frozen=True)
class Counters:
    """What one launch of a kernel was measured to do."""

    kernel: str
    """Name of the function, as the tool shortens it."""
    values: dict[str, float]
    """By short name, see ``COUNTERS``."""
    missing: dict[str, str]
    """Short names without a value, with the reason."""


def base_value(raw: RawMetric) -> float:
    """In fractions, seconds, bytes, hertz or counts."""
    if raw.unit == "%":
        return raw.value / 100
    scaled = _SCALED.fullmatch(raw.unit)
    return raw.value * _PREFIXES[scaled["prefix"]] if scaled else raw.value


SECTOR_BYTES = 32
"""What L1 asks L2 for at a time."""


def read_counters(kernel: str, raw: Mapping[str, RawMetric]) -> Counters:
    """The metrics of ``COUNTERS`` that a report has, and why the others are missing."""
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, sources in COUNTERS.items():
        metric = next((source for source in sources if source in raw), None)
        if metric is None:
            missing[name] = f"the report has no {sources[0]}"
        elif not math.isfinite(raw[metric].value):
            missing[name] = f"{metric} is not a number"
        else:
            values[name] = base_value(raw[metric])
    return Counters(kernel, values, missing)


def light_set() -> tuple[str, ...]:
    """Names to ask Nsight Compute for: every alternative, as it leaves out what a chip does not have."""
    return tuple(name for sources in COUNTERS.values() for name in sources)


def derive(values: Mapping[str, float]) -> dict[str, float]:
    """Ratios that the rules speak of, where their parts are known."""
    derived: dict[str, float] = {}

    def ratio(name: str, part: float | None, whole: float | None) -> None:
        if part is not None and whole is not None and whole > 0:
            derived[name] = part / whole

    get = values.get
    ratio("bank_conflicts", get("shared_conflicts"), get("shared_wavefronts"))
    if "shared_conflicts" in values and get("shared_wavefronts") == 0:
        derived["bank_conflicts"] = 0.0
    if "local_loads" in values and "local_stores" in values:
        derived["local_instructions"] = values["local_loads"] + values["local_stores"]
        ratio("local_share", derived["local_instructions"], get("instructions"))
    if "dram_read_bytes" in values and "dram_write_bytes" in values:
        derived["dram_bytes"] = values["dram_read_bytes"] + values["dram_write_bytes"]
    if "load_requests" in values and "load_sectors" in values:
        fetched = values["load_requests"] * values["load_sectors"] * SECTOR_BYTES
        ratio("load_read_share", fetched, get("dram_read_bytes"))
    waves = get("waves")
    if waves is not None and waves > 0:
        # What is launched at once has no last wave, however little it fills.
        derived["tail_share"] = 1 - waves / math.ceil(waves) if waves > 1 else 0.0
    ratio("sm_balance", get("sm_cycles_avg"), get("sm_cycles_max"))
    if "sm_balance" in derived:
        derived["imbalance_share"] = 1 - derived["sm_balance"]
    ratio("sm_active_share", get("sm_cycles_avg"), get("sm_cycles_elapsed"))
    if "sm_active_share" in derived:
        derived["sm_idle_share"] = 1 - derived["sm_active_share"]
    if get("max_clock_khz", 0.0) and "clock_hz" in values:
        derived["clock_loss"] = 1 - values["clock_hz"] / (values["max_clock_khz"] * 1e3)
    if "threads_per_instruction" in values:
        derived["idle_lane_share"] = 1 - values["threads_per_instruction"] / 32
    if get("cluster_blocks", 0.0) > 1 and get("clusters_fit", 0.0) and "grid_blocks" in values:
        derived["clusters"] = values["grid_blocks"] / values["cluster_blocks"]
        cluster_waves = derived["clusters"] / values["clusters_fit"]
        derived["cluster_waves"] = cluster_waves
        derived["cluster_tail_share"] = 1 - cluster_waves / math.ceil(cluster_waves)
    ratio("grid_fill", get("grid_blocks"), get("multiprocessors"))
    for name in STALLS:
        ratio(f"{name}_share", get(f"stall_{name}"), get("warp_latency"))
    _add_spill_bound(values, derived)
    return derived


def _add_spill_bound(values: Mapping[str, float], derived: dict[str, float]) -> None:
    """What spills may cost: their instructions, and of what is left the waiting for memory that is for them."""
    waits = ("lg_throttle_share", "long_scoreboard_share")
    if "local_share" not in derived or any(name not in derived for name in waits):
        return
    others = values.get("load_requests", 0.0) + values.get("store_requests", 0.0)
    requests = derived["local_instructions"] + others
    waiting = sum(derived[name] for name in waits) * (
        derived["local_instructions"] / requests if requests else 0
    )
    derived["local_cost_share"] = 1 - (1 - derived["local_share"]) * (1 - min(1.0, waiting))
