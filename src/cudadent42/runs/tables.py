"""Which tables of tuned configurations a run asks beside those of the package, which its revision has."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from cudadent42.base.reading import read_bytes
from flashmoe_science.tuned.lookup import MOST_BYTES, switched_off, user_folder

_DIGITS = 16


def tables_of_user() -> dict[str, str]:
    """For a manifest's environment: names of the user's tables and the start of their SHA-256, under ``tuned tables``.
    Empty where none is asked."""
    folder = user_folder()
    if folder is None or switched_off():
        return {}
    said = []
    for path in sorted(folder.glob("*.toml")):
        with suppress(OSError):
            digest = hashlib.sha256(read_bytes(path, MOST_BYTES)).hexdigest()
            said.append(f"{path.name} {digest[:_DIGITS]}")
    return {"tuned tables": ", ".join(said)} if said else {}
