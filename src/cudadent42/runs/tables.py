"""Which tables of tuned configurations a run asks beside those of the package, which its revision has."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from cudadent42.base.reading import read_bytes
from flashmoe_science.tuned.lookup import switched_off, user_folder

_MOST_BYTES = 4 << 20
"""Of one that is asked."""

_DIGITS = 16


def tables_of_user() -> dict[str, str]:
    """For a manifest's environment: names of the user's tables and the start of their SHA-256, under ``tuned tables``.
    Empty where none is asked."""
    folder = user_folder()
    said = []
    for path in sorted(folder.glob("*.toml")) if folder is not None and not switched_off() else ():
        with suppress(OSError):
            digest = hashlib.sha256(read_bytes(path, _MOST_BYTES)).hexdigest()
            said.append(f"{path.name} {digest[:_DIGITS]}")
    return {"tuned tables": ", ".join(said)} if said else {}
