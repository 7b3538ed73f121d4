"""Text of the far side on a terminal here: it may be shown, and nothing more."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from cudadent42.base.shown import plain

Say = Callable[[str], None]
"""Shows the user here a line."""


def showing(to: TextIO) -> Callable[[bytes], None]:
    """Shows what comes in pieces, which may end in the middle of a letter; nothing once ``to`` is closed."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(chunk: bytes) -> None:
        with suppress(OSError):
            to.write(plain(decoder.decode(chunk)))
            to.flush()

    return show
