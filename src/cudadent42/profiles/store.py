"""``profile.json`` and ``diagnosis.json`` of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from cudadent42.base.errors import UsageError
from cudadent42.base.files import write_json
from cudadent42.base.reading import read_json
from cudadent42.base.serialise import decode
from cudadent42.profiles.records import DIAGNOSIS, PROFILE, SCHEMA_VERSION, Diagnosis, Profile

T = TypeVar("T")


def write(folder: Path, profile: Profile, diagnosis: Diagnosis) -> None:
    write_json(folder / PROFILE, profile)
    write_json(folder / DIAGNOSIS, diagnosis)


def load_profile(folder: Path) -> Profile | None:
    """The folder's profile; None where it has none. Raises UsageError for one that cannot be understood."""
    return _load(Profile, folder / PROFILE)


def load_diagnosis(folder: Path) -> Diagnosis | None:
    """The folder's diagnosis; None where it has none. Raises UsageError as ``load_profile``."""
    return _load(Diagnosis, folder / DIAGNOSIS)


def _load(kind: type[T], path: Path) -> T | None:
    try:
        data = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int):
        raise UsageError(f"{path} states no schema_version; expected a file that `cudadent42 profile` wrote")
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{path} was written by a newer cudadent42 (schema {version}); "
            f"this one reads up to {SCHEMA_VERSION}: upgrade it"
        )
    try:
        return decode(kind, data)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
