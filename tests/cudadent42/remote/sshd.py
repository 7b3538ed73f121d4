"""A real sshd on loopback, and an ``ssh`` that knows its key and nothing of this user's own configuration."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SYSTEM_PATH = os.environ["PATH"]
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@dataclass(frozen=True)
class Server:
    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"ssh://127.0.0.1:{self.port}"

    def sessions(self) -> list[int]:
        """Processes of the connections that are open now."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return [int(word) for word in listed.stdout.split()]

    def cut(self) -> int:
        """End every connection, as a network that goes away does; how many there were."""
        sessions = self.sessions()
        for pid in sessions:
            for child in _children(pid):
                _kill(child)
            _kill(pid)
        return len(sessions)


def _children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listed.stdout.split() if _name(int(word)) == "sshd"]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def make_keys(folder: Path) -> Path:
    if not Path(SSHD).exists() or shutil.which("ssh") is None or shutil.which("ps") is None:
        pytest.skip("needs OpenSSH's server and client, and ps")
    for name in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    return folder


@contextmanager
def serve(
    keys: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tools_there: Path | None = None,
    only: bool = False,
    login: Path | None = None,
) -> Iterator[Server]:
    """sshd with a home of its own for who comes in; the ``ssh`` on PATH trusts its key.

    Commands in ``tools_there`` hide the machine's own from who comes in; with ``only`` there are no others. ``login``
    stands for the login shell: it finds what it is to do in ``$SSH_ORIGINAL_COMMAND``.
    """
    folder = tmp_path / "there"
    (folder / "home").mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "sshd_config"
    path = f" PATH={tools_there}{'' if only else f':{SYSTEM_PATH}'}" if tools_there else ""
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/user.pub\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
        # The default key exchange, post-quantum, takes a tenth of a second of a processor on each side.
        f"KexAlgorithms curve25519-sha256\nSetEnv HOME={folder}/home{path}\nMaxStartups 100\n"
        + (f"ForceCommand {login}\n" if login else "")
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=(folder / "sshd.log").open("wb"))
    await_port(port, process)
    trust(keys, tmp_path, port, "host", monkeypatch)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(_short_folder(tmp_path)))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    try:
        yield Server(port, folder, process)
    finally:
        end_watchdog(folder / "home")
        process.terminate()
        process.wait()


def end_watchdog(home: Path) -> None:
    """What a test left watching: it is to end before what stands for a shutdown is gone."""
    guard = home / ".local/state/cudadent42/watchdog"
    (guard / "limits").unlink(missing_ok=True)
    if (guard / "pid").exists():
        pid, since = (guard / "pid").read_text().split()
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19] == since:
                _kill(int(pid))


def trust(keys: Path, folder: Path, port: int, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``ssh`` one that takes ``key`` for the server's, in place of a user's own configuration."""
    public = (keys / f"{key}.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}")
    config = folder / "ssh_config"
    config.write_text(
        f"IdentityFile {keys}/user\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known_hosts\n"
    )
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "ssh").write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh", path=SYSTEM_PATH)} -F "{config}" "$@"\n'
    )
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{SYSTEM_PATH}")


def _short_folder(folder: Path) -> Path:
    """A socket's path is short."""
    short = Path("/tmp") / f"c42-{os.getpid()}-{abs(hash(folder)) % 10**6}"
    short.mkdir(mode=0o700, exist_ok=True)
    return short


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """However long that takes on a busy machine; the time limit of a test ends it."""
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.skip("sshd does not start here")


def spend_budget(guard: Path) -> None:
    """From now on the limits of the watchdog in this folder allow a second."""
    idle, _, rest = (guard / "limits").read_text().split(" ", 2)
    (guard / "limits.test").write_text(f"{idle} 1 {rest}")
    (guard / "limits.test").replace(guard / "limits")
