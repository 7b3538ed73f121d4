"""No new privileges, and none of the old: prctl(2), capset(2), capabilities(7)."""

from __future__ import annotations

import struct
from contextlib import suppress

from cudadent42.sandbox.syscalls import number, prctl, system_call

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_POSSIBLE = 63
_SIGKILL = 9


def renounce() -> None:
    """No program that is executed from here on has more rights than this process (set-user-id bits mean nothing)."""
    prctl("prctl(PR_SET_NO_NEW_PRIVS)", _PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """All of them, for good: those in effect, and those that a program of root's would get back."""
    for capability in range(_LAST_POSSIBLE + 1):
        with suppress(
            OSError
        ):  # beyond the last that this kernel has, or not ours to drop: then we have none of it
            if prctl("prctl(PR_CAPBSET_READ)", _PR_CAPBSET_READ, capability):
                prctl("prctl(PR_CAPBSET_DROP)", _PR_CAPBSET_DROP, capability)
    with suppress(OSError):  # before Linux 4.3 there are none
        prctl("prctl(PR_CAP_AMBIENT)", _PR_CAP_AMBIENT, _CLEAR_ALL)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    system_call("capset", number("capset"), header, bytes(24))


def end_with_parent() -> None:
    """Killed when the parent dies. A change of credentials undoes it, so it comes after those."""
    prctl("prctl(PR_SET_PDEATHSIG)", _PR_SET_PDEATHSIG, _SIGKILL)


def hide_memory(hidden: bool) -> None:
    """Whether other processes of this user may look into this one's memory and environment."""
    prctl("prctl(PR_SET_DUMPABLE)", _PR_SET_DUMPABLE, 0 if hidden else 1)
