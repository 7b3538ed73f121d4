"""The user's own OpenSSH, and nothing beside it: their configuration, agent, jump hosts and known hosts hold.

The login shell is given one fixed command that differs in a number only; what is to be done arrives on standard
input, quoted for a POSIX shell. So neither the login shell's dialect nor any name can change what is executed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cudadent42.base.errors import LabError, MachineNotReadyError
from cudadent42.base.shown import plain
from cudadent42.remote.core.address import SshAddress

SSH_FAILED = 255
"""OpenSSH's exit code where the connection, not the command, failed."""
_USUAL_PORT = 22
_CONNECT_TIMEOUT_S = 20
_ALIVE_INTERVAL_S = 15
_ALIVE_COUNT = 3
_PERSIST_S = 60
_FOLDER_LENGTH = 48
"""Bytes. A socket's path has at most 104 (BSD) or 108; here it is a slash, 40 digits, and 17 more while it is made."""
_BEGUN = b"\ncudadent42: here it begins\n"
"""Printed there first. What comes before it is the login shell's: a greeting, or what its start-up files print."""
_GREETING_LENGTH = 4096
"""Of what comes before, the end that is kept."""
_MOST_PRINTED = 16 << 20
"""Bytes, where the answer is a few words. A machine of somebody else's may print for ever."""
_MOST_COMPLAINTS = 1 << 16
"""Bytes from the end of standard error that are kept."""


class ConnectionLostError(LabError):
    """The machine cannot be reached, or the connection ended before the command did."""


class HostKeyError(LabError):
    """The machine's key is unknown or another than before."""


