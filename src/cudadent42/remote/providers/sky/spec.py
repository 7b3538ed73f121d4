"""Which machine SkyPilot is to find, from a TOML file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.reading import read_text
from cudadent42.base.toml import Table, parse_toml
from cudadent42.cost import rates
from cudadent42.remote.core.address import SshAddress

SCHEME = "sky://"
"""Before the path of a file, in ``run --on``; before a machine's name, in the journal of starts."""

_CLUSTER = re.compile(r"[a-z](?:[a-z0-9-]{0,28}[a-z0-9])?")
_KEYS = frozenset(("cluster", "rate", "idle_minutes", "max_minutes", "keep", "resources"))
_RESOURCES: dict[str, tuple[type, ...]] = {
    "infra": (str,),
    "accelerators": (str,),
    "instance_type": (str,),
    "cpus": (str, int),
    "memory": (str, int),
    "use_spot": (bool,),
    "disk_size": (int,),
    "disk_tier": (str,),
    "image_id": (str,),
    "max_hourly_cost": (int, float),
}
"""Of SkyPilot's own section ``resources``, those that make sense for one machine and one run."""

_MOST_MINUTES = 1440
_IDLE_MINUTES = 10
_MAX_MINUTES = 120

ARCHITECTURES = {
    "T4": "sm_75",
    "A100": "sm_80",
    "A100-80GB": "sm_80",
    "A10": "sm_86",
    "A10G": "sm_86",
    "A40": "sm_86",
    "RTXA6000": "sm_86",
    "L4": "sm_89",
    "L40": "sm_89",
    "L40S": "sm_89",
    "RTX4090": "sm_89",
    "H100": "sm_90",
    "H100-SXM": "sm_90",
    "H200": "sm_90",
    "GH200": "sm_90",
    "B200": "sm_100",
}
"""Compute capability by SkyPilot's name of the accelerator."""


@dataclass(frozen=True)
class Spec:
    cluster: str
    """SkyPilot's name for it, and the remote's name here."""
    rate: str
    """Its entry in the table of rates: what is started costs, and is put on record first."""
    resources: dict[str, str | int | float | bool]
    idle_minutes: int = _IDLE_MINUTES
    """SkyPilot takes it down by itself after so long without work, whatever happens here."""
    max_minutes: int = _MAX_MINUTES
    """A run, with what makes the machine ready for it, is ended after so long, whatever happens here; then the machine
    is idle."""
    keep: bool = False
    """Leave it to the idle limit, for the next run; otherwise it is taken down once the results are here."""

    @property
    def machine(self) -> str:
        """Its name in the journal of starts."""
        return f"{SCHEME}{self.cluster}"

    @property
    def address(self) -> SshAddress:
        """The alias for ssh that SkyPilot writes."""
        return SshAddress(self.cluster)

    @property
    def architectures(self) -> tuple[str, ...]:
        """What the kernels are compiled for before anything is started; none where it is not known."""
        name = str(self.resources.get("accelerators", "")).partition(":")[0]
        return (ARCHITECTURES[name],) if name in ARCHITECTURES else ()


def load(path: Path) -> Spec:
    """The machine that ``path`` describes. Raises UsageError, with the place."""
    try:
        document = parse_toml(read_text(path), str(path))
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no file {path}; expected {SCHEME}FILE.toml, a machine for SkyPilot"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; expected a TOML file") from error
    except UsageError as error:
        raise UsageError(f"{error}; expected a TOML file") from error
    table = Table(document, str(path))
    table.check_keys(_KEYS)
    spec = Spec(
        cluster=_cluster(table, path.stem),
        rate=table.value("rate", str, "a name that `cudadent42 cost rates` lists"),
        resources=_resources(document.get("resources", {}), f"{path}, resources"),
        idle_minutes=table.integer("idle_minutes", 1, _MOST_MINUTES, _IDLE_MINUTES),
        max_minutes=table.integer("max_minutes", 1, _MOST_MINUTES, _MAX_MINUTES),
        keep=table.value("keep", bool, "true or false", False),
    )
    rates.load().get(spec.rate)
    return spec


def _cluster(table: Table, default: str) -> str:
    expected = "a name of lower-case letters, digits and dashes, 30 at most"
    name: str = table.value("cluster", str, expected, default)
    if not _CLUSTER.fullmatch(name):
        raise UsageError(f"{table.where}: cluster = {name!r}; expected {expected}")
    return name


def _resources(resources: Any, where: str) -> dict[str, str | int | float | bool]:
    if not isinstance(resources, dict):
        raise UsageError(f"{where}: expected a table, such as accelerators = 'L4:1'")
    Table(resources, where).check_keys(_RESOURCES)
    for key, value in resources.items():
        if type(value) not in _RESOURCES[key] or (isinstance(value, str) and not value.isprintable()):
            words = " or ".join(kind.__name__ for kind in _RESOURCES[key])
            raise UsageError(f"{where}: {key} = {value!r}; expected {words}")
    return dict(resources)
