"""What hostile candidates try, each attempt with a line of its own: ``attempt NAME: refused ...`` or ``... done ...``.

``targets.json`` beside this file says what there is to attack; the test wrote it. As a program it tries everything.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path

TARGETS = json.loads((Path(__file__).parent / "targets.json").read_text())
NOWHERE = b"/no such folder"
"""Where it makes a difference whether a call is refused or fails: nothing is to happen if it is not."""

libc = ctypes.CDLL(None, use_errno=True)


def call(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def number(x86_64: int, aarch64: int) -> int:
    return x86_64 if os.uname().machine == "x86_64" else aarch64


def attempt(name: str, action) -> None:
    try:
        outcome = f"done {action()!r}"
    except (OSError, LookupError, ValueError) as error:
        outcome = f"refused {error!r}"
    print(f"attempt {name}: {outcome}", flush=True)


def first_writable_region(process: int) -> int:
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        addresses, modes = line.split()[:2]
        if modes.startswith("rw"):
            return int(addresses.partition("-")[0], 16)
    raise LookupError("no such region")


def memory_of(process: int) -> bytes:
    start = first_writable_region(process)
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        return memory.read(16)


def open_files_of(process: int) -> list[int]:
    """Their numbers are no secret; what they lead to is."""
    folder = f"/proc/{process}/fd"
    return [os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NONBLOCK) for name in os.listdir(folder)]


def process_vm_readv(process: int) -> int:
    buffer = ctypes.create_string_buffer(16)
    mine = struct.pack("PN", ctypes.addressof(buffer), 16)
    theirs = struct.pack("PN", TARGETS["address"], 16)
    return call(libc.syscall(number(310, 270), process, mine, 1, theirs, 1, 0))


def attach(process: int) -> str:
    ctypes.set_errno(0)
    call(libc.ptrace(16, process, None, None))
    call(libc.ptrace(17, process, None, None))
    return "attached"


def connect(family: int, kind: int, address) -> str:
    with socket.socket(family, kind) as one:
        one.settimeout(2)
        one.connect(address)
        one.send(b"x")
    return "sent"


def listen() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
    return "listens"


def reads_secrets() -> None:
    attempt("read a key of the home", lambda: Path(TARGETS["key"]).read_text())
    attempt("list the home", lambda: os.listdir(TARGETS["home"]))
    attempt("read a secret variable", lambda: os.environ["SECRET_TOKEN_OF_THE_TEST"])
    attempt("read the parent's environment", lambda: Path(f"/proc/{TARGETS['parent']}/environ").read_bytes())
    attempt("read the first process's environment", lambda: Path("/proc/1/environ").read_bytes())
    attempt("read the parent's memory", lambda: memory_of(TARGETS["parent"]))
    attempt("read the run folder", lambda: os.listdir(TARGETS["run"]))


def opens_sockets() -> None:
    attempt(
        "connect on loopback",
        lambda: connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", TARGETS["port"])),
    )
    attempt("send a datagram", lambda: connect(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 9)))
    attempt("connect by IPv6", lambda: connect(socket.AF_INET6, socket.SOCK_STREAM, ("::1", TARGETS["port"])))
    attempt(
        "connect to a socket file", lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, TARGETS["socket"])
    )
    attempt(
        "connect to an abstract socket",
        lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + TARGETS["abstract"]),
    )
    attempt("listen", listen)


def writes_outside() -> None:
    victim = Path(TARGETS["victim"])
    attempt("overwrite a file", lambda: victim.write_text("changed"))
    attempt("truncate a file", lambda: os.truncate(victim, 0))
    attempt("truncate by opening", lambda: os.close(os.open(victim, os.O_RDONLY | os.O_TRUNC)))
    attempt("remove a file", lambda: victim.unlink())
    attempt("rename a file", lambda: victim.rename(victim.with_suffix(".moved")))
    attempt("make a file beside it", lambda: victim.with_name("new").touch(exist_ok=False))
    attempt("link it here", lambda: os.link(victim, Path(os.environ["TMPDIR"], "linked")))
    attempt("change its mode", lambda: victim.chmod(0o777))
    attempt("change its times", lambda: os.utime(victim, (0, 0)))
    attempt("change the mode of my own source", lambda: os.chmod(__file__, 0o777))
    attempt("change my own source", lambda: Path(__file__).write_text("changed"))
    attempt("change the lab", lambda: Path(TARGETS["lab"]).open("r+").close())


def edits_results() -> None:
    for name in ("results.json", "samples.csv", "manifest.json", "new.txt"):
        attempt(f"write {name}", lambda name=name: Path(TARGETS["run"], name).write_text("{}"))
    attempt("open what the parent has open", lambda: open_files_of(TARGETS["parent"]))
    attempt("make it a folder of my own", lambda: os.rename(TARGETS["run"], TARGETS["run"] + ".old"))


def poisons_cache() -> None:
    entry = Path(TARGETS["entry"])
    attempt("overwrite a compiled kernel", lambda: entry.write_bytes(b"\x7fELF"))
    attempt("remove a compiled kernel", lambda: entry.unlink())
    attempt("add to the cache", lambda: (entry.parent / ("0" * 64 + ".json")).touch(exist_ok=False))


def disturbs_others() -> None:
    parent = TARGETS["parent"]
    attempt("signal the parent", lambda: os.kill(parent, signal.SIGURG))
    attempt("attach to the parent", lambda: attach(parent))
    attempt("read the parent by process_vm_readv", lambda: process_vm_readv(parent))
    attempt("write the parent's memory", lambda: open(f"/proc/{parent}/mem", "r+b").close())


def breaks_out() -> None:
    attempt("a user namespace", lambda: call(libc.unshare(0x10000000)))
    attempt("mount", lambda: call(libc.mount(b"none", NOWHERE, b"tmpfs", 0, None)))
    attempt("unmount", lambda: call(libc.umount2(NOWHERE, 2)))
    attempt("chroot", lambda: os.chroot(NOWHERE))
    attempt("io_uring", lambda: call(libc.syscall(425, 1, ctypes.create_string_buffer(256))))
    attempt("bpf", lambda: call(libc.syscall(number(321, 280), 0, None, 0)))
    attempt("keyctl", lambda: call(libc.syscall(number(250, 219), 0, -3, 1)))
    attempt(
        "open by handle",
        lambda: call(libc.syscall(number(304, 265), -100, ctypes.create_string_buffer(64), 0)),
    )
    attempt("more open files", lambda: __import__("resource").setrlimit(7, (1 << 20, 1 << 20)))


EVERYTHING = (
    reads_secrets,
    opens_sockets,
    writes_outside,
    edits_results,
    poisons_cache,
    disturbs_others,
    breaks_out,
)

if __name__ == "__main__":
    for part in EVERYTHING:
        part()
    sys.exit(0)
