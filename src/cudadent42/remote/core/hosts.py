"""The remotes that the user has named, in a TOML file of their own: ``~/.config/cudadent42/remotes.toml``.

It is read, changed and replaced as a whole: under a lock, or of two that change it at once one would be lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.files import write_text
from cudadent42.base.folders import config_folder, locked, make_private
from cudadent42.base.reading import read_text
from cudadent42.base.toml import parse_toml
from cudadent42.remote.core.address import (
    Address,
    GceAddress,
    SpecificationFile,
    SshAddress,
    check_name,
    parse,
)
from cudadent42.remote.core.policy import STOP, After, Reach, check_bucket, parse_after, parse_reach

_KEYS = (
    "address",
    "specification",
    "folder",
    "python",
    "rate",
    "after",
    "reach",
    "results",
    "unguarded_start",
    "start",
)
_OF_CLOUD = ("rate", "after", "reach", "results")
"""What only a cloud machine has; all but ``after`` are in the specification of one that has it."""
DEFAULT_FOLDER = "cudadent42-remote"
"""Below the far side's home."""


@dataclass(frozen=True)
class Remote:
    name: str
    address: Address
    folder: str = DEFAULT_FOLDER
    """Where runs happen there; relative to the home of that user."""
    python: str = ""
    """A Python there to use as it is; empty for an environment of our own."""
    after: After = STOP
    """What becomes of a cloud machine after a run."""
    rate: str = ""
    """Of a cloud machine: its entry in the table of rates."""
    reach: Reach = Reach.AUTO
    results: str = ""
    """``gs://BUCKET[/FOLDER]`` that run folders are copied to; empty for none."""
    unguarded_start: bool = False
    """The user agreed that nothing but this machine ends a ``gce://`` machine from its start until it answers."""
    start: str = ""
    """Of a machine of SkyPilot's: its start's identity in the journal, by which its host key is known; else empty."""


_LOCK = "remotes.lock"
_START = re.compile(r"[0-9a-f]{32}")
_MEND = "mend it, or remove it and add the remotes again"


def config_file() -> Path:
    return config_folder() / "remotes.toml"


def remotes() -> dict[str, Remote]:
    """Every named remote. Raises UsageError where the file is malformed."""
    path = config_file()
    try:
        document = parse_toml(read_text(path), str(path))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{path} is not UTF-8 text; {_MEND}") from error
    except UsageError as error:
        raise UsageError(f"{error}; {_MEND}") from error
    return {name: _remote(path, name, entry) for name, entry in document.items()}


def _remote(path: Path, name: str, entry: Any) -> Remote:
    well_formed = isinstance(entry, dict) and all(
        isinstance(value, bool if key == "unguarded_start" else str) for key, value in entry.items()
    )
    if not well_formed:
        raise UsageError(
            f"{path}: [{name}] holds {entry!r}; expected a table of strings, and true or false for unguarded_start"
        )
    unknown = set(entry) - set(_KEYS)
    if unknown or ("address" in entry) == ("specification" in entry):
        raise UsageError(
            f"{path}: [{name}] has {', '.join(sorted(entry))}; expected address or "
            f"specification, and any of {', '.join(_KEYS[2:])}"
        )
    file = entry.get("specification")
    address = parse(entry["address"]) if file is None else SpecificationFile(Path(file))
    start = entry.get("start", "")
    if "start" in entry and not _START.fullmatch(start):
        raise UsageError(
            f"{path}: [{name}] has start = {start!r}; expected the id of a start in the journal; {_MEND}"
        )
    try:
        made = make(
            name,
            address,
            folder=entry.get("folder"),
            python=entry.get("python", ""),
            unguarded_start=entry.get("unguarded_start", False),
            **{key: entry.get(key) for key in _OF_CLOUD},
        )
    except UsageError as error:
        raise UsageError(f"{path}: [{name}]: {error}") from error
    return replace(made, start=start)


