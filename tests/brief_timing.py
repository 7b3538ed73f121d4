"""What the lab does for its clocks alone, cut short: tests look at what is made of samples, and at no speed.

A worker works for a second before it times its first case. A run on a CPU works for half a second on every processor to
see whether they are to be had, and for as long to see what they reach. Hundreds of tests have one or the other. What
is profiled is repeated for a second while it is counted. A process that is not forked from a warm interpreter
(`warm_python`) takes its time.
"""

from __future__ import annotations

from collections.abc import Callable


def be_brief(put: Callable[[object, str, object], None] = setattr) -> None:
    """From here on this process is, and what it forks."""
    from cudadent42.stages.bench import measurement
    from cudadent42.stages.profile import perf
    from cudadent42.timing import contention, cpu_peaks

    put(measurement, "START_WARM_UP_S", 0.01)
    put(measurement, "AGAIN_WARM_UP_S", 0.01)
    put(contention, "PROBE_S", 0.05)
    put(perf, "REPEAT_S", 0.05)
    put(cpu_peaks, "_PEAK_SECONDS", 0.005)
    put(cpu_peaks, "_COPY_BYTES", 8 << 20)
