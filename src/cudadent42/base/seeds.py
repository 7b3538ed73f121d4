"""Seeds for separate purposes from one seed."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *names: object) -> int:
    """A 63-bit seed for one purpose, so that the random streams of different purposes are independent."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
