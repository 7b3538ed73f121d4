"""What goes on below Python: timers of the kernel, the C library's allocator, machine code that was written to.

None of it has a setting that could be kept apart, so it is compared with what it was before a candidate came.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from numpy import add, frombuffer, uint64

_BLOCK_BYTES, _MOST_BLOCKS = 1 << 16, 64
"""Of a look at the allocator: half of the size from which on it takes pages for a block by default (mallopt(3))."""

_TIMERS, _MAPPINGS, _PAGES = (Path("/proc/self") / name for name in ("timers", "maps", "pagemap"))

_PAGE, _WORD = mmap.PAGESIZE, 8
_THERE, _OF_FILE = uint64(62), uint64(61)
"""Bits of a page's entry: the upper two, in memory or swapped out; a file's page, or shared."""

_HEADER = re.compile(
    rb"^(?P<first>[0-9a-f]+)-(?P<stop>[0-9a-f]+) (?P<rights>\S+) \S+ \S+ (?P<inode>\d+) *(?P<path>.*)$"
)


class _Counts(ctypes.Structure):
    """``struct mallinfo2``; mallinfo(3)."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


class Underneath:
    """As things are when it is made."""

    def __init__(self) -> None:
        self._timers = timers()
        self._from_pages = _from_pages()
        self._code = rewritten_code()

    def changed(self) -> str:
        """What is otherwise now; empty for nothing. Some tens of microseconds."""
        more = timers() - self._timers
        if more > 0:
            return f"{more} timer(s) of the kernel's go on between calls (timer_create)"
        if _from_pages() and not self._from_pages:
            return "the C library's allocator gives small blocks pages of their own now (mallopt)"
        return ""

    def code_changed(self) -> str:
        """Which files' machine code was written to; empty for none. Some milliseconds."""
        written = sorted(name for name, size in rewritten_code().items() if size > self._code.get(name, 0))
        return f"machine code in memory is no longer that of {', '.join(written[:3])}" if written else ""


def timers() -> int:
    """Of this process (timer_create(2)); 0 where the system does not tell."""
    try:
        return sum(line.startswith(b"ID:") for line in _TIMERS.read_bytes().splitlines())
    except OSError:
        return 0


def _from_pages() -> bool:
    """Whether small blocks get pages of their own where the heap has no room; False where the C library does not tell.

    Blocks are taken until the heap would have to grow, or ``_MOST_BLOCKS``: from what is free they come in any case.
    To count goes through all that is free in the heap, a quarter of a second where that is many pieces. So it is asked
    only where a block lies behind the heap's end, as all do in a thread that has a heap of its own."""
    library = ctypes.CDLL(None)
    count, end = (getattr(library, name, None) for name in ("mallinfo2", "sbrk"))
    if count is None or end is None:
        return False
    count.restype = _Counts
    end.restype = library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = (ctypes.c_void_p,)
    old_end = end(0)
    for block in _blocks(library):
        if block >= (new_end := end(0)):
            break
        if new_end != old_end:
            return False
    else:
        return False
    before = now = count()
    for _ in _blocks(library):
        now = count()
        if now.hblks != before.hblks or now.arena != before.arena:
            break
    return bool(now.hblks > before.hblks)


def _blocks(library: ctypes.CDLL) -> Iterator[int]:
    """Where blocks lie that are taken one after the other, and given back when nobody asks for more."""
    blocks: list[int | None] = []
    try:
        while len(blocks) < _MOST_BLOCKS:
            blocks.append(library.malloc(ctypes.c_size_t(_BLOCK_BYTES)))
            yield blocks[-1] or 0
    finally:
        for block in blocks:
            library.free(block)


def rewritten_code() -> Mapping[str, int]:
    """By file, KiB of its code in memory that are not the file's any more."""
    sizes: dict[str, int] = {}
    try:
        with _MAPPINGS.open("rb") as mappings, _PAGES.open("rb", buffering=0) as pages:
            for header in filter(None, map(_HEADER.match, mappings)):
                if b"x" in header["rights"] and header["inode"] != b"0":
                    first, stop = (int(header[end], 16) // _PAGE for end in ("first", "stop"))
                    if size := _own_pages(os.pread(pages.fileno(), _WORD * (stop - first), _WORD * first)):
                        path = os.path.basename(os.fsdecode(header["path"]))
                        sizes[path] = sizes.get(path, 0) + size * _PAGE // 1024
    except OSError:
        return {}
    return sizes


def _own_pages(entries: bytes) -> int:
    """Of pages' entries (proc_pid_pagemap(5)), how many are there, or swapped out, and are no file's."""
    words = frombuffer(entries, uint64)
    return int(add.reduce((words >> _THERE != 0) & (words >> _OF_FILE & 1 == 0), dtype="i8"))
