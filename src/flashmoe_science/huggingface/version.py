"""Which versions of transformers this works with."""

from __future__ import annotations

from flashmoe_science.errors import InputError
from flashmoe_science.jit.requirements import install_command

OLDEST = "5.8.1"
"""That the tests were run with. 5.0 asks for masks in another way."""


def reject_older(version: str) -> None:
    """Raise InputError for a transformers before `OLDEST`."""
    if _minor(version) < _minor(OLDEST):
        raise InputError(
            f"transformers {version} is too old; expected {OLDEST} or newer, on Python 3.11 or newer: "
            f"{install_command('transformers')}"
        )


def _minor(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]
