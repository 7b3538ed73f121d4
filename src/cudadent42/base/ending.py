"""How a process ends that stands for another one."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def end_as(status: int) -> NoReturn:
    """As that one did, by the same signal or with the same exit code. ``status``: of `os.waitpid`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
