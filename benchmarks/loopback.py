"""This machine as the far side of its own remote runs: the tests' sshd, a clone to send, a home for who comes in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/cudadent42/remote"))

from sshd import Server, make_keys, serve  # noqa: E402

NAME = "there"


@dataclass(frozen=True)
class Loopback:
    server: Server
    project: Path
    """A clone of this repository, whose working tree is sent."""

    @property
    def home(self) -> Path:
        """Of who comes in. Every process of theirs has it in its environment, and no other process has."""
        return self.server.folder / "home"

    @property
    def folder(self) -> Path:
        return self.home / "cudadent42-remote"

    def cudadent42(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        """A command here; standard error goes to ``log``."""
        with log.open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "cudadent42", *arguments],
                cwd=self.project,
                env={
                    **os.environ,
                    "PYTHONPATH": str(self.project / "src"),
                    "CUDADENT42_LEDGER": str(
                        self.server.folder / "ledger.db"
                    ),  # what comes back is entered there
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def end_connections_here(self) -> int:
        """Kill the clients, the shared connection's too; how many there were."""
        return sum(_end(pid) for pid in self.clients())

    def processes(self) -> list[int]:
        """What runs there now, whoever its parent has become."""
        marker = f"HOME={self.home}".encode()
        return [pid for pid, words in _all_processes("environ") if marker in words]

    def commands(self) -> Iterator[tuple[int, list[bytes]]]:
        """The words of what runs there on behalf of a run: its working folder is the tree."""
        tree = str(self.folder / "tree")
        for pid, words in _all_processes("cmdline"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/cwd") == tree:
                    yield pid, words

    def clients(self) -> list[int]:
        """The ssh processes here, the shared connection's too: their socket is in this benchmark's own folder."""
        marker = os.environ["XDG_RUNTIME_DIR"].encode()
        return [
            pid
            for pid, words in _all_processes("cmdline")
            if words[0].startswith(b"ssh") or words[0].endswith(b"/ssh")
            if any(marker in word for word in words)
        ]


def _all_processes(file: str) -> Iterator[tuple[int, list[bytes]]]:
    """Every process, with the words of one of its files in /proc."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                yield int(entry.name), (entry / file).read_bytes().split(b"\0")


def _end(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def loopback(there: Path | None) -> Iterator[Loopback]:
    """The sshd, and a remote by the name of ``NAME``. ``there`` keeps the far side's home for a later call."""
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        folder = Path(scratch)
        (folder / "keys").mkdir()
        with serve(make_keys(folder / "keys"), there or folder, patch) as server:
            far = Loopback(server, folder / "project")
            _install_from_the_same_index(far.home)
            subprocess.run(["git", "clone", "-q", str(ROOT), str(far.project)], check=True)
            log = folder / "add.log"
            if far.cudadent42("remote", "add", NAME, server.address, log=log).wait() != 0:
                raise SystemExit(log.read_text())
            try:
                yield far
            finally:
                far.end_connections_here()


def _install_from_the_same_index(home: Path) -> None:
    """No variable of this environment reaches the far side; where pip installs from is its own configuration."""
    names = {"PIP_FIND_LINKS": "find-links", "PIP_INDEX_URL": "index-url", "PIP_CERT": "cert"}
    lines = [f"{key} = {os.environ[name]}" for name, key in names.items() if name in os.environ]
    (home / ".config/pip").mkdir(parents=True, exist_ok=True)
    (home / ".config/pip/pip.conf").write_text("\n".join(["[global]", *lines]) + "\n")
