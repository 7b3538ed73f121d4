"""Where a remote machine is. Addresses are checked here, once: what passes can neither be an option nor shell text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cudadent42.errors import UsageError

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_EXPECTED = "expected ssh://[user@]host[:port]"
_MAX_PORT = 65535


@dataclass(frozen=True)
class SshAddress:
    """A machine that the user's own OpenSSH reaches; ``host`` may be an alias of their configuration."""

    host: str
    user: str = ""
    port: int | None = None

    @property
    def destination(self) -> str:
        host = self.host.strip("[]")
        return f"{self.user}@{host}" if self.user else host

    def __str__(self) -> str:
        port = f":{self.port}" if self.port else ""
        return f"ssh://{self.user + '@' if self.user else ''}{self.host}{port}"


def parse(text: str) -> SshAddress:
    """The address that ``text`` names. Raises UsageError."""
    scheme, separator, place = text.partition("://")
    if scheme != "ssh" or not separator:
        raise UsageError(f"{text!r} is no address of a machine; {_EXPECTED}")
    user, at, place = place.rpartition("@")
    host, colon, port = place, "", ""
    if not place.endswith("]"):
        host, colon, port = place.rpartition(":") if ":" in place else (place, "", "")
    well_formed = (
        _HOST.fullmatch(host)
        and (not at or _USER.fullmatch(user))
        and (not colon or (port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT))
    )
    if not well_formed:
        raise UsageError(f"{text!r} is no address of a machine; {_EXPECTED}")
    return SshAddress(host, user, int(port) if port else None)


def check_name(name: str) -> str:
    """``name`` if it can name a remote. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"remote name {name!r}: expected letters, digits, '.', '_' and '-', at most 64")
    return name
