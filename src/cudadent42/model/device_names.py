"""How a device is named on the command line: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. Imports no torch."""

from __future__ import annotations

import re

from cudadent42.base.errors import UsageError

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def parse_device(text: str) -> str:
    """``text`` if it names a device; raises UsageError otherwise."""
    if not _DEVICE.fullmatch(text):
        raise UsageError(f"--device {text!r}: expected auto, cpu, cuda or cuda:N")
    return text
