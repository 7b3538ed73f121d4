"""System calls that Python has no function for, by ctypes. A failure raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
import platform

_libc = ctypes.CDLL(None, use_errno=True)

NUMBERS = {
    "x86_64": {"pivot_root": 155, "seccomp": 317, "capset": 126},
    "aarch64": {"pivot_root": 41, "seccomp": 277, "capset": 91},
}
"""Of calls that differ between processors; those since Linux 5.2 have one number everywhere."""

MOUNT_SETATTR = 442
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446

Argument = int | bytes | ctypes.Array[ctypes.c_char] | None


def number(name: str) -> int:
    """Raises OSError on a processor whose numbers are not listed."""
    numbers = NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(0, f"the system calls of {platform.machine()} are not listed")
    return numbers[name]


def system_call(name: str, call: int, *arguments: Argument) -> int:
    """A call by its number; pointers are bytes, buffers or None."""
    ctypes.set_errno(0)
    result: int = _libc.syscall(ctypes.c_long(call), *map(_as_c, arguments))
    return _checked(name, result)


def function(name: str, *arguments: Argument) -> int:
    """One of the C library's functions that return -1 and set ``errno``."""
    ctypes.set_errno(0)
    result: int = getattr(_libc, name)(*map(_as_c, arguments))
    return _checked(name, result)


def prctl(name: str, option: int, *arguments: int) -> int:
    padded = (*arguments, 0, 0, 0, 0)[:4]
    ctypes.set_errno(0)
    result: int = _libc.prctl(ctypes.c_int(option), *(ctypes.c_ulong(each) for each in padded))
    return _checked(name, result)


def _as_c(argument: Argument) -> object:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _checked(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def why(error: OSError) -> str:
    """What the system said, for a report."""
    return error.strerror or str(error)
