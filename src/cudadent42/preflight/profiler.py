"""Nsight Compute, and whether it may read the GPU's performance counters."""

from __future__ import annotations

from cudadent42.model.records import Status
from cudadent42.preflight import ncu_install
from cudadent42.preflight.definitions import Context, Definition, Fact, Finding, Problem
from cudadent42.preflight.ncu_install import Permission


def _counters(context: Context) -> Finding:
    if not context.wants_gpu or not context.gpu.usable:
        return Finding("not needed on a CPU" if not context.wants_gpu else "needs the driver", skipped=True)
    path = ncu_install.find()
    if path is None:
        return Finding("no Nsight Compute", "no-ncu")
    tool = ncu_install.tool(path)
    facts: dict[str, Fact] = {"ncu": tool.version_text}
    detail = f"Nsight Compute {tool.version_text} at {path}"
    if tool.version and tool.version[:2] < ncu_install.MIN_VERSION:
        return Finding(detail, "old", {"version": tool.version_text}, facts)
    if not tool.version:
        return Finding(detail, "silent", {"path": path}, facts)
    permission = ncu_install.permission()
    facts["counters"] = permission.value
    detail = f"{detail}, counters {permission.value}"
    if permission is Permission.CLOSED:
        return Finding(detail, "closed-container" if ncu_install.in_container() else "closed", {}, facts)
    return Finding(detail, "unknown" if permission is Permission.UNKNOWN else None, {}, facts)


DEFINITIONS = (
    Definition(
        "counters",
        "profiles say why a kernel is as fast as it is",
        _counters,
        (
            Problem(
                "no-ncu",
                Status.WARN,
                "Nsight Compute is not installed, so that profiles rest on models instead of counters",
                "sudo apt-get install cuda-nsight-compute-13-0",
            ),
            Problem(
                "old",
                Status.WARN,
                "Nsight Compute {version} is older than 2023.1 and lacks some of the metrics",
                "sudo apt-get install cuda-nsight-compute-13-0",
            ),
            Problem(
                "closed",
                Status.WARN,
                "the driver opens the performance counters to administrators only (ERR_NVGPUCTRPERM)",
                ncu_install.ADMIN_REMEDY,
            ),
            Problem(
                "closed-container",
                Status.WARN,
                "this container may not read the performance counters (ERR_NVGPUCTRPERM)",
                ncu_install.CONTAINER_REMEDY,
            ),
            Problem(
                "unknown",
                Status.WARN,
                "the driver does not say whether this user may read the performance counters "
                "(no RmProfilingAdminOnly in /proc/driver/nvidia/params); only a profile will show it",
                "profile a case with cudadent42 profile: its notes say whether they could be read",
            ),
            Problem(
                "silent",
                Status.WARN,
                "{path} does not say its version, so it may not run at all",
                "sudo apt-get install --reinstall cuda-nsight-compute-13-0",
            ),
        ),
    ),
)
