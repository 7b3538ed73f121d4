"""What OpenSSH's own failures mean, and what is said to do about them."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cudadent42.remote.core.address import parse
from cudadent42.remote.core.ssh import ConnectionLostError, HostKeyError, call, connect, raise_if_lost

CHANGED = "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.\n"


@pytest.mark.parametrize(
    ("address", "options", "command"),
    [
        ("ssh://me@gpu-1.example.org", (), "ssh-keygen -R gpu-1.example.org"),
        ("ssh://gpu-1.example.org:22", (), "ssh-keygen -R gpu-1.example.org"),
        ("ssh://gpu-1.example.org:2222", (), "ssh-keygen -R '[gpu-1.example.org]:2222'"),
        ("ssh://[::1]:2222", (), "ssh-keygen -R '[::1]:2222'"),
        (
            "ssh://me@203.0.113.7:2222",
            ("CheckHostIP=no", "HostKeyAlias=compute.42", 'UserKnownHostsFile="/home/a b/known"'),
            "ssh-keygen -f '/home/a b/known' -R compute.42",
        ),
        (
            "ssh://c42",
            ("UserKnownHostsFile=/known", "UserKnownHostsFile=/not"),
            "ssh-keygen -f /known -R c42",
        ),
    ],
)
def test_a_changed_key_is_removed_from_where_it_is_kept(
    address: str, options: tuple[str, ...], command: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(HostKeyError) as error:
        raise_if_lost(connect(parse(address), options), 255, CHANGED)
    assert str(error.value).endswith(f"remove the old key with: {command}")


class Ended(subprocess.Popen[bytes]):
    """A client that is gone before anything is written to it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wait()


def test_a_cut_before_data_is_sent_is_a_lost_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again then. A broken pipe, which nothing tries again, ended the command."""
    client = tmp_path / "ssh"
    client.write_text("#!/bin/sh\necho 'Connection closed by remote host' >&2\nexit 255\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    connection = connect(parse("ssh://gpu-1.example.org"), ())
    monkeypatch.setattr(subprocess, "Popen", Ended)
    with pytest.raises(ConnectionLostError):
        call(connection, "cat", data=io.BytesIO(bytes(8 << 20)))
