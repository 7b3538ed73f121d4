"""A fresh instance, described in a TOML file: made for a run, deleted after it.

schema_version = 1
project = "my-project"
zones = ["us-central1-a", "us-west1-b"]     # in the order of preference
machine_type = "g2-standard-8"
image_family = "common-cu129-ubuntu-2204-nvidia-580"
image_project = "deeplearning-platform-release"
disk_gb = 100
spot = true
max_run_minutes = 60                        # then the provider deletes it, whatever happened here
rate = "gcp-l4-spot"
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import read_text
from cudadent42.base.toml import Table, parse_toml
from cudadent42.cost import rates
from cudadent42.remote.core.address import SpecificationFile, check_project, check_zone
from cudadent42.remote.core.policy import Reach, check_bucket
from cudadent42.remote.providers.gce import accelerators
from cudadent42.remote.providers.gce.machine import LABEL

SCHEMA_VERSION = 1
MOST_RUN_MINUTES = 7 * 24 * 60
"""The provider takes up to 120 days; nobody races kernels for longer than a week."""
_MOST_DISK_GB = 65536
_LEAST_DISK_GB = 10
_DISK_GB = 100
_MOST_ACCELERATORS = 16

SPECIFICATION_LABEL = f"{LABEL}-specification"
"""The digest of what an instance was made from."""
GUEST_ATTRIBUTES = "enable-guest-attributes"
"""Metadata that lets an instance publish its host keys, which is how they are known before the first connection."""

_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NETWORK = re.compile(
    r"(?:projects/[a-z0-9:.-]{1,100}/(?:global|regions/[a-z0-9-]{1,60})/[a-z]{1,20}/)?[a-z][a-z0-9-]{0,62}"
)
_ACCOUNT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}@[a-z0-9][a-z0-9.-]{0,200}")
_SCOPE = re.compile(r"[a-z][a-z-]{0,40}|https://www\.googleapis\.com/auth/[a-z][a-z0-9._-]{0,80}")
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_METADATA_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,127}")
_METADATA_VALUE = re.compile(r"[ -+\--~]{0,4096}")
"""One line of ASCII, without commas: they separate one value from the next on gcloud's command line."""
_NO_SECRETS = "; metadata is no place for secrets: what runs there and who may see the project can read it"
RESERVED = frozenset((LABEL, SPECIFICATION_LABEL, GUEST_ATTRIBUTES))


