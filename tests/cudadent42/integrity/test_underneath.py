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


IN_ANOTHER_HEAP = """
import ctypes, threading
from cudadent42.integrity import underneath
library, asked, told = ctypes.CDLL(None), [], []
class Counted:
    def __call__(self):
        asked.append(True)
        library.mallinfo2.restype = self.restype
        return library.mallinfo2()
class Library:
    malloc, free, sbrk, mallinfo2 = library.malloc, library.free, library.sbrk, Counted()
underneath.ctypes.CDLL = lambda name: Library
def look():
    asked.clear()
    changed = underneath._from_pages()
    told.append((changed, bool(asked)))
def look_in_a_thread():
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
for of_some_size in (64, 4096, 100_000):
    blocks = [bytes(of_some_size) for _ in range(50)]
    look()
look_in_a_thread()
library.mallopt(-3, 256)
library.mallopt(-1, 0)
look()
look_in_a_thread()
print(told)
"""


def test_what_is_free_is_counted_only_where_a_block_is_no_piece_of_the_heap() -> None:
    """The count goes through all of it: a quarter of a second in a process that has worked for some minutes."""
    command = [sys.executable, "-c", IN_ANOTHER_HEAP]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    heap, other_heap = [(False, False)] * 3, (False, True)
    assert told == f"{[*heap, other_heap, (True, True), (True, True)]}\n"
