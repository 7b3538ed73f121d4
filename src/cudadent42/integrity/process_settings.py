"""Settings of the process by which one implementation can slow another: environment, signals, timers, priority, and how
the processor rounds. Of threads, the main one's, in which all calls are made."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython, below `signal`
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

_SIGNALS = tuple(sorted(set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}))

_BY_TORCH = frozenset({b"TORCHINDUCTOR_CACHE_DIR", b"TRITON_CACHE_DIR"})
"""Variables that PyTorch sets by itself, when its compiler is imported."""

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

_TOOLS = 6
"""Of ``sys.monitoring``."""

_UNTIL_HANDLED_S = 0.01

_ONE, _LITTLE, _LEAST = 1.0, 2.0**-60, 5e-324
"""Not written where they are used: Python would compute with them when it compiles."""


def _environment() -> dict[bytes, bytes]:
    # Its own dictionary: to decode each variable takes twenty times as long, in every block.
    variables: dict[bytes, bytes] = dict(os.environ._data)  # type: ignore[attr-defined]
    for name in _BY_TORCH:
        variables.pop(name, None)
    return variables


def _set_environment(wanted: Mapping[bytes, bytes]) -> None:
    for name in os.environb.keys() - wanted.keys() - _BY_TORCH:
        del os.environb[name]
    for name, value in wanted.items():
        if os.environb.get(name) != value:
            os.environb[name] = value


def _handlers() -> tuple[Any, ...]:
    # As the system's numbers: to make names of them takes most of the time, in every block.
    return tuple(map(_signal.getsignal, _SIGNALS))


def _set_handlers(wanted: Sequence[Any]) -> None:
    for number, handler in zip(_SIGNALS, wanted, strict=True):
        if handler is not None and _signal.getsignal(number) is not handler:  # None: not one of Python's
            signal.signal(number, handler)


def _timers() -> tuple[tuple[float, bool], ...]:
    """Of each, its period, and whether it runs."""
    return tuple((period, left > 0.0) for left, period in map(signal.getitimer, _TIMERS))


def _set_timers(wanted: tuple[tuple[float, bool], ...]) -> None:
    """Those that were to go off once do not begin again. Handlers are written next: a signal without one ends the
    process."""
    for timer, (period, runs), now in zip(_TIMERS, wanted, _timers(), strict=True):
        if (period, runs) != now:
            signal.setitimer(timer, max(period, _UNTIL_HANDLED_S) if period else 0.0, period)


def _processors() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def _priority() -> tuple[int, int]:
    """Niceness and class."""
    return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


def _set_priority(wanted: tuple[int, int]) -> None:
    with suppress(PermissionError):  # who has given it up may not have the right to take it back
        if os.sched_getscheduler(0) != wanted[1]:
            os.sched_setscheduler(0, wanted[1], os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, wanted[0])


def _arithmetic() -> tuple[bool, ...]:
    """Whether it rounds up, down or towards zero, and keeps the least numbers: to nearest, none but the last."""
    up, down = _ONE + _LITTLE > _ONE, -_ONE - _LITTLE < -_ONE
    return up, down, _ONE - _LITTLE < _ONE, _LEAST * _ONE > 0.0


def _set_arithmetic(wanted: tuple[bool, ...]) -> None:
    """To nearest, whatever was chosen; the least numbers as they were."""
    import torch

    ctypes.CDLL(None).fesetround(0)  # FE_TONEAREST
    torch.set_flush_denormal(not wanted[-1])


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_THP, _SPECULATION = (42, 41), (52, 53)
"""Options of prctl(2) to read and to write: huge pages, and what a processor may do ahead of time."""
_MAY_SPECULATE = 2


def _of_memory_and_speculation() -> tuple[int, ...]:
    """Whether huge pages are refused, and how the bypass of stores and indirect branches are speculated on."""
    if _prctl is None:
        return ()
    return _prctl(_THP[0], 0, 0, 0, 0), *(_prctl(_SPECULATION[0], which, 0, 0, 0) for which in range(2))


def _set_memory_and_speculation(wanted: tuple[int, ...]) -> None:
    if _prctl is None:
        return
    _prctl(_THP[1], wanted[0], 0, 0, 0)
    for which, now, before in zip(range(2), _of_memory_and_speculation()[1:], wanted[1:], strict=True):
        if now != before and before & _MAY_SPECULATE:
            _prctl(_SPECULATION[1], which, _MAY_SPECULATE, 0, 0)


def _monitors() -> tuple[Any, ...]:
    """By tool of ``sys.monitoring`` (Python 3.12), its name and events."""
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        return ()
    names = map(monitoring.get_tool, range(_TOOLS))
    return tuple((name, monitoring.get_events(tool) if name else 0) for tool, name in enumerate(names))


def _set_monitors(wanted: tuple[Any, ...]) -> None:
    monitoring = getattr(sys, "monitoring", None)
    for tool, (now, before) in enumerate(zip(_monitors(), wanted, strict=True)):
        if now != before and now[0] and monitoring is not None:
            monitoring.set_events(tool, before[1])


def _set_collections(wanted: tuple[Any, ...]) -> None:
    gc.callbacks[:] = wanted


KNOBS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("os.environ", _environment, _set_environment),
    ("signal.setitimer", _timers, _set_timers),
    ("handlers of signals", _handlers, _set_handlers),
    ("rounding of the processor", _arithmetic, _set_arithmetic),
    ("huge pages or speculation (prctl)", _of_memory_and_speculation, _set_memory_and_speculation),
    ("gc.callbacks", lambda: tuple(gc.callbacks), _set_collections),
    ("sys.monitoring", _monitors, _set_monitors),
    *(
        (
            (
                "os.sched_setaffinity",
                lambda: frozenset(os.sched_getaffinity(0)),
                lambda value: os.sched_setaffinity(0, value),
            ),
            ("os.setpriority", _priority, _set_priority),
        )
        if hasattr(os, "sched_getaffinity")
        else ()
    ),
)
"""Name, how it is read, how it is written."""
