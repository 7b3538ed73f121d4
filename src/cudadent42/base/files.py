"""Records and text in files that are replaced as a whole, and errors that name the file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cudadent42.base import reading
from cudadent42.base.errors import UnwritableError, UsageError
from cudadent42.base.serialise import decode, dumps

T = TypeVar("T")

_ROOM_BYTES = 1 << 16


def write_json(path: Path, record: object) -> None:
    """Replace ``path`` atomically by a record: a reader sees the old file or the new one, never half of one."""
    write_text(path, dumps(record) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` atomically."""
    with disk_errors(path.parent):
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a failed write into a message that names the folder."""
    try:
        yield
    except OSError as error:
        raise UnwritableError(
            f"cannot write to {folder}: {error.strerror or error}; what was measured so far is kept there. "
            "Free some space or choose another folder with --output-dir"
        ) from error


def require_room(folder: Path) -> None:
    """Raises UnwritableError where the folder's disk is full: whoever shares it fails then, whatever they work on."""
    probe = folder / f".room-{os.getpid()}"
    write_text(probe, "0" * _ROOM_BYTES)
    probe.unlink()


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def read_record(kind: type[T], path: Path, newest: int) -> T | None:
    """A record that states its schema_version, up to ``newest``; None where there is no file.

    Raises UsageError where it is of a newer version or cannot be understood.
    """
    data = read_json(path)
    if data is None:
        return None
    schema = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > newest:
        raise UsageError(
            f"{path} was written by a newer cudadent42 (schema {schema}); this one reads up to {newest}: upgrade it"
        )
    return decode_file(kind, data, path)


def decode_file(kind: type[T], data: Any, path: Path) -> T:
    """A record from what ``path`` holds. Raises UsageError where it is none."""
    try:
        return decode(kind, data)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is none. Raises UsageError where it cannot be read."""
    try:
        return reading.read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
