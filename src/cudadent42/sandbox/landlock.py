"""Landlock: what the process may read, write and connect to, by path; landlock(7). Linux 5.13 and later, without any
privilege, in containers too."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from cudadent42.sandbox.syscalls import (
    LANDLOCK_ADD_RULE,
    LANDLOCK_CREATE_RULESET,
    LANDLOCK_RESTRICT_SELF,
    system_call,
)

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
"""Those that a rule about a file, and no folder, may have."""
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_USE_DEVICE = _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
_FIRST_ABI = (1 << 13) - 1
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_UNIX, _SCOPE_SIGNAL = 1, 2

FILES_ABI, TCP_ABI, SIGNAL_ABI = 3, 4, 6
"""The first versions that hold truncating files, TCP, and signals."""


@dataclass(frozen=True)
class Rules:
    """Paths, with all below them."""

    readable: Iterable[str]
    writable: Iterable[str]
    devices: Iterable[str]


def abi() -> int:
    """Landlock's version of this kernel. Raises OSError where there is none."""
    return system_call("landlock_create_ruleset", LANDLOCK_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)


def restrict(rules: Rules) -> int:
    """Confines this process and all that it starts. Returns Landlock's version. Raises OSError.

    `privileges.renounce` comes before it.
    """
    version = abi()
    handled = _FIRST_ABI
    handled |= _REFER if version >= 2 else 0
    handled |= _TRUNCATE if version >= 3 else 0
    handled |= _IOCTL_DEV if version >= 5 else 0
    attributes = struct.pack("Q", handled)
    if version >= TCP_ABI:
        attributes += struct.pack("Q", _BIND_TCP | _CONNECT_TCP)
    if version >= SIGNAL_ABI:
        attributes += struct.pack("Q", _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL)
    ruleset = system_call("landlock_create_ruleset", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for paths, rights in (
            (rules.readable, _READ),
            (rules.writable, handled),
            (rules.devices, _USE_DEVICE),
        ):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        system_call("landlock_restrict_self", LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # what is not there needs no right
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        system_call("landlock_add_rule", LANDLOCK_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
