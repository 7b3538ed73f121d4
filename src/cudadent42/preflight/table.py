"""All checks, in the order in which they are shown."""

from __future__ import annotations

from cudadent42.preflight import gpu, host, network, python, toolchain

DEFINITIONS = (
    *python.DEFINITIONS,
    *network.DEFINITIONS,
    *host.DEFINITIONS,
    *toolchain.DEFINITIONS,
    *gpu.DEFINITIONS,
)
