"""Text of the far side on a terminal here: it may be shown, and nothing more."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

Say = Callable[[str], None]
"""Shows the user here a line."""

_NOT_SHOWN = ("Cc", "Cf")
"""Unicode's control characters (a terminal takes them for orders) and format characters (they turn lines around)."""


def plain(text: str) -> str:
    """``text`` without what would move a cursor, change colours, fill the clipboard or turn a line around."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        letter for letter in lines if letter in "\n\t" or unicodedata.category(letter) not in _NOT_SHOWN
    )


def showing(to: TextIO) -> Callable[[bytes], None]:
    """Shows what comes in pieces, which may end in the middle of a letter; nothing once ``to`` is closed."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(chunk: bytes) -> None:
        with suppress(OSError):
            to.write(plain(decoder.decode(chunk)))
            to.flush()

    return show