def make(
    name: str,
    address: Address,
    *,
    folder: str | None = None,
    python: str = "",
    after: str | None = None,
    rate: str | None = None,
    reach: str | None = None,
    results: str | None = None,
    unguarded_start: bool = False,
) -> Remote:
    """A remote of parts that a user gave; what they left out is None. Raises UsageError."""
    of_cloud = {"rate": rate, "after": after, "reach": reach, "results": results}
    given = [key for key, value in of_cloud.items() if value is not None]
    if isinstance(address, SshAddress) and given:
        raise UsageError(f"{', '.join(given)}: only for a machine of a cloud, not for {address}")
    if isinstance(address, SpecificationFile) and set(given) - {"after"}:
        raise UsageError(f"{', '.join(given)}: say it in the specification {address}")
    if unguarded_start and not isinstance(address, GceAddress):
        raise UsageError(f"unguarded start: only for a gce:// machine, not for {address}")
    if isinstance(address, GceAddress) and rate is None:
        raise UsageError(
            f"{address}: its price is needed; give --rate NAME, which `cudadent42 cost rates` lists"
        )
    return Remote(
        check_name(name),
        address,
        folder=check_folder(folder or DEFAULT_FOLDER),
        python=python,
        after=STOP if after is None else parse_after(after),
        rate=rate or "",
        reach=Reach.AUTO if reach is None else parse_reach(reach),
        results=check_bucket(results or ""),
        unguarded_start=unguarded_start,
    )


def check_folder(text: str) -> str:
    """A folder there: anything but nothing, an option, or control characters. It is only ever passed quoted."""
    if not text or text.startswith("-") or not text.isprintable():
        raise UsageError(f"folder {text!r}: expected a path, relative to the home there or absolute")
    return text


def get(name: str) -> Remote:
    """The remote called ``name``. Raises UsageError."""
    registered = remotes()
    if "://" in name:  # which may hold a password, so it is not repeated
        raise UsageError(
            "expected the name of a remote, not an address; give it one with: cudadent42 remote add NAME ADDRESS"
        )
    if name not in registered:
        names = f"expected one of {', '.join(registered)}" if registered else "none has been added yet"
        raise UsageError(
            f"there is no remote {name!r}; {names}. Add one with: cudadent42 remote add NAME ADDRESS"
        )
    return registered[name]


def save(remote: Remote) -> None:
    """Add or replace a remote."""
    with changing() as registered:
        before = registered.get(check_name(remote.name))
        if before is not None and before.address == remote.address and not remote.start:
            remote = replace(remote, start=before.start)  # it is the same machine, whose key is known
        registered[remote.name] = remote


def remove(name: str) -> None:
    with changing() as registered:
        get(name)
        del registered[name]


@contextmanager
def changing() -> Iterator[dict[str, Remote]]:
    """Every named remote, by name, to be changed; what is left in it becomes the file's. Whoever else changes the file
    waits meanwhile. An error leaves it as it was. Raises UsageError."""
    path = config_file()
    make_private(path.parent)
    with locked(path.parent / _LOCK):
        registered = remotes()
        yield registered
        write_text(path, "".join(_section(remote) for remote in registered.values()))


def _section(remote: Remote) -> str:
    key = "specification" if isinstance(remote.address, SpecificationFile) else "address"
    entries = {
        key: str(remote.address),
        "folder": remote.folder if remote.folder != DEFAULT_FOLDER else "",
        "python": remote.python,
        "rate": remote.rate,
        "after": str(remote.after) if remote.after != STOP else "",
        "reach": remote.reach.value if remote.reach is not Reach.AUTO else "",
        "results": remote.results,
        "unguarded_start": remote.unguarded_start,
        "start": remote.start,
    }
    # A JSON string of printable text is a TOML basic string, but for the pairs that it makes of what is beyond 16 bits.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items() if value]
    return "\n".join([f"[{json.dumps(remote.name)}]", *lines]) + "\n\n"
