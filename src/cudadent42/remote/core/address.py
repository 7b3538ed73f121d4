"""Where a remote machine is. Addresses are checked here, once: what passes can neither be an option nor shell text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cudadent42.base.errors import UsageError

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Google Cloud's own rules; an old project may belong to a domain, example.org:project.
_PROJECT = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?:)?[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
_ZONE = re.compile(r"[a-z][a-z0-9]{0,30}(?:-[a-z0-9]{1,30}){1,3}")
_INSTANCE = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
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
    """An instance of Google Compute Engine, reached and started with the user's own ``gcloud``."""

    project: str
    zone: str
    instance: str

    def __str__(self) -> str:
        return f"gce://{self.project}/{self.zone}/{self.instance}"


@dataclass(frozen=True)
class SpecificationFile:
    """A machine that is made for each run, from what a file says."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Address = SshAddress | GceAddress | SpecificationFile


def parse(text: str) -> SshAddress | GceAddress:
    """The address that ``text`` names. Raises UsageError."""
    scheme, separator, location = text.partition("://")
    if separator and scheme == "ssh":
        return _ssh(text, location)
    if separator and scheme == "gce":
        return gce_address(*location.split("/")) if location.count("/") == 2 else _refuse(text)
    return _refuse(text)


def gce_address(project: str, zone: str, instance: str) -> GceAddress:
    """The address of an instance, its three names checked. Raises UsageError."""
    address = GceAddress(project, zone, instance)
    for name, text, rule, example in (
        ("project", project, _PROJECT, "my-project-123"),
        ("zone", zone, _ZONE, "us-central1-a"),
        ("instance", instance, _INSTANCE, "gpu-1"),
    ):
        if not rule.fullmatch(text):
            return _refuse(str(address), f": {text!r} is no {name}'s name, such as {example}")
    return address


def check_project(text: str) -> str:
    """``text`` if it can be a Google Cloud project. Raises UsageError."""
    if not _PROJECT.fullmatch(text):
        raise UsageError(f"project {text!r}: expected the project's ID, such as my-project-123")
    return text


def check_zone(text: str) -> str:
    """``text`` if it can be a zone. Raises UsageError."""
    if not _ZONE.fullmatch(text):
        raise UsageError(f"zone {text!r}: expected a zone's name, such as us-central1-a")
    return text


def _refuse(text: str, reason: str = "") -> NoReturn:
    scheme, _, location = text.partition("://")
    user, at, host = location.rpartition("@")
    if at and ":" in user:  # nor is it repeated: what stands there is a password
        raise UsageError(
            f"an address holds no password ({scheme}://{user.partition(':')[0]}:***@{host}); {_EXPECTED}; "
            "OpenSSH takes keys"
        )
    raise UsageError(f"{text!r} is no address of a machine{reason}; {_EXPECTED}")


def _ssh(text: str, location: str) -> SshAddress:
    user, at, location = location.rpartition("@")
    host, colon, port = location, "", ""
    if not location.endswith("]"):
        host, colon, port = location.rpartition(":") if ":" in location else (location, "", "")
    well_formed = (
        _HOST.fullmatch(host)
        and (not at or _USER.fullmatch(user))
        and (not colon or (port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT))
    )
    if not well_formed:
        _refuse(text)
    return SshAddress(host, user, int(port) if port else None)


def check_name(name: str) -> str:
    """``name`` if it can name a remote. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"remote name {name!r}: expected letters, digits, '.', '_' and '-', at most 64")
    return name
