"""A clock of a test's own for the processes that time, which find this module on ``PYTHONPATH``.

Each call of PyTorch's attention takes a millisecond of it, and 0 to 4 µs more by turns; nothing else takes any time.
The processors are always there.
"""

import itertools
import sys

if {"cudadent42.worker.child", "cudadent42.stages.profile.target"} & set(sys.orig_argv):
    from torch.nn import functional

    import cudadent42.timing.contention
    import cudadent42.timing.processor_time
    import cudadent42.timing.timers

    now_ns = 0
    more_ns = itertools.cycle(range(0, 5000, 1000))
    attention = functional.scaled_dot_product_attention

    def timed_attention(*arguments, **options):
        global now_ns
        now_ns += 1_000_000 + next(more_ns)
        functional.scaled_dot_product_attention = (
            attention  # by which masks of PyTorch's know what they are given to
        )
        try:
            return attention(*arguments, **options)
        finally:
            functional.scaled_dot_product_attention = timed_attention

    def clock_ns(*_):
        return now_ns

    functional.scaled_dot_product_attention = timed_attention
    # Before other modules take these by name.
    cudadent42.timing.contention.waited_s = lambda: 0.0
    cudadent42.timing.processor_time.idle_share = lambda work, waited_s: 0.0
    cudadent42.timing.processor_time.ProcessorClock.__call__ = clock_ns
    timer = cudadent42.timing.timers.ClockTimer.__init__
    timer.__defaults__ = (clock_ns, *timer.__defaults__[1:])

    import cudadent42.stages.bench.conditions

    cudadent42.stages.bench.conditions._steal_s = lambda: 0.0
