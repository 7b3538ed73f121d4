"""What programs that call a kernel built with sanitizers share: memory with exact bounds, and how they are started."""

from __future__ import annotations

import ctypes
import json
import random
import sys
from collections.abc import Callable

from flashmoe_science.jit.host import amx_is_granted

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
# A value of each kind: infinities, NaN with a payload, the largest, subnormal ones, zeros of both signs.
_SPECIAL = {
    4: [0x7F800000, 0xFF800000, 0x7FC001FF, 0x7F800001, 0x7F7FFFFF, 1, 0x80000000, 0],
    2: [0x7F80, 0xFF80, 0x7C00, 0x7FC1, 0x7F7F, 1, 0x8000, 0],
}


class Memory:
    """A buffer from malloc, which the sanitizer watches, that ends where the last element does."""

    def __init__(self, elements: int, size: int, generator: random.Random) -> None:
        # One element into the block: a start that only the element's own alignment has.
        self.bytes = (elements + 1) * size
        self._block = _libc.malloc(self.bytes)
        self.address = self._block + size
        self._elements, self._size, self._random = elements, size, generator

    def fill(self, specials: int) -> None:
        """Numbers of moderate size, and at `specials` places any kind of number. Bytes are of every value."""
        if self._size == 1:
            content = self._random.randbytes(min(self._elements, 1024)) * (self._elements // 1024 + 1)
            ctypes.memmove(self.address, content, self._elements)
            return
        number = ctypes.c_uint32 if self._size == 4 else ctypes.c_uint16
        pattern = bytearray()
        for _ in range(min(self._elements, 1024)):
            sign, low = self._random.getrandbits(1), self._random.getrandbits(8)
            bits = (
                (sign << 31 | 0x3F << 24 | low << 15) if self._size == 4 else (sign << 15 | 0x3C << 8 | low)
            )
            pattern += bits.to_bytes(self._size, "little")
        content = bytes(pattern) * (self._elements // max(1, len(pattern) // self._size) + 1)
        ctypes.memmove(self.address, content, self._elements * self._size)
        values = (number * self._elements).from_address(self.address)
        for _ in range(specials if self._elements else 0):
            values[self._random.randrange(self._elements)] = self._random.choice(_SPECIAL[self._size])

    def free(self) -> None:
        _libc.free(self._block)


def main(call: Callable[[ctypes.CDLL, random.Random], None]) -> None:
    """Arguments: the first seed, how many calls (a seed each), the library. Prints one line of JSON."""
    seed, count = map(int, sys.argv[1:3])
    # A library's name says what it was built for, and Linux grants the matrix unit's registers to who asks.
    if sys.argv[3].endswith("-amx.so") and not amx_is_granted():
        raise SystemExit("the matrix unit's registers are not granted to this process")
    library = ctypes.CDLL(sys.argv[3])
    for number in range(seed, seed + count):
        # Where a sanitizer ends the process, this is the seed that shows it again.
        print(f"seed {number}", file=sys.stderr, flush=True)
        call(library, random.Random(number))
    print(json.dumps({"done": count}))
