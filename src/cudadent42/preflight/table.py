"""All checks, in the order in which they are shown."""

from __future__ import annotations

from cudadent42.preflight import confinement, gpu, host, network, profiler, python, toolchain

DEFINITIONS = (
    *python.DEFINITIONS,
    *network.DEFINITIONS,
    *host.DEFINITIONS,
    *confinement.DEFINITIONS,
    *toolchain.DEFINITIONS,
    *gpu.DEFINITIONS,
    *profiler.DEFINITIONS,
)
