"""What goes on below Python, each in a process of its own: it cannot be undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")

PROGRAM = """
import ctypes, mmap
from cudadent42.integrity.underneath import Underneath, timers
libc = ctypes.CDLL(None)
underneath = Underneath()
blocks = [bytes(50_000) for _ in range(100)]
del blocks
print(underneath.changed() + underneath.code_changed())
{change}
print(underneath.changed() + underneath.code_changed())
"""

TIMER = """
event = (ctypes.c_int * 16)()
event[2] = 23  # SIGURG
libc.timer_create(1, event, ctypes.byref(ctypes.c_void_p()))
"""

ALLOCATOR = """
libc.mallopt(-3, 256)
libc.mallopt(-1, 0)
"""

CODE = """
address = ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value
page = address // mmap.PAGESIZE * mmap.PAGESIZE
libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), 7)
byte = ctypes.c_ubyte.from_address(address)
byte.value = byte.value
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [("", ""), (TIMER, "1 timer(s)"), (ALLOCATOR, "pages of their own"), (CODE, "libc")],
    ids=["nothing", "a timer", "the allocator", "machine code"],
)
def test_a_change_is_told(change: str, words: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(change=change)]
    before, behind = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert before == ""
    assert words in behind
    assert bool(words) == bool(behind)
