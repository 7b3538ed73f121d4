"""The processor, its cores and what else runs on them, memory, disk."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from cudadent42.model.records import Status
from cudadent42.preflight.definitions import Context, Definition, Finding, Problem
from flashmoe_science.jit.host import amx_is_granted

GIB = 1 << 30
MIN_MEMORY = 1 * GIB
GOOD_MEMORY = 4 * GIB
MIN_DISK = 100 * 10**6
GOOD_DISK = 1 * GIB
MAX_LOAD_SHARE = 0.5

# What kernels are chosen by, in the words of /proc/cpuinfo.
_X86_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "amx_fp16"),
)
_ARM_FEATURES = ("asimd", "asimdhp", "bf16", "sve", "sve2")


def cpu_model() -> str:
    """``AMD EPYC 9B45``: the processor's name without the vendor's ornaments."""
    fields = _cpuinfo()
    name = fields.get("model name") or platform.processor() or platform.machine()
    for ornament in ("(R)", "(TM)", "(r)", "(tm)", " Processor", " CPU"):
        name = name.replace(ornament, "")
    return " ".join(name.split("@")[0].split())


def cpu_features() -> tuple[str, ...]:
    """What of the processor kernels are chosen by, as far as the operating system lets this process use it."""
    fields = _cpuinfo()
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    if not amx_is_granted():  # as in some containers: then neither our kernels nor PyTorch's can take it
        present -= {"amx_bf16", "amx_fp16"}
    return tuple(name for name in (*_X86_FEATURES, *_ARM_FEATURES) if name in present)


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    fields: dict[str, str] = {}
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_cores() -> float:
    """Cores that this process may use: its affinity, cut by the container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _read(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def available_memory() -> int:
    """Bytes that a new process can use, within the container's limit; 0 where unknown."""
    available = 0
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    used = _read(Path("/sys/fs/cgroup/memory.current")).strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _cpu(context: Context) -> Finding:
    features = cpu_features()
    governor = _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")).strip()
    facts = {
        "cpu_model": cpu_model(),
        "cpu_features": " ".join(features),
        "cpu_governor": governor or None,
        "cpu_count": os.cpu_count(),
    }
    detail = f"{cpu_model()}, {' '.join(features) or 'no vector features known'}"
    problem = None
    if platform.machine() in ("x86_64", "AMD64") and not {"avx2", "fma"} <= set(features):
        problem = "no-avx2"
    elif governor == "powersave":
        problem = "powersave"
    return Finding(detail, problem, facts=facts)


def _cores(context: Context) -> Finding:
    cores = usable_cores()
    load = os.getloadavg()[0]
    detail = f"{cores:g} usable, load {load:.1f}"
    busy = load > MAX_LOAD_SHARE * cores
    return Finding(detail, "busy" if busy else None, facts={"cores": cores, "load_1min": load})


def _memory(context: Context) -> Finding:
    available = available_memory()
    problem = "little" if available < MIN_MEMORY else "low" if available < GOOD_MEMORY else None
    return Finding(
        f"{available / GIB:.1f} GiB available",
        problem,
        {"available": f"{available / GIB:.1f}"},
        {"memory_available_bytes": available},
    )


def _disk(context: Context) -> Finding:
    folder = context.output.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    problem = "full" if free < MIN_DISK else "low" if free < GOOD_DISK else None
    if not os.access(folder, os.W_OK | os.X_OK):
        problem = "read-only"
    return Finding(
        f"{free / GIB:.1f} GiB free at {folder}", problem, {"folder": folder}, {"disk_free_bytes": free}
    )


DEFINITIONS = (
    Definition(
        "cpu",
        "kernels are chosen by its features",
        _cpu,
        (
            Problem(
                "no-avx2",
                Status.WARN,
                "no AVX2 and FMA: the portable kernel is used, which is several times slower",
                "run on a processor of 2013 or later",
            ),
            Problem(
                "powersave",
                Status.WARN,
                "the clocks are governed for low power, so timings are slow and spread",
                "sudo cpupower frequency-set -g performance",
            ),
        ),
    ),
    Definition(
        "cores",
        "timing wants idle ones",
        _cores,
        (
            Problem(
                "busy",
                Status.WARN,
                "other work keeps the cores busy, so timings will be spread",
                "top -b -n 1 -o %CPU | head -n 15",
            ),
        ),
    ),
    Definition(
        "memory",
        "inputs and the float64 reference",
        _memory,
        (
            Problem(
                "little",
                Status.FAIL,
                "{available} GiB of memory is not enough; 1 GiB is needed",
                "ps -eo rss,pid,comm --sort=-rss | head -n 10",
            ),
            Problem(
                "low",
                Status.WARN,
                "large cases may not fit in {available} GiB",
                "ps -eo rss,pid,comm --sort=-rss | head -n 10",
            ),
        ),
    ),
    Definition(
        "disk",
        "the run folder",
        _disk,
        (
            Problem(
                "full", Status.FAIL, "less than 100 MB is free where the run is written", "df -h {folder}"
            ),
            Problem("low", Status.WARN, "less than 1 GiB is free where the run is written", "df -h {folder}"),
            Problem(
                "read-only",
                Status.FAIL,
                "{folder} cannot be written, and the run folder goes there",
                "cudadent42 run --output-dir ~/cudadent42-run",
            ),
        ),
    ),
)
