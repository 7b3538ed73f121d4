"""Where a remote machine is. Addresses are checked here, once: what passes can neither be an option nor shell text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cudadent42.errors import UsageError

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_CLOUD_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_PROJECT = re.compile(r"[a-z][a-z0-9.:-]{0,98}")
_EXPECTED = "expected ssh://[user@]host[:port] or gce://PROJECT/ZONE/INSTANCE"
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


@dataclass(frozen=True)
class GceAddress:
    """A Compute Engine instance, reached with the user's ``gcloud``."""

    project: str
    zone: str
    instance: str

    def __str__(self) -> str:
        return f"gce://{self.project}/{self.zone}/{self.instance}"


Address = SshAddress | GceAddress


def parse(text: str) -> Address:
    """The address that ``text`` names. Raises UsageError."""
    scheme, separator, rest = text.partition("://")
    if scheme == "ssh" and separator:
        return _ssh(text, rest)
    if scheme == "gce" and separator:
        parts = rest.split("/")
        if (
            len(parts) == 3
            and _PROJECT.fullmatch(parts[0])
            and all(_CLOUD_NAME.fullmatch(part) for part in parts[1:])
        ):
            return GceAddress(*parts)
    raise UsageError(f"{text!r} is no address of a machine; {_EXPECTED}")


def _ssh(text: str, rest: str) -> SshAddress:
    user, at, place = rest.rpartition("@")
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
