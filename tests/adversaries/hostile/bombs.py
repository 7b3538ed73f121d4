"""Own. Candidates that take all there is: processes, memory, disk. Each does so at its first call, and says how far it
came."""

import mmap
import os
import time

from flashmoe_science import flash_attention

MIB = 1 << 20
MOST = 4096
"""Where a test would rather fail than go on."""


gone_off = []


def bomb(go_off):
    """A candidate that computes what it is asked for, after it has gone off once."""

    def attention(query, key, value, *, causal, softmax_scale):
        if not gone_off:
            gone_off.append(True)
            go_off()
        return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)

    return attention


@bomb
def forks():
    for count in range(MOST):
        try:
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
        except OSError as error:
            print(f"bomb: {count} processes, then {error!r}", flush=True)
            break
    else:
        print(f"bomb: {MOST} processes and no end", flush=True)


@bomb
def fills_memory():
    taken = []
    try:
        while len(taken) < MOST:
            taken.append(bytearray(b"x" * (16 * MIB)))
        print("bomb: 64 GiB and no end", flush=True)
    except MemoryError:
        print(f"bomb: {16 * len(taken)} MiB, then no more", flush=True)
    del taken


@bomb
def fills_shared_memory():
    try:
        mmap.mmap(-1, 1 << 40)
        print("bomb: 1 TiB mapped", flush=True)
    except (OSError, MemoryError) as error:
        print(f"bomb: {error!r}", flush=True)


@bomb
def fills_disk():
    written = 0
    folder = os.environ["TMPDIR"]
    try:
        for number in range(MOST):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                while os.fstat(file.fileno()).st_size < 32 * MIB:
                    written += file.write(b"x" * MIB)
        print("bomb: 128 GiB written and no end", flush=True)
    except OSError as error:
        print(f"bomb: {written >> 20} MiB, then {error!r}", flush=True)
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")


@bomb
def one_long_file():
    try:
        with open(f"{os.environ['TMPDIR']}/long", "wb") as file:
            os.truncate(file.fileno(), 1 << 40)
        print("bomb: a file of 1 TiB", flush=True)
    except OSError as error:
        print(f"bomb: {error!r}", flush=True)