@dataclass(frozen=True)
class Connection:
    """How to reach one machine. Connections are shared through a socket in a folder of this user's own."""

    address: SshAddress
    control: Path
    options: tuple[str, ...] = ()
    """Further options of ssh, ``Name=value``."""

    def argv(self) -> list[str]:
        """The ssh command, up to and with the destination."""
        options = (
            "BatchMode=yes",
            # Who is root there could use the agent's keys elsewhere while a run is followed.
            "ForwardAgent=no",
            "ForwardX11=no",
            "ClearAllForwardings=yes",
            f"ConnectTimeout={_CONNECT_TIMEOUT_S}",
            f"ServerAliveInterval={_ALIVE_INTERVAL_S}",
            f"ServerAliveCountMax={_ALIVE_COUNT}",
            "ControlMaster=auto",
            f"ControlPath={self.control}/%C",
            f"ControlPersist={_PERSIST_S}",
            *self.options,
        )
        port = ["-p", str(self.address.port)] if self.address.port else []
        return [
            "ssh",
            "-T",
            *(word for option in options for word in ("-o", option)),
            *port,
            "--",
            self.address.destination,
        ]

    def option(self, name: str) -> str | None:
        """The value of a further option, without its quotes; as ssh has it, the first of that name holds."""
        values = (
            value for key, _, value in (option.partition("=") for option in self.options) if key == name
        )
        value = next(values, None)
        return None if value is None else value.strip('"')

    def close(self) -> None:
        """End the shared connection, if there is one."""
        argv = self.argv()
        subprocess.run(
            [*argv[:-2], "-O", "exit", *argv[-2:]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


def connect(address: SshAddress, options: tuple[str, ...] = ()) -> Connection:
    return Connection(address, _control_folder(), options)


def _control_folder() -> Path:
    """A short path that only this user can enter. Raises LabError."""
    name = f"cudadent42-{os.getuid()}"
    usual = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")
    folders = [Path(base) / name for base in usual if base and os.access(base, os.W_OK | os.X_OK)]
    short = [folder for folder in folders if len(os.fsencode(folder)) <= _FOLDER_LENGTH]
    if not short:
        raise LabError(
            f"connections are shared through a folder with a short name, and none of {', '.join(filter(None, usual))} "
            "can be written to: set XDG_RUNTIME_DIR to one of yours"
        )
    folder = short[0]
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LabError(f"{folder} is not a folder of yours alone; connections are shared there: remove it")
    return folder


@dataclass(frozen=True)
class Done:
    exit_code: int
    output: bytes
    errors: str


def start(connection: Connection, text: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """A shell text under way there, its arguments as $1, $2, ...; what follows on standard input is the text's.

    A shell may read ahead on its standard input, so the text is not read as a script from there: its exact number
    of bytes is.
    """
    body = command_text(text, arguments)
    try:
        process = subprocess.Popen(
            [*connection.argv(), f"exec sh -c 'eval \"$(head -c {len(body)})\"'"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except FileNotFoundError as error:
        raise MachineNotReadyError("there is no ssh on PATH here; install OpenSSH's client") from error
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the exit code and standard error say why
        process.stdin.write(body)
        process.stdin.flush()
    return process


def command_text(text: str, arguments: Sequence[str]) -> bytes:
    """A whole command for a shell; cut anywhere, it is a syntax error, and nothing of it is done."""
    words = shlex.join(arguments).encode(errors="surrogateescape")
    begin = b"printf '\\n%s\\n' '" + _BEGUN.strip() + b"'\n"
    return b"main() {\n" + text.encode() + b"\n}\n{ " + begin + b"main " + words + b"\n}\n"


class _Output:
    """What a text prints there, out of all that arrives on its standard output."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begun = False
        self._greeting = b""

    def of(self, chunk: bytes) -> bytes:
        """The text's part of the next piece."""
        if self._begun:
            return chunk
        before, begun, output = (self._greeting + chunk).partition(_BEGUN)
        self._begun, self._greeting = bool(begun), before[-_GREETING_LENGTH:]
        return output

    def check(self, code: int, errors: str) -> None:
        """Raises LabError unless the text was carried out; ConnectionLostError, HostKeyError as `raise_if_lost`."""
        raise_if_lost(self._connection, code, errors)
        if not self._begun:
            said = " ".join(f"{errors} {plain(self._greeting.decode(errors='replace'))}".split())
            raise LabError(
                f"{self._connection.address}: the login shell there does not do what it is told (exit code {code}); "
                f"expected a shell with sh, head and no start-up file that ends it: {said[-200:] or 'it said nothing'}"
            )


class _Complaints:
    """What comes on standard error, read as it comes so that nobody waits; its end is kept."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self._stream = process.stderr
        self._end = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError):
            while chunk := os.read(self._stream.fileno(), 1 << 16):
                self._end = (self._end + chunk)[-_MOST_COMPLAINTS:]

    def text(self) -> str:
        """All of it, once the other end has closed it."""
        self._thread.join()
        return plain(self._end.decode(errors="replace"))


def call(connection: Connection, text: str, *arguments: str, data: IO[bytes] | None = None) -> Done:
    """Run a shell text there, with ``data`` as its standard input; wait; what it printed.

    Raises:
        ConnectionLostError, HostKeyError: it did not run, or its end is not known.
        LabError: it printed without an end.
    """
    with start(connection, text, arguments) as process:
        complaints = _Complaints(process)
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            if data is not None:
                shutil.copyfileobj(data, process.stdin)
        # Apart: what a cut left in the buffer breaks the closing too, which the end of Popen's block would try again.
        with suppress(BrokenPipeError):
            process.stdin.close()
        printed = process.stdout.read(_MOST_PRINTED + 1)
        if len(printed) > _MOST_PRINTED:
            process.kill()
            raise LabError(
                f"{connection.address} said more than {_MOST_PRINTED >> 20} MiB where a few words were expected; "
                "look at what answers there"
            )
        errors = complaints.text()
        code = process.wait()
    output = _Output(connection)
    done = Done(code, output.of(printed), errors)
    output.check(done.exit_code, done.errors)
    return done


def stream(
    connection: Connection, text: str, arguments: Sequence[str], on_bytes: Callable[[bytes], object]
) -> int:
    """Run a shell text there and hand on what it prints as it comes; its exit code. Raises like ``call``."""

    def close(given: IO[bytes]) -> None:
        with suppress(BrokenPipeError):
            given.close()

    return converse(connection, text, arguments, on_bytes, close).exit_code


def converse(
    connection: Connection,
    text: str,
    arguments: Sequence[str],
    on_bytes: Callable[[bytes], object],
    on_open: Callable[[IO[bytes]], object],
) -> Done:
    """``stream``, with its standard input in the hands of ``on_open``, which may return at once and write later."""
    process = start(connection, text, arguments)
    assert process.stdin is not None
    assert process.stdout is not None
    output = _Output(connection)
    complaints = _Complaints(process)
    try:
        on_open(process.stdin)
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            if own := output.of(chunk):
                on_bytes(own)
        errors = complaints.text()
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    output.check(code, errors)
    return Done(code, b"", errors)


def raise_if_lost(connection: Connection, code: int, errors: str) -> None:
    """OpenSSH's own failures, told apart by what it says. A client that a signal ended (a code below 0) is one."""
    if code != SSH_FAILED and code >= 0:
        return
    said = " ".join(errors.split())
    where = connection.address
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in errors:
        raise HostKeyError(
            f"{where}: its host key is another than before, so this may not be the same machine; if it was made "
            f"anew, remove the old key with: {_forgetting(connection)}"
        )
    if "Host key verification failed" in errors:
        raise HostKeyError(
            f"{where}: its host key is not known; look at it once with: {_looking(connection)}"
        )
    if "Permission denied" in errors:
        raise LabError(f"{where} lets nobody in with the keys that ssh offers: {said[-200:]}")
    raise ConnectionLostError(f"{where} cannot be reached: {said[-200:] or 'the connection ended'}")


def _looking(connection: Connection) -> str:
    """What shows a machine's key and asks whether to keep it, where we look for it; for a user to type."""
    ours = {
        name: connection.option(name)
        for name in ("StrictHostKeyChecking", "UserKnownHostsFile", "HostKeyAlias")
    }
    if ours["StrictHostKeyChecking"]:
        ours["StrictHostKeyChecking"] = "ask"  # their own configuration may accept any
    port = ["-p", str(connection.address.port)] if connection.address.port else []
    quoted = {name: f'"{value}"' if " " in value else value for name, value in ours.items() if value}
    words = [word for name, value in quoted.items() for word in ("-o", f"{name}={value}")]
    return shlex.join(["ssh", *port, *words, connection.address.destination])


def _forgetting(connection: Connection) -> str:
    """What removes the key that a machine is known by, for a user to type."""
    where, file = connection.address, connection.option("UserKnownHostsFile")
    host = where.host.strip("[]")
    by_address = f"[{host}]:{where.port}" if where.port not in (None, _USUAL_PORT) else host
    known_as = connection.option("HostKeyAlias") or by_address
    return shlex.join(["ssh-keygen", *(["-f", file] if file else []), "-R", known_as])
