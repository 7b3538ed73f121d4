"""What the lab does for its clocks alone, cut short: tests look at what is made of samples, and at no speed.

A worker works for a second before it times its first case, and a run on a CPU for half a second on every processor, to
see whether they are to be had. Hundreds of tests have one or the other. A process that is not forked from a warm
interpreter (`warm_python`) takes its time.
"""

from __future__ import annotations

WARM_UP_S = 0.01
PROBE_S = 0.05


def be_brief() -> None:
    """From here on this process is, and what it forks."""
    from cudadent42.stages.bench import measurement
    from cudadent42.timing import contention

    measurement.START_WARM_UP_S = WARM_UP_S
    contention.PROBE_S = PROBE_S
