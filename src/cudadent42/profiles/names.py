"""What the metrics of a profile are called, so that a name that was misspelt is found before anything is measured."""

from __future__ import annotations

from cudadent42.profiles.metrics import COUNTERS, STALLS

_DERIVED = (
    *("bank_conflicts", "local_instructions", "local_share", "local_cost_share", "dram_bytes", "tail_share"),
    *("sm_balance", "imbalance_share", "sm_active_share", "sm_idle_share", "clock_loss", "idle_lane_share"),
    *("clusters", "cluster_waves", "cluster_tail_share", "grid_fill"),
    *(f"{name}_share" for name in STALLS),
)
"""Of counters; see `metrics.derive`."""

_MODELLED = (
    *("achieved_gflops", "achieved_gbps", "peak_gflops", "copy_gbps", "bytes_min", "compute_share"),
    *("traffic_share", "roof_share", "memory_leads", "dram_gbps", "dram_gbps_share", "dram_excess"),
    *(
        "launch_count",
        "gap_share",
        "asynchronous",
        "capability",
        "on_cpu",
        "can_leave_parts_out",
        "busiest_share",
        "headroom",
    ),
    *("tensor_leads", "alu_leads", "l2_leads", "l2_next_share", "second_pipe_share", "xu_leads"),
    *("leading_pipe_share", "units_take_turns", "turns_share"),
    *("working_share", "latency_share", "shared_stall_share", "spill_bytes", "shared_share_active"),
)
"""Of times, shapes, ceilings and the compiled code; see `quantities`."""

_OF_CPUS = (
    *("cpu_instructions", "cpu_instructions_per_cycle", "cpu_cycles", "cpu_miss_bytes"),
    "cpu_miss_bytes_share",
)
_FAMILIES = ("static_", "ablation_")
"""Kinds of instructions, and parts of a kernel, each a metric of its own."""

METRICS = frozenset((*COUNTERS, *_DERIVED, *_MODELLED, *_OF_CPUS))


def is_known(name: str) -> bool:
    """Whether a profile can have a metric of this name."""
    return name in METRICS or name.startswith(_FAMILIES)
