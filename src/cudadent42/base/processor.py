"""What the CPU is called."""

from __future__ import annotations

import functools
import platform


@functools.cache
def cpu_name() -> str:
    """The CPU's model, from /proc/cpuinfo; the machine's architecture where that does not say."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.machine()