@dataclass(frozen=True)
class Specification:
    project: str
    zones: tuple[str, ...]
    machine_type: str
    image_family: str
    image_project: str
    max_run_minutes: int
    rate: str
    accelerator: str = ""
    """Empty where the machine type brings its own, or has none."""
    accelerator_count: int = 1
    disk_gb: int = _DISK_GB
    disk_type: str = ""
    spot: bool = False
    service_account: str = ""
    """Empty for none: what runs there then has no access to the project."""
    scopes: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    network: str = ""
    subnet: str = ""
    external_ip: bool = True
    reach: Reach = Reach.AUTO
    results: str = ""
    """``gs://BUCKET[/FOLDER]`` that run folders are copied to; empty for none."""

    @property
    def accelerator_type(self) -> str:
        return self.accelerator or accelerators.built_in(self.machine_type)

    @property
    def digest(self) -> str:
        """Two specifications with the same one make the same machine."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def of_file(path: Path) -> SpecificationFile:
    """The address of machines made from a file, which is read first. Raises UsageError."""
    absolute = path.absolute()
    if not str(absolute).isprintable():
        raise UsageError(f"{str(absolute)!r} cannot be kept as a specification; expected a printable path")
    load(absolute)
    return SpecificationFile(absolute)


def load(path: Path) -> Specification:
    """The specification in a file. Raises UsageError, with the place, where it is not one."""
    try:
        text = read_text(path)
    except OSError as error:
        raise UsageError(f"cannot read the specification {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not UTF-8 text; expected TOML") from error
    return _specification(Table(parse_toml(text, str(path)), str(path)))


def _specification(table: Table) -> Specification:
    version = table.integer("schema_version", 1, 1 << 30, SCHEMA_VERSION)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{table.where} has schema_version {version}, of a newer cudadent42; "
            f"this one reads up to {SCHEMA_VERSION}: upgrade it"
        )
    table.check_keys({"schema_version", *Specification.__dataclass_fields__})
    rate = table.name("rate")
    rates.load().get(rate)
    specification = Specification(
        project=check_project(table.value("project", str, "the project's ID")),
        zones=_zones(table),
        machine_type=_matching(table, "machine_type", _NAME, "such as g2-standard-8"),
        image_family=_matching(table, "image_family", _NAME, "such as ubuntu-2404-lts-amd64"),
        image_project=check_project(table.value("image_project", str, "such as ubuntu-os-cloud")),
        max_run_minutes=table.integer("max_run_minutes", 1, MOST_RUN_MINUTES, None),
        rate=rate,
        accelerator=_matching(table, "accelerator", _NAME, "such as nvidia-tesla-t4", ""),
        accelerator_count=table.integer("accelerator_count", 1, _MOST_ACCELERATORS, 1),
        disk_gb=table.integer("disk_gb", _LEAST_DISK_GB, _MOST_DISK_GB, _DISK_GB),
        disk_type=_matching(table, "disk_type", _NAME, "such as pd-balanced", ""),
        spot=table.value("spot", bool, "true or false", False),
        service_account=_matching(table, "service_account", _ACCOUNT, "its email address", ""),
        scopes=_scopes(table),
        labels=_pairs(table, "labels", _LABEL, _LABEL_VALUE),
        metadata=_pairs(table, "metadata", _METADATA_KEY, _METADATA_VALUE),
        network=_matching(table, "network", _NETWORK, "a network's name", ""),
        subnet=_matching(table, "subnet", _NETWORK, "a subnet's name", ""),
        external_ip=table.value("external_ip", bool, "true or false", True),
        reach=table.choice("reach", Reach.AUTO),
        results=check_bucket(table.value("results", str, "gs://BUCKET/FOLDER", "")),
    )
    _check_whole(table, specification)
    return specification


def _zones(table: Table) -> tuple[str, ...]:
    zones = tuple(check_zone(name) for name in table.strings("zones", []))
    if not zones or len(set(zones)) != len(zones):
        raise UsageError(
            f"{table.where}: zones = {list(zones)}; expected zones in the order of preference, each once"
        )
    return zones


def _scopes(table: Table) -> tuple[str, ...]:
    scopes = tuple(table.strings("scopes", []))
    for scope in scopes:
        if not _SCOPE.fullmatch(scope):
            raise UsageError(f"{table.where}: scope {scope!r}; expected a name such as storage-ro")
    return scopes


def _pairs(
    table: Table, key: str, names: re.Pattern[str], values: re.Pattern[str]
) -> tuple[tuple[str, str], ...]:
    entries: dict[str, object] = table.value(key, dict, "a table of names and texts", {})
    no_secrets = _NO_SECRETS if key == "metadata" else ""
    for name, value in entries.items():
        if not names.fullmatch(name) or not isinstance(value, str) or not values.fullmatch(value):
            raise UsageError(
                f"{table.where}: {key}.{name} = {value!r}; expected a name that matches {names.pattern} and a text "
                f"that matches {values.pattern}{no_secrets}"
            )
        if name in RESERVED:
            raise UsageError(f"{table.where}: {key}.{name} is set by cudadent42; leave it out{no_secrets}")
    return tuple((name, str(value)) for name, value in sorted(entries.items()))


def _matching(
    table: Table, key: str, pattern: re.Pattern[str], expected: str, default: str | None = None
) -> str:
    value: str = table.value(key, str, expected, default)
    if (value or default is None) and not pattern.fullmatch(value):
        raise UsageError(f"{table.where}: {key} = {value!r}; expected {expected}")
    return value


def _check_whole(table: Table, specification: Specification) -> None:
    """What is wrong only together."""
    built_in = accelerators.built_in(specification.machine_type)
    if specification.accelerator and built_in and specification.accelerator != built_in:
        raise UsageError(
            f"{table.where}: accelerator = {specification.accelerator!r}, but a {specification.machine_type} "
            f"brings {built_in}; leave it out"
        )
    if bool(specification.scopes) != bool(specification.service_account):
        raise UsageError(
            f"{table.where}: expected service_account and scopes together; leave both out for a machine without "
            "access to the project"
        )
